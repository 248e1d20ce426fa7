"""``tools``, ``tool_choice`` and ``parallel_tool_calls``: what the prompt shows, and whether a call is forced.

A call is forced by beginning it: the prompt ends within a call in the model's own format, so that a call is all it can
go on with. A named tool's name is in that beginning; its arguments are the model's, held to the schema by engines that
have grammars.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from areal.services.inference.data_proxy.fields import Fields, unsupported
from areal.services.inference.data_proxy.messages import read_tools
from areal.services.inference.data_proxy.parsers import ToolFormat
from areal.services.inference.data_proxy.parsers.tools import is_name_char
from areal.services.inference.data_proxy.reading import Parsers, ToolUse
from areal.services.inference.data_proxy.templating import ChatTemplate
from areal.services.inference.engines.base import Capabilities
from areal.services.web.errors import ApiError, bad_request

_CHOICES = ("auto", "none", "required")


def read_tool_use(fields: Fields, template: ChatTemplate, parsers: Parsers, capabilities: Capabilities) -> ToolUse:
    """Raises 400 naming the field."""
    tools = read_tools(fields.take("tools", []))
    choice = fields.take("tool_choice", "auto")
    one_call = not fields.flag("parallel_tool_calls", True)
    if one_call and parsers.tools is None:
        raise unsupported("parallel_tool_calls", _NO_PARSER)
    tools, mode, name = _choice(choice, tools)
    if mode == "required":
        _check_forced(tools, name, parsers)
    if not tools or mode == "none":
        return ToolUse(form=parsers.tools if parsers.tools is not None and parsers.tools.whole else None)
    if not template.uses("tools"):
        raise unsupported("tools", "this model's chat template has no place for them")
    if mode == "required" and parsers.tools is not None:
        return _forced(tools, name, parsers.tools, one_call, capabilities)
    return ToolUse(tools, parsers.tools, one_call=one_call)


_NO_PARSER = "this model is served without a tool-call parser"


def _choice(choice: object, tools: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], str, str | None]:
    """The tools that may be called, one of ``_CHOICES``, and the name of the tool that has to be."""
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
        raise _cannot_force(_NO_PARSER)
    if not tools:
        raise bad_request("tool_choice needs tools", param="tool_choice")
    if name is not None and parsers.tools.named_call is None:
        raise _cannot_force(
            f"in the format {parsers.tools.name!r} a call of one tool cannot be forced; required can be"
        )


def _cannot_force(why: str) -> ApiError:
    return unsupported("tool_choice", why)


def _forced(
    tools: list[dict[str, Any]], name: str | None, form: ToolFormat, one_call: bool, capabilities: Capabilities
) -> ToolUse:
    if name is None and len(tools) == 1 and form.named_call is not None:
        name = str(tools[0]["function"]["name"])
    if name is None or form.named_call is None:
        return ToolUse(tools, form, form.any_call, one_call)
    if not all(map(is_name_char, name)):
        raise _cannot_force(f"the name {name!r} cannot be written in a call")
    schema = next(tool["function"].get("parameters") for tool in tools if tool["function"]["name"] == name)
    held = None
    if form.bare_arguments and capabilities.response_format and isinstance(schema, dict) and schema:
        held = {"type": "json_schema", "json_schema": {"name": name, "schema": schema}}
    return ToolUse(tools, form, form.named_call % name, one_call, held)
