"""Chat messages as callers send them, checked and brought into the form that chat templates expect."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from areal.services.inference.data_proxy.templating import ChatTemplate
from areal.services.web.errors import bad_request

_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_PLAIN_ROLES = ("system", "user", "assistant")  # with text alone they are as a template wants them


def read_messages(value: object, template: ChatTemplate) -> list[dict[str, Any]]:
    """Raises 400 naming the message and the part."""
    if not isinstance(value, list) or not value:
        raise bad_request("messages must be a list with at least one message", param="messages")
    return [_message(item, f"messages[{index}]", template) for index, item in enumerate(value)]


def _message(value: object, where: str, template: ChatTemplate) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise bad_request(f"{where} must be an object", param=where)
    role = value.get("role")
    if len(value) == 2 and role in _PLAIN_ROLES and type(value.get("content")) is str:
        return value
    if role not in _ROLES:
        raise bad_request(f"{where}.role must be one of {', '.join(_ROLES)}", param=f"{where}.role")
    if role == "developer" and not template.knows_developer:
        role = "system"
    message = {name: item for name, item in value.items() if item is not None}
    calls = _tool_calls(message.pop("tool_calls", None), where)
    content = message.get("content")
    if content is None and not (role == "assistant" and (calls or "reasoning_content" in message)):
        raise bad_request(f"{where}.content is required", param=f"{where}.content")
    message |= {"role": role, "content": _text(content, where)}
    if calls:
        message["tool_calls"] = calls
    return message


def _text(content: object, where: str) -> str:
    """Text of a message: a string, or text parts, each on its own line."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise bad_request(f"{where}.content must be a string or a list of parts", param=f"{where}.content")
    return "\n".join(_part(part, f"{where}.content[{index}]") for index, part in enumerate(content))


def _part(part: object, where: str) -> str:
    if not isinstance(part, Mapping):
        raise bad_request(f"{where} must be an object with a type", param=where)
    kind = part.get("type")
    text = part.get("refusal" if kind == "refusal" else "text")
    if kind not in ("text", "input_text", "output_text", "refusal"):
        raise bad_request(f"{where} is of type {kind!r}; this model takes text only", param=f"{where}.type")
    if not isinstance(text, str):
        raise bad_request(f"{where}.text must be a string", param=f"{where}.text")
    return text


def _tool_calls(value: object, where: str) -> list[dict[str, Any]]:
    """Tool calls with their arguments decoded: templates write them out themselves."""
    if value is None:
        return []
    if not isinstance(value, list):
        raise bad_request(f"{where}.tool_calls must be a list", param=f"{where}.tool_calls")
    calls = []
    for index, call in enumerate(value):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            name = f"{where}.tool_calls[{index}].function"
            raise bad_request(f"{name} must be an object with a name", param=name)
        calls.append({**call, "function": {**function, "arguments": _arguments(function.get("arguments"))}})
    return calls


def _arguments(value: object) -> object:
    if not isinstance(value, str):
        return value if value is not None else {}
    try:
        return orjson.loads(value)
    except orjson.JSONDecodeError:
        return value


def read_tools(value: object) -> list[dict[str, Any]]:
    """Raises 400 for a tool that is no function with a name."""
    if not isinstance(value, list):
        raise bad_request("tools must be a list", param="tools")
    for index, tool in enumerate(value):
        if isinstance(tool, dict) and tool.get("type", "function") != "function":
            name = f"tools[{index}].type"
            raise bad_request(f"{name} is {tool['type']!r}; only functions are supported", param=name)
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            name = f"tools[{index}].function"
            raise bad_request(f"{name} must be an object with a name", param=name)
    return value
