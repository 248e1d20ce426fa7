"""Reads a text with a format, whole or cut, and writes calls in each format as the models do."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from itertools import count, pairwise
from typing import Any

from areal.services.dialects import CallArguments, CallEnd, CallStart, Piece, Reply
from areal.services.inference.data_proxy.parsers.reader import ReasoningFormat, ResponseReader, Tools
from areal.services.inference.data_proxy.parsers.registry import tool_format

Call = tuple[str, dict[str, Any]]

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "days": {"type": "integer"},
                    "units": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                    "where": {"type": "object"},
                    "exact": {"type": "boolean"},
                },
            },
        },
    },
    {"type": "function", "function": {"name": "now"}},
]


def new_reader(
    format_name: str | None, reasoning: ReasoningFormat | None = None, *, inside: bool = False, **more: Any
) -> ResponseReader:
    numbers = count()
    return ResponseReader(
        reasoning=reasoning,
        inside=inside,
        parse=tool_format(format_name).parse if format_name else None,
        tools=Tools(TOOLS),
        new_id=lambda: f"id{next(numbers)}",
        **more,
    )


def pieces_of(reader: ResponseReader, parts: Iterable[str]) -> list[Piece]:
    pieces: list[Piece] = []
    for part in parts:
        pieces.extend(reader.push(part))
    pieces.extend(reader.flush())
    return pieces


def read(reader: ResponseReader, parts: Iterable[str]) -> Reply:
    pieces = pieces_of(reader, parts)
    check_order(pieces)
    reply = Reply()
    reply.add(pieces)
    return reply


def check_order(pieces: Sequence[Piece]) -> None:
    """Calls are numbered, start before their arguments and do not overlap; only the last one may stay open."""
    open_call: int | None = None
    started = 0
    for piece in pieces:
        match piece:
            case CallStart(index, call_id, name):
                assert open_call is None and index == started and name and call_id
                open_call, started = index, started + 1
            case CallArguments(index, fragment):
                assert index == open_call and fragment
            case CallEnd(index):
                assert index == open_call
                open_call = None
            case _:
                assert piece.text and open_call is None


def cut(text: str, places: Iterable[int]) -> list[str]:
    edges = [0, *sorted({place % (len(text) + 1) for place in places}), len(text)]
    return [text[start:end] for start, end in pairwise(edges)]


def calls_of(reply: Reply) -> list[Call]:
    return [(call.name, json.loads(call.arguments)) for call in reply.calls]


def _hermes(calls: Sequence[Call]) -> str:
    each = [json.dumps({"name": name, "arguments": arguments}) for name, arguments in calls]
    return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in each)


def _tag_list(open_tag: str, close_tag: str, key: str = "arguments") -> Any:
    def write(calls: Sequence[Call]) -> str:
        return open_tag + json.dumps([{"name": name, key: arguments} for name, arguments in calls]) + close_tag

    return write


def _cohere(calls: Sequence[Call]) -> str:
    each = [
        f'    {{"tool_call_id": "{index}", "tool_name": "{name}", "parameters": {json.dumps(arguments)}}}'
        for index, (name, arguments) in enumerate(calls)
    ]
    return "<|START_ACTION|>[\n" + ",\n".join(each) + "\n]<|END_ACTION|>"


def _llama(calls: Sequence[Call]) -> str:
    return "; ".join(json.dumps({"name": name, "parameters": arguments}) for name, arguments in calls)


def _mistral_named(calls: Sequence[Call]) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{json.dumps(arguments)}" for name, arguments in calls)


def _pythonic(calls: Sequence[Call]) -> str:
    def one(name: str, arguments: dict[str, Any]) -> str:
        return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"

    return "[" + ", ".join(one(*call) for call in calls) + "]"


def _value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _xml(open_tag: str, close_tag: str, function: str, function_end: str, parameter: str, framed: bool) -> Any:
    edge = "\n" if framed else ""

    def write(calls: Sequence[Call]) -> str:
        written = []
        for name, arguments in calls:
            values = "".join(
                f"{parameter % key}{edge}{_value(value)}{edge}</parameter>\n" for key, value in arguments.items()
            )
            written.append(f"{open_tag}\n{function % name}\n{values}{function_end}\n{close_tag}")
        return "\n".join(written)

    return write


def _apertus(calls: Sequence[Call]) -> str:
    return "<|tools_prefix|>" + json.dumps([{name: arguments} for name, arguments in calls]) + "<|tools_suffix|>"


def _hy3(calls: Sequence[Call]) -> str:
    text = _glm(calls).replace("\n<arg_key>", "<tool_sep>\n<arg_key>", 1) if calls[0][1] else _glm(calls)
    tags = re.compile(r"<(/?(?:tool_call|tool_sep|arg_key|arg_value)s?)>")
    return tags.sub(r"<\1:opensource>", f"<tool_calls>\n{text}\n</tool_calls>")


def _minimax_m3(calls: Sequence[Call]) -> str:
    mark = "]<]minimax[>["

    def inner(value: Any) -> str:
        if isinstance(value, dict):
            return "".join(f"{mark}<{key}>{inner(each)}{mark}</{key}>" for key, each in value.items())
        if isinstance(value, list):
            return "".join(f"{mark}<item>{inner(each)}{mark}</item>" for each in value)
        return _value(value)

    each = [f'{mark}<invoke name="{name}">{inner(arguments)}{mark}</invoke>\n' for name, arguments in calls]
    return f"{mark}<tool_call>\n{''.join(each)}{mark}</tool_call>"


def _minicpm(calls: Sequence[Call]) -> str:
    def value(item: Any) -> str:
        text = _value(item)
        return f"<![CDATA[{text}]]>" if set("<&\n") & set(text) else text

    return "\n".join(
        f'<function name="{name}">'
        + "".join(f'<param name="{key}">{value(each)}</param>' for key, each in arguments.items())
        + "</function>"
        for name, arguments in calls
    )


def _glm(calls: Sequence[Call]) -> str:
    written = []
    for name, arguments in calls:
        pairs = "".join(
            f"<arg_key>{key}</arg_key>\n<arg_value>{_value(value)}</arg_value>\n" for key, value in arguments.items()
        )
        written.append(f"<tool_call>{name}\n{pairs}</tool_call>")
    return "\n".join(written)


def _deepseek_v3(calls: Sequence[Call]) -> str:
    each = [
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{json.dumps(arguments)}\n```<｜tool▁call▁end｜>"
        for name, arguments in calls
    ]
    return "<｜tool▁calls▁begin｜>" + "\n".join(each) + "<｜tool▁calls▁end｜>"


def _deepseek_v31(calls: Sequence[Call]) -> str:
    each = [
        f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{json.dumps(arguments)}<｜tool▁call▁end｜>"
        for name, arguments in calls
    ]
    return "<｜tool▁calls▁begin｜>" + "".join(each) + "<｜tool▁calls▁end｜>"


def _kimi(calls: Sequence[Call]) -> str:
    each = [
        f"<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>{json.dumps(arguments)}<|tool_call_end|>"
        for index, (name, arguments) in enumerate(calls)
    ]
    return "<|tool_calls_section_begin|>" + "".join(each) + "<|tool_calls_section_end|>"


def _harmony(calls: Sequence[Call]) -> str:
    channel = "<|channel|>commentary to=functions."
    each = [f"{channel}{name} <|constrain|>json<|message|>{json.dumps(arguments)}" for name, arguments in calls]
    return "<|call|><|start|>assistant".join(each)


def _gemma(calls: Sequence[Call]) -> str:
    def value(item: Any) -> str:
        if isinstance(item, str):
            return f'<|"|>{item}<|"|>'
        if isinstance(item, dict):
            return "{" + ",".join(f"{key}:{value(each)}" for key, each in item.items()) + "}"
        return "[" + ",".join(map(value, item)) + "]" if isinstance(item, list) else json.dumps(item)

    return "".join(f"<|tool_call>call:{name}{value(arguments)}<tool_call|>" for name, arguments in calls)


def _muse(calls: Sequence[Call]) -> str:
    write = _xml("<atem:function_calls>", "</atem:function_calls>", '<atem:invoke name="%s">', "</atem:invoke>",
                 '<atem:parameter name="%s">', False)  # fmt: skip
    each = [f" to={name}<|message|>{write([(name, arguments)])}" for name, arguments in calls]
    return "<|eom|><|start|>assistant".join(each).replace("</parameter>", "</atem:parameter>") + "<|eot|>"


_QWEN_XML = ("<function=%s>", "</function>", "<parameter=%s>", True)
_INVOKE = ('<invoke name="%s">', "</invoke>", '<parameter name="%s">', False)

WRITERS: dict[str, Any] = {
    "hermes": _hermes,
    "jamba": _tag_list("<tool_calls>", "</tool_calls>"),
    "cohere_command3": _cohere,
    "nemotron_json": _tag_list("<TOOLCALL>", "</TOOLCALL>"),
    "granite": _tag_list("<|tool_call|>", ""),
    "phi4_mini_json": _tag_list("functools", ""),
    "internlm": _tag_list("<|action_start|><|plugin|>", "<|action_end|>", "parameters"),
    "mistral": _tag_list("[TOOL_CALLS] ", ""),
    "llama3_json": _llama,
    "pythonic": _pythonic,
    "qwen3_coder": _xml("<tool_call>", "</tool_call>", *_QWEN_XML),
    "seed_oss": _xml("<seed:tool_call>", "</seed:tool_call>", *_QWEN_XML[:3], False),
    "minimax_m2": _xml("<minimax:tool_call>", "</minimax:tool_call>", *_INVOKE),
    "glm45": _glm,
    "deepseek_v3": _deepseek_v3,
    "deepseek_v31": _deepseek_v31,
    "kimi_k2": _kimi,
    "gpt_oss": _harmony,
    "gemma4": _gemma,
    "functiongemma": lambda calls: (
        _gemma(calls)
        .replace("<|tool_call>", "<start_function_call>")
        .replace("<tool_call|>", "<end_function_call>")
        .replace('<|"|>', "<escape>")
    ),
    "olmo3": lambda calls: "\n".join(
        ["<function_calls>", *(_pythonic([call])[1:-1] for call in calls), "</function_calls>"]
    ),
    "lfm2": lambda calls: f"<|tool_call_start|>{_pythonic(calls)}<|tool_call_end|>",
    "muse_glimmer": _muse,
    "apertus": _apertus,
    "gigachat3": lambda calls: "".join(
        f'<|function_call|>{{"name": "{name}", "arguments": {json.dumps(arguments)}}}' for name, arguments in calls
    ),
    "longcat": lambda calls: _hermes(calls).replace("tool_call>", "longcat_tool_call>"),
    "granite_20b_fc": lambda calls: (
        _hermes(calls).replace("</tool_call>", "").replace("<tool_call>", "<function_call>")
    ),
    "hy_v3": _hy3,
    "minimax_m3": _minimax_m3,
    "mimo": _xml("<tool_call>", "</tool_call>", *_QWEN_XML[:3], False),
    "minicpm5": _minicpm,
    "dots": _xml("<dots_function_call>", "</dots_function_call>", *_INVOKE),
}
OTHER_WRITERS: list[tuple[str, Any]] = [
    ("mistral", _mistral_named),
    ("llama3_json", lambda calls: "<|python_tag|>" + _llama(calls)),
    ("pythonic", lambda calls: f"<|python_start|>{_pythonic(calls)}<|python_end|>"),
    ("deepseek_v3", _deepseek_v31),
]


def dsml(calls: Sequence[Call]) -> str:
    written = []
    for name, arguments in calls:
        values = "".join(
            f'<｜DSML｜parameter name="{key}" string="{str(isinstance(value, str)).lower()}">{_value(value)}'
            "</｜DSML｜parameter>\n"
            for key, value in arguments.items()
        )
        written.append(f'<｜DSML｜invoke name="{name}">\n{values}</｜DSML｜invoke>\n')
    return f"<｜DSML｜function_calls>\n{''.join(written)}</｜DSML｜function_calls>"


WRITERS["deepseek_v32"] = dsml
WRITERS["deepseek_v41"] = lambda calls: (
    dsml(calls).replace("｜DSML｜", "｜DSML｜ ").replace("function_calls>", "calls>")
)
WRITERS["deepseek_v4"] = lambda calls: dsml(calls).replace("function_calls>", "tool_calls>")
