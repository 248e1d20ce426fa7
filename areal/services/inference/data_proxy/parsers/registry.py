"""Tool-call and reasoning formats by vLLM's and SGLang's names, and their detection from a chat template."""

from __future__ import annotations

import random
import string
from collections.abc import Mapping

from areal.dataclasses import dataclass
from areal.http.headers import unique_id
from areal.services.inference.data_proxy.parsers.json_calls import (
    DEEPSEEK,
    KIMI,
    AfterTag,
    BetweenTags,
    parse_llama,
    parse_mistral,
    read_keyed_calls,
)
from areal.services.inference.data_proxy.parsers.reader import NewId, Parse, ReasoningFormat
from areal.services.inference.data_proxy.parsers.text_calls import (
    HARMONY_MARKERS,
    MUSE_MARKERS,
    GemmaCalls,
    PairCalls,
    PythonCalls,
    TreeCalls,
    XmlCalls,
    parse_harmony,
    parse_muse,
    parse_pythonic,
)
from areal.wire.parsers import REASONING_PARSERS, TOOL_CALL_PARSERS, WHOLE

_ids = random.Random()


def _mistral_id() -> str:
    """Return nine letters and digits: Mistral's templates refuse any other id."""
    return "".join(_ids.choices(string.ascii_letters + string.digits, k=9))


@dataclass(frozen=True)
class ToolFormat:
    """The tool-call format of one model family.

    ``markers`` must stay in the text even if they are special tokens. ``any_call`` and ``named_call`` (with ``%s``) are
    the start of a call: at the end of the prompt they force the model to complete a call; None if no text does. A chat
    template with all of ``signs``, and without ``unlike``, uses this format. Other names: ``areal.wire.parsers``.
    """

    name: str
    parse: Parse
    markers: tuple[str, ...]
    any_call: str | None
    named_call: str | None
    signs: tuple[str, ...] = ()
    new_id: NewId = lambda: unique_id("call_")
    unlike: str | None = None

    def shown_in(self, template: str) -> bool:
        """Return whether a chat template uses this format."""
        is_other = self.unlike is not None and self.unlike in template
        return bool(self.signs) and not is_other and all(sign in template for sign in self.signs)

    @property
    def whole(self) -> bool:
        """Whether the format covers the whole response including reasoning, so that responses without tools are parsed
        too."""
        return self.name in WHOLE

    @property
    def bare_arguments(self) -> bool:
        """Whether ``named_call`` ends where the call's JSON arguments begin."""
        return self.named_call is not None and self.named_call.endswith(
            (":", "```json\n", DEEPSEEK.separator, "<|message|>")
        )


_HERMES = BetweenTags("<tool_call>", "</tool_call>")
_JAMBA = BetweenTags("<tool_calls>", "</tool_calls>")
_INTERNLM = BetweenTags("<|action_start|><|plugin|>", "<|action_end|>")
_COHERE = BetweenTags("<|START_ACTION|>", "<|END_ACTION|>")
_NEMOTRON = BetweenTags("<TOOLCALL>", "</TOOLCALL>")
_APERTUS = BetweenTags("<|tools_prefix|>", "<|tools_suffix|>", read_keyed_calls)
_LONGCAT = BetweenTags("<longcat_tool_call>", "</longcat_tool_call>")
_GIGACHAT = AfterTag("<|function_call|>")
_GRANITE = AfterTag("<|tool_call|>")
_GRANITE_20B = AfterTag("<function_call>")
_PHI = AfterTag("functools")
_QWEN_XML, _MIMO = (
    XmlCalls("<tool_call>", "</tool_call>", "<function=", "</function>", "<parameter=", "</parameter>", framed=framed)
    for framed in (True, False)
)
_MINICPM = XmlCalls(
    "<tool_call>", "</tool_call>", "<function name=", "</function>", "<param name=", "</param>", cdata=True
)  # fmt: skip
_DOTS = XmlCalls(
    "<dots_function_call>", "</dots_function_call>", "<invoke name=", "</invoke>", "<parameter name=", "</parameter>"
)  # fmt: skip
_SEED = XmlCalls(
    "<seed:tool_call>", "</seed:tool_call>", "<function=", "</function>", "<parameter=", "</parameter>"
)  # fmt: skip
_MINIMAX = XmlCalls(
    "<minimax:tool_call>", "</minimax:tool_call>", "<invoke name=", "</invoke>", "<parameter name=", "</parameter>"
)  # fmt: skip
_DSML, _DSML_V4, _DSML_V41 = (
    XmlCalls(
        f"<｜DSML｜{space}{calls}>", f"</｜DSML｜{space}{calls}>", f"<｜DSML｜{space}invoke name=",
        f"</｜DSML｜{space}invoke>", f"<｜DSML｜{space}parameter name=", f"</｜DSML｜{space}parameter>",
    )
    for space, calls in (("", "function_calls"), ("", "tool_calls"), (" ", "calls"))
)  # fmt: skip
_GLM = PairCalls()
_HY3 = PairCalls((":opensource", ""), around=True)
_M3 = TreeCalls("]<]minimax[>[")
_GEMMA = GemmaCalls("<|tool_call>", "<tool_call|>", '<|"|>')
_FUNCTION_GEMMA = GemmaCalls("<start_function_call>", "<end_function_call>", "<escape>")
_LFM = PythonCalls("<|tool_call_start|>", "<|tool_call_end|>")
_OLMO = PythonCalls("<function_calls>", "</function_calls>", in_list=False)
_DEEPSEEK_CALL = DEEPSEEK.begin + DEEPSEEK.call

TOOL_FORMATS = (
    ToolFormat(
        "gpt_oss", parse_harmony, HARMONY_MARKERS,
        "<|channel|>commentary to=functions.", "<|channel|>commentary to=functions.%s <|constrain|>json<|message|>",
        ("<|channel|>analysis", "<|channel|>commentary"),
    ),
    ToolFormat(
        "muse_glimmer", parse_muse, MUSE_MARKERS,
        None, ' to=%s<|message|><atem:function_calls>\n<atem:invoke name="%s">\n',
        ("<atem:invoke name=",),
    ),
    *(
        ToolFormat(
            name, calls.parse, calls.markers, f"{calls.open}call:", f"{calls.open}call:%s{{", (f"'{calls.open}call:'",),
        )
        for name, calls in (("gemma4", _GEMMA), ("functiongemma", _FUNCTION_GEMMA))
    ),
    ToolFormat(
        "lfm2", _LFM.parse, (_LFM.open, _LFM.close), f"{_LFM.open}[", f"{_LFM.open}[%s(", (f'"{_LFM.open}[" +',),
    ),
    ToolFormat(
        "olmo3", _OLMO.parse, (_OLMO.open, _OLMO.close), f"{_OLMO.open}\n", f"{_OLMO.open}\n%s(", (_OLMO.open,),
    ),
    ToolFormat(
        "qwen3_coder", _QWEN_XML.parse, ("<tool_call>", "</tool_call>"),
        "<tool_call>\n<function=", "<tool_call>\n<function=%s>\n", ("<tool_call>", "<function="),
    ),
    ToolFormat(
        "mimo", _MIMO.parse, ("<tool_call>", "</tool_call>"),
        "<tool_call>\n<function=", "<tool_call>\n<function=%s>\n",
    ),
    ToolFormat(
        "minicpm5", _MINICPM.parse, ("<function", "</function>", "<param", "</param>"),
        '<function name="', '<function name="%s">', ('<function name="', '<param name="', "CDATA"),
    ),
    ToolFormat(
        "dots", _DOTS.parse, (_DOTS.open, _DOTS.close),
        f'{_DOTS.open}\n<invoke name="', f'{_DOTS.open}\n<invoke name="%s">\n', (_DOTS.open,),
    ),
    ToolFormat(
        "seed_oss", _SEED.parse, ("<seed:tool_call>", "</seed:tool_call>"),
        "<seed:tool_call>\n<function=", "<seed:tool_call>\n<function=%s>\n", ("<seed:tool_call>",),
    ),
    ToolFormat(
        "glm45", _GLM.parse, _GLM.markers, "<tool_call>", "<tool_call>%s\n", ("<arg_key>",),
    ),
    ToolFormat(
        "hy_v3", _HY3.parse, _HY3.markers, "<tool_calls:opensource>\n<tool_call:opensource>",
        "<tool_calls:opensource>\n<tool_call:opensource>%s<tool_sep:opensource>\n", (":opensource'", "<tool_sep{}>"),
    ),
    ToolFormat(
        "minimax_m3", _M3.parse, (_M3.mark,), f'{_M3.mark}<tool_call>\n{_M3.mark}<invoke name="',
        f'{_M3.mark}<tool_call>\n{_M3.mark}<invoke name="%s">', (_M3.mark, "<invoke name="),
    ),
    ToolFormat(
        "minimax_m2", _MINIMAX.parse, (_MINIMAX.open, _MINIMAX.close),
        '<minimax:tool_call>\n<invoke name="', '<minimax:tool_call>\n<invoke name="%s">\n', (_MINIMAX.open,),
    ),
    ToolFormat(
        "deepseek_v32", _DSML.parse, ("｜DSML｜",),
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="', '<｜DSML｜function_calls>\n<｜DSML｜invoke name="%s">\n',
        ("｜DSML｜", "function_calls>"),
    ),
    ToolFormat(
        "deepseek_v4", _DSML_V4.parse, ("｜DSML｜",),
        '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="', '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="%s">\n',
        ("｜DSML｜", "tool_calls>"),
    ),
    ToolFormat(
        "deepseek_v41", _DSML_V41.parse, ("｜DSML｜",),
        '<｜DSML｜ calls>\n<｜DSML｜ invoke name="', '<｜DSML｜ calls>\n<｜DSML｜ invoke name="%s">\n',
    ),
    ToolFormat(
        "deepseek_v3", DEEPSEEK.parse, DEEPSEEK.markers,
        f"{_DEEPSEEK_CALL}function{DEEPSEEK.separator}",
        f"{_DEEPSEEK_CALL}function{DEEPSEEK.separator}%s\n```json\n", (DEEPSEEK.begin, "```json"),
    ),
    ToolFormat(
        "deepseek_v31", DEEPSEEK.parse, DEEPSEEK.markers,
        _DEEPSEEK_CALL, f"{_DEEPSEEK_CALL}%s{DEEPSEEK.separator}", (DEEPSEEK.begin,),
    ),
    ToolFormat(
        "kimi_k2", KIMI.parse, KIMI.markers, f"{KIMI.begin}{KIMI.call}functions.", None, (KIMI.separator,),
    ),
    ToolFormat(
        "mistral", parse_mistral, ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
        "[TOOL_CALLS]", None, ("[TOOL_CALLS]",), _mistral_id,
    ),
    ToolFormat(
        "internlm", _INTERNLM.parse, ("<|action_start|>", "<|plugin|>", "<|action_end|>"),
        _INTERNLM.open + '\n{"name":', _INTERNLM.open + '\n{"name": "%s", "parameters":', (_INTERNLM.open,),
    ),
    ToolFormat(
        "apertus", _APERTUS.parse, (_APERTUS.open, _APERTUS.close),
        '<|tools_prefix|>[{"', '<|tools_prefix|>[{"%s":', (_APERTUS.open,),
    ),
    ToolFormat(
        "gigachat3", _GIGACHAT.parse, (_GIGACHAT.open,),
        '<|function_call|>{"name":', '<|function_call|>{"name": "%s", "arguments":', (_GIGACHAT.open,),
    ),
    ToolFormat(
        "longcat", _LONGCAT.parse, (_LONGCAT.open, _LONGCAT.close),
        '<longcat_tool_call>\n{"name":', '<longcat_tool_call>\n{"name": "%s", "arguments":', (_LONGCAT.open,),
    ),
    ToolFormat(
        "granite_20b_fc", _GRANITE_20B.parse, (_GRANITE_20B.open,),
        '<function_call> {"name":', '<function_call> {"name": "%s", "arguments":',
    ),
    ToolFormat(
        "granite", _GRANITE.parse, ("<|tool_call|>",),
        '<|tool_call|>[{"name":', '<|tool_call|>[{"name": "%s", "arguments":', ("<|tool_call|>",),
    ),
    ToolFormat(
        "jamba", _JAMBA.parse, ("<tool_calls>", "</tool_calls>"),
        '<tool_calls>[\n{"name":', '<tool_calls>[\n{"name": "%s", "arguments":', ("<tool_calls>",),
    ),
    ToolFormat(
        "cohere_command3", _COHERE.parse, (_COHERE.open, _COHERE.close),
        '<|START_ACTION|>[\n    {"tool_name":', '<|START_ACTION|>[\n    {"tool_name": "%s", "parameters":',
        (_COHERE.open,),
    ),
    ToolFormat(
        "nemotron_json", _NEMOTRON.parse, (_NEMOTRON.open, _NEMOTRON.close),
        '<TOOLCALL>[{"name":', '<TOOLCALL>[{"name": "%s", "arguments":', (_NEMOTRON.open,),
    ),
    ToolFormat(
        "hermes", _HERMES.parse, ("<tool_call>", "</tool_call>"),
        '<tool_call>\n{"name":', '<tool_call>\n{"name": "%s", "arguments":', ("<tool_call>",),
        unlike="<invoke name=",
    ),
    ToolFormat(
        "phi4_mini_json", _PHI.parse, (),
        'functools[{"name":', 'functools[{"name": "%s", "arguments":', ("functools",),
    ),
    ToolFormat(
        "llama3_json", parse_llama, ("<|python_tag|>",),
        '{"name":', '{"name": "%s", "parameters":',
        ('{"name": function name, "parameters":',),
    ),
    ToolFormat(
        "pythonic", parse_pythonic, ("<|python_start|>", "<|python_end|>"), "[", "[%s(", ("[func_name1(",),
    ),
)  # fmt: skip

REASONING_FORMATS: Mapping[str, ReasoningFormat] = {
    "qwen3": ReasoningFormat("<think>", "</think>"),
    "qwen3_thinking": ReasoningFormat("<think>", "</think>"),
    "deepseek_r1": ReasoningFormat("<think>", "</think>", always=True),
    "deepseek_v3": ReasoningFormat("<think>", "</think>"),
    "glm45": ReasoningFormat("<think>", "</think>", breaks=("<tool_call>",)),
    "kimi_k2": ReasoningFormat("<think>", "</think>", breaks=(KIMI.begin,)),
    "gemma4": ReasoningFormat("<|channel>thought", "<channel|>", breaks=(_GEMMA.open,), special=("<|channel>",)),
    "cohere_command3": ReasoningFormat("<|START_THINKING|>", "<|END_THINKING|>", breaks=(_COHERE.open,)),
    "kimi": ReasoningFormat("◁think▷", "◁/think▷"),
    "hy_v3": ReasoningFormat("<think:opensource>", "</think:opensource>", breaks=("<tool_calls:opensource>",)),
    "minimax_m3": ReasoningFormat("<mm:think>", "</mm:think>", breaks=(f"{_M3.mark}<tool_call>",)),
    "apertus": ReasoningFormat("<|inner_prefix|>", "<|inner_suffix|>", breaks=(_APERTUS.open,)),
    "minimax_m2": ReasoningFormat("<think>", "</think>", always=True),
    "step3": ReasoningFormat("<think>", "</think>", always=True),
    "seed_oss": ReasoningFormat("<seed:think>", "</seed:think>", always=True),
    "mistral": ReasoningFormat("[THINK]", "[/THINK]"),
    "granite": ReasoningFormat("Here is my thought process:", "Here is my response:"),
}

_BY_NAME = {form.name: form for form in TOOL_FORMATS}


def tool_format(name: str) -> ToolFormat:
    """Return the format with this name or alias, which is not ``none``. Raises UsageFault that lists the names."""
    return _BY_NAME[TOOL_CALL_PARSERS.resolve(name)]


def reasoning_format(name: str) -> ReasoningFormat:
    """Return the format with this name, which is neither ``none`` nor of whole responses. Raises UsageFault that lists
    the known names."""
    return REASONING_FORMATS[REASONING_PARSERS.resolve(name)]


def detect_tool_format(template: str) -> ToolFormat | None:
    """Return the format in which a model with this chat template writes its calls, if the template shows it."""
    return next((form for form in TOOL_FORMATS if form.shown_in(template)), None)
