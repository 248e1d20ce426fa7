"""Tools of a request and the parsing of its answer.

A tool call is forced by starting it: the prompt ends within a call in the model's own format, so that the model can
only complete a call. A named tool's name is in that start; the arguments are the model's, held to the schema by engines
that have grammars.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from areal.errors import UsageFault
from areal.services.http.errors import bad_request
from areal.services.inference.data_proxy.fields import Fields, unsupported
from areal.services.inference.data_proxy.parsers.reader import (
    PLAIN,
    ReasoningFormat,
    ResponseReader,
    Tools,
    is_name_char,
)
from areal.services.inference.data_proxy.parsers.registry import (
    NO_PARSER,
    ToolFormat,
    detect_tool_format,
    reasoning_format,
    tool_format,
    whole_format,
)
from areal.services.inference.data_proxy.template import ChatTemplate, read_tools
from areal.services.inference.engines.base import Capabilities

PROMPT_TAIL_TOKENS = 32


@dataclass(frozen=True)
class Parsers:
    """The formats that a model is served with. None: such text stays content."""

    tools: ToolFormat | None = None
    reasoning: ReasoningFormat | None = None


def load_parsers(tool_call_parser: str | None, reasoning_parser: str | None, template: str | None) -> Parsers:
    """By name. Without a name calls are parsed in the format that the chat template shows, and reasoning stays content.
    Raises UsageFault for an unknown name."""
    if tool_call_parser is None:
        tools = detect_tool_format(template or "")
    else:
        tools = None if tool_call_parser == NO_PARSER else tool_format(tool_call_parser)
    if reasoning_parser in (None, NO_PARSER):
        return Parsers(tools)
    name = str(reasoning_parser)
    whole = whole_format(name)
    if whole is None:
        reasoning = reasoning_format(name)
        return Parsers(tools, None if tools is not None and tools.whole else reasoning)
    if tool_call_parser is not None and tools is not whole:
        raise UsageFault(
            f"the parser {name!r} reads calls too: it does not go with --tool-call-parser {tool_call_parser}"
        )
    return Parsers(whole)


@dataclass(frozen=True)
class ToolUse:
    """How a request uses tools. ``shown`` are those in the prompt.

    ``primer`` ends the prompt where a call is forced: it is the call's start. ``response_format`` holds the rest of the
    call to the tool's schema, where the engine can do that.
    """

    shown: list[dict[str, Any]] | None = None
    form: ToolFormat | None = None
    primer: str = ""
    one_call: bool = False
    response_format: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class ResponseParsing:
    """How the choices of one answer are parsed."""

    reasoning: ReasoningFormat | None = None
    tools: ToolUse = ToolUse()

    @property
    def markers(self) -> frozenset[str]:
        """Texts to keep in the answer even where they are special tokens."""
        reasoning, form = self.reasoning, self.tools.form
        return frozenset((reasoning.markers if reasoning else ()) + (form.markers if form else ()))

    @property
    def has_reasoning(self) -> bool:
        """Whether reasoning is separated from the answer, so that a client may not send it back."""
        return self.reasoning is not None or (self.tools.form is not None and self.tools.form.whole)

    def new_reader(self, prompt_tail: str, call_ids: Sequence[str] = ()) -> ResponseReader:
        """The reader of one choice, given the end of its prompt. ``call_ids``: those of its record."""
        use, reasoning = self.tools, self.reasoning
        if use.form is None and reasoning is None:
            return PLAIN
        fresh, given = use.form.new_id if use.form else str, iter(call_ids)
        if use.primer:
            reasoning = None  # the prompt has closed it
        return ResponseReader(
            reasoning=reasoning,
            inside=reasoning is not None and reasoning.opened_by(prompt_tail),
            parse=use.form.parse if use.form else None,
            tools=Tools(use.shown or ()),
            new_id=lambda: next(given, None) or fresh(),
            primer=use.primer,
            one_call=use.one_call,
        )

    def prompt_end(self, prompt: str) -> str:
        """The text after the rendered prompt: the start of a forced call, after any open reasoning is closed."""
        if not self.tools.primer:
            return ""
        open_reasoning = self.reasoning is not None and self.reasoning.opened_by(prompt)
        closed = f"\n{self.reasoning.end}\n\n" if open_reasoning and self.reasoning else ""
        return closed + self.tools.primer


_NO_PARSER = "this model is served without a tool-call parser"
_CHOICES = ("auto", "none", "required")
_TOOL_FIELDS = frozenset({"tools", "tool_choice", "parallel_tool_calls"})


def read_tool_use(fields: Fields, template: ChatTemplate, parsers: Parsers, capabilities: Capabilities) -> ToolUse:
    """Raises 400 naming the field."""
    unused = ToolUse(form=parsers.tools if parsers.tools is not None and parsers.tools.whole else None)
    if fields.has_none(_TOOL_FIELDS):
        return unused
    tools = read_tools(fields.take("tools", []))
    choice = fields.take("tool_choice", "auto")
    one_call = not fields.flag("parallel_tool_calls", True)
    if one_call and parsers.tools is None:
        raise unsupported("parallel_tool_calls", _NO_PARSER)
    tools, mode, name = _choice(choice, tools)
    if mode == "required":
        _check_forced(tools, name, parsers)
    if not tools or mode == "none":
        return unused
    if not template.uses("tools"):
        raise unsupported("tools", "this model's chat template has no place for them")
    if mode == "required" and parsers.tools is not None:
        return _forced(tools, name, parsers.tools, one_call, capabilities)
    return ToolUse(tools, parsers.tools, one_call=one_call)


def _choice(choice: object, tools: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], str, str | None]:
    """The tools that may be called, one of ``_CHOICES``, and the name of the tool that must be called."""
    if isinstance(choice, str) and choice in _CHOICES:
        return tools, choice, None
    if isinstance(choice, Mapping):
        match choice.get("type"):
            case "function":
                return tools, "required", _name(choice, tools)
            case "allowed_tools":
                return _allowed(choice.get("allowed_tools"), tools)
    message = f"tool_choice must be one of {', '.join(_CHOICES)}, or name a function"
    raise bad_request(message, param="tool_choice")


def _name(choice: Mapping[str, Any], tools: list[dict[str, Any]]) -> str:
    function = choice.get("function")
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise bad_request("tool_choice.function must be an object with a name", param="tool_choice.function")
    if name not in [tool["function"]["name"] for tool in tools]:
        raise bad_request(f"tool_choice: {name!r} is not among tools", param="tool_choice")
    return name


def _allowed(allowed: object, tools: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], str, str | None]:
    mode = allowed.get("mode") if isinstance(allowed, Mapping) else None
    listed = allowed.get("tools") if isinstance(allowed, Mapping) else None
    if mode not in ("auto", "required") or not isinstance(listed, list) or not listed:
        message = "tool_choice.allowed_tools must have a mode, auto or required, and tools"
        raise bad_request(message, param="tool_choice.allowed_tools")
    names = {_name(item if isinstance(item, Mapping) else {}, tools) for item in listed}
    return [tool for tool in tools if tool["function"]["name"] in names], mode, None


def _check_forced(tools: list[dict[str, Any]], name: str | None, parsers: Parsers) -> None:
    if parsers.tools is None:
        raise unsupported("tool_choice", _NO_PARSER)
    if not tools:
        raise bad_request("tool_choice needs tools", param="tool_choice")
    if name is not None and parsers.tools.named_call is None:
        why = f"in the format {parsers.tools.name!r} a call of one tool cannot be forced; required can be"
        raise unsupported("tool_choice", why)


def _forced(
    tools: list[dict[str, Any]], name: str | None, form: ToolFormat, one_call: bool, capabilities: Capabilities
) -> ToolUse:
    if name is None and len(tools) == 1 and form.named_call is not None:
        name = str(tools[0]["function"]["name"])
    if name is None or form.named_call is None:
        return ToolUse(tools, form, form.any_call, one_call)
    if not all(map(is_name_char, name)):
        raise unsupported("tool_choice", f"the name {name!r} cannot be written in a call")
    schema = next(tool["function"].get("parameters") for tool in tools if tool["function"]["name"] == name)
    held = None
    if form.bare_arguments and capabilities.response_format and isinstance(schema, dict) and schema:
        held = {"type": "json_schema", "json_schema": {"name": name, "schema": schema}}
    return ToolUse(tools, form, form.named_call % name, one_call, held)
