"""The names of the parsers of tool calls and of reasoning, which manifests check and data proxies look up.

Case does not matter, nor does ``-`` for ``_``. A parser that reads whole responses (``WHOLE``) is one of both kinds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from areal.dataclasses import dataclass
from areal.errors import UsageFault, did_you_mean

NO_PARSER = "none"
WHOLE = ("gpt_oss", "muse_glimmer")


@dataclass(frozen=True)
class ParserNames:
    """The parsers of one ``kind``: each spelling of a parser, with its canonical name."""

    kind: str
    canonical: Mapping[str, str]

    @property
    def spellings(self) -> list[str]:
        return [*self.canonical, NO_PARSER]

    def resolve(self, name: str) -> str:
        """Return the canonical name, or ``none``. Raises UsageFault that lists the names."""
        plain = name.lower().replace("-", "_")
        if plain == NO_PARSER:
            return NO_PARSER
        if plain in self.canonical:
            return self.canonical[plain]
        near = did_you_mean(name, self.canonical)
        raise UsageFault(
            f'"{name}" is not a {self.kind} parser{near}', hint=f"there are: {', '.join(sorted(self.spellings))}"
        )


def _names(kind: str, parsers: Mapping[str, Iterable[str]]) -> ParserNames:
    return ParserNames(kind, {each: name for name, aliases in parsers.items() for each in (name, *aliases)})


_TOOL_CALLS: Mapping[str, tuple[str, ...]] = {
    "gpt_oss": ("harmony", "openai", "openai_gptoss"),
    "muse_glimmer": ("atem", "muse"),
    "gemma4": (),
    "functiongemma": (),
    "lfm2": (),
    "olmo3": (),
    "qwen3_coder": ("qwen3_xml", "step3p5", "nanbeige"),
    "mimo": (),
    "minicpm5": (),
    "dots": (),
    "seed_oss": (),
    "glm45": ("glm", "glm47", "ling3", "poolside_v1", "spark25"),
    "hy_v3": ("hunyuan",),
    "minimax_m3": (),
    "minimax_m2": (),
    "deepseek_v32": ("deepseekv32",),
    "deepseek_v4": ("deepseekv4",),
    "deepseek_v41": ("deepseekv41",),
    "deepseek_v3": ("deepseekv3",),
    "deepseek_v31": ("deepseekv31",),
    "kimi_k2": (),
    "mistral": (),
    "internlm": ("interns1",),
    "apertus": ("apertus2509",),
    "gigachat3": (),
    "longcat": (),
    "granite_20b_fc": (),
    "granite": (),
    "jamba": ("hunyuan_a13b", "minimax"),
    "cohere_command3": ("cohere_command4",),
    "nemotron_json": (),
    "hermes": ("qwen", "qwen25", "qwen3", "qwen3_json", "granite4", "trinity"),
    "phi4_mini_json": ("phi4_mini",),
    "llama3_json": ("llama3", "llama4_json", "xlam"),
    "pythonic": ("llama4_pythonic", "llama4"),
}
_REASONING: Mapping[str, tuple[str, ...]] = {
    "qwen3": (
        *("dots", "granite_thinking_parser", "interns1", "mimo", "minicpmv", "nanbeige", "nemotron_3", "nemotron_v3"),
        *("olmo3", "poolside_v1"),
    ),
    "qwen3_thinking": (),
    "deepseek_r1": ("gigachat35",),
    "deepseek_v3": ("deepseek_v4", "deepseek_v41", "holo2"),
    "glm45": ("glm47", "ling3"),
    "kimi_k2": (),
    "gemma4": (),
    "kimi": (),
    "minimax_m2": ("minimax",),
    "minimax_m3": (),
    "step3": ("step3p5",),
    "seed_oss": (),
    "mistral": (),
    "granite": (),
    "hy_v3": (),
    "apertus": ("apertus2509",),
}
_BOTH = (*WHOLE, "cohere_command3")

TOOL_CALL_PARSERS = _names("tool-call", _TOOL_CALLS)
REASONING_PARSERS = _names("reasoning", {**_REASONING} | {each: _TOOL_CALLS[each] for each in _BOTH})


def parser_conflict(tool_call: str | None, reasoning: str | None) -> str | None:
    """Return why two valid names do not go together; None if they do."""
    if tool_call is None or reasoning is None:
        return None
    tools, thoughts = TOOL_CALL_PARSERS.resolve(tool_call), REASONING_PARSERS.resolve(reasoning)
    if tools == thoughts or not (thoughts in WHOLE or (tools in WHOLE and thoughts != NO_PARSER)):
        return None
    whole, other = (reasoning, tool_call) if thoughts in WHOLE else (tool_call, reasoning)
    return f'the parser "{whole}" reads tool calls and reasoning, so it does not go with the parser "{other}"'
