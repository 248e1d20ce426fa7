"""Conversations in one normal form, for all clients and data sets."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, NoReturn

from areal.dataclasses import dataclass
from areal.errors import FieldError

TEXT_PARTS = ("text", "input_text", "output_text", "refusal")
_REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")


class ConversationError(FieldError):
    """A conversation that cannot be rendered as a prompt. ``field`` is the position: ``messages[1].content``."""


@dataclass(frozen=True)
class Conversation:
    """Messages and tool schemas, as ``normalise`` returns them. They must not be modified."""

    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Mapping[str, Any], ...] = ()

    @cached_property
    def is_plain(self) -> bool:
        """Whether each message has only a role and a text (``are_plain``)."""
        return are_plain(self.messages)

    def then(self, *messages: Mapping[str, object]) -> Conversation:
        """Return the conversation followed by these messages, which are in the normal form."""
        return Conversation((*self.messages, *messages), self.tools)

    def head(self, count: int) -> Conversation:
        """Return the conversation of the first ``count`` messages."""
        return Conversation(self.messages[:count], self.tools)

    def replaced(self, index: int, message: Mapping[str, object]) -> Conversation:
        """Return the conversation with the message at ``index`` replaced."""
        return Conversation((*self.messages[:index], message, *self.messages[index + 1 :]), self.tools)


def normalise(messages: object, tools: object = None) -> Conversation:
    """Convert messages and tools from any of OpenAI's forms. Keys with the value null are removed at every depth. The
    arguments of a call become a mapping, or stay text if that is not a JSON object. Reasoning becomes
    ``reasoning_content``. Content is a text or a list of text parts; a refusal without content is the content.
    ``function_call`` and the role ``function``, from before tools, become a tool call and the role ``tool``. ``tools``
    may be JSON text. Raises ConversationError."""
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise ConversationError("messages", "must be a list with at least one message")
    read = [item if are_plain((item,)) else _message(item, f"messages[{at}]") for at, item in enumerate(messages)]
    return Conversation(tuple(read), read_tools(tools))


_PLAIN_ROLES = ("system", "user", "assistant")


def are_plain(messages: Sequence[object]) -> bool:
    """Return whether each message has only a text, and the role of the system, the user or the assistant. Messages of
    most conversations do; they are in the normal form, and templates render them as they are."""
    for message in messages:
        if type(message) is not dict or len(message) != 2 or message.get("role") not in _PLAIN_ROLES:
            return False
        if type(message.get("content")) is not str:
            return False
    return True


def _message(value: object, where: str) -> Mapping[str, object]:
    if not isinstance(value, Mapping):
        _refuse(where, "must be an object with a role and a content")
    role, content = value.get("role"), value.get("content")
    if not isinstance(role, str) or not role:
        _refuse(f"{where}.role", "must be a text")
    message = {name: without_nulls(item) for name, item in value.items() if item is not None}
    reasoning = [message.pop(key) for key in _REASONING_KEYS if key in message]
    if reasoning:
        if not isinstance(reasoning[0], str):
            _refuse(f"{where}.reasoning_content", "must be a text")
        message["reasoning_content"] = reasoning[0]
    if role == "function":
        message["role"] = "tool"
    if "function_call" in message:
        function = message.pop("function_call")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            _refuse(f"{where}.function_call", "must be an object with a name")
        message["tool_calls"] = message.get("tool_calls") or [{"type": "function", "function": function}]
    if calls := _calls(message.pop("tool_calls", None), where):
        message["tool_calls"] = calls
    if content is None and role == "assistant":
        content = message.pop("refusal", None)
    if content is not None:
        message["content"] = _content(content, f"{where}.content")
    elif role != "assistant" or not ("tool_calls" in message or reasoning):
        _refuse(f"{where}.content", "is required")
    return message


def _content(value: object, where: str) -> str | list[dict[str, object]]:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        _refuse(where, "must be a text or a list of parts")
    parts = []
    for index, part in enumerate(value):
        place = f"{where}[{index}]"
        if not isinstance(part, dict):
            _refuse(place, "must be an object with a type")
        kind = part.get("type")
        if kind not in TEXT_PARTS:
            _refuse(f"{place}.type", f"is {kind!r}: this model takes text only")
        name = "refusal" if kind == "refusal" else "text"
        if not isinstance(part.get(name), str):
            _refuse(f"{place}.{name}", "must be a text")
        parts.append({"type": "text", "text": part[name]})
    return parts


def _calls(value: object, where: str) -> list[dict[str, Any]]:
    if value is None:
        return []
    if not isinstance(value, list):
        _refuse(f"{where}.tool_calls", "must be a list")
    calls = []
    for index, call in enumerate(value):
        call = _function(call, f"{where}.tool_calls[{index}]", ("name", "arguments"))
        function = call["function"]
        calls.append({**call, "function": {**function, "arguments": decoded_arguments(function.get("arguments"))}})
    return calls


def field_as_given(field: str, messages: Sequence[Mapping[str, object]]) -> str:
    """Return a field's place in the given messages, where ``tool_calls[0]`` may be a ``function_call``."""
    where, call, rest = field.partition(".tool_calls[0]")
    index = int(where.removeprefix("messages[").removesuffix("]")) if call else 0
    is_older = call and messages[index].get("function_call") and not messages[index].get("tool_calls")
    return f"{where}.function_call{rest.removeprefix('.function')}" if is_older else field


def message_text(message: Mapping[str, Any]) -> str:
    """Return the text of a message in the normal form."""
    return "\n".join(message_texts(message))


def message_texts(message: Mapping[str, object]) -> list[str]:
    """Return the texts of the parts of a message in the normal form."""
    content: Any = message.get("content", "")
    return [content] if isinstance(content, str) else [part["text"] for part in content]


def read_tools(value: object) -> tuple[dict[str, Any], ...]:
    """Read tool schemas, which may be JSON text. Raises ConversationError."""
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.strip() else None
        except (ValueError, RecursionError) as error:
            raise ConversationError("tools", f"must be a list, or the JSON text of one: {error}") from error
    if value is None:
        return ()
    if isinstance(value, Mapping) or not isinstance(value, Sequence) or isinstance(value, str):
        _refuse("tools", "must be a list")
    tools = []
    for index, tool in enumerate(value):
        where = f"tools[{index}]"
        tool = without_nulls(tool)
        if isinstance(tool, dict) and tool.get("type", "function") != "function":
            _refuse(f"{where}.type", f"is {tool['type']!r}; only functions are supported")
        for name in ("input_schema", "inputSchema"):  # of Anthropic and MCP
            if isinstance(tool, dict) and name in tool:
                _refuse(f"{where}.{name}", "is not read: the schema of a function's arguments is its parameters")
        tools.append(_function(tool, where, ("name", "description", "parameters")))
    return tuple(tools)


def _function(value: object, where: str, names: tuple[str, ...]) -> dict[str, Any]:
    """Return a tool or a call as ``{"type": "function", "function": {...}}``; a bare function gets this envelope."""
    if isinstance(value, dict) and "function" not in value and isinstance(value.get("name"), str):
        rest = {name: item for name, item in value.items() if name not in names}
        value = {"type": "function", **rest, "function": {name: value[name] for name in names if name in value}}
    function = value.get("function") if isinstance(value, dict) else None
    if not isinstance(value, dict) or not isinstance(function, dict) or not isinstance(function.get("name"), str):
        _refuse(f"{where}.function", "must be an object with a name")
    return value


def decoded_arguments(value: object) -> Any:
    """Return the arguments of a call as a mapping, empty for blank text and ``null``. Other text is unchanged."""
    if not isinstance(value, str):
        return value if value is not None else {}
    if not value.strip():
        return {}
    try:
        found = json.loads(value, parse_constant=_no_constant)
        json.dumps(found, ensure_ascii=False).encode()  # a lone surrogate cannot be written
    except (ValueError, RecursionError):
        return value
    if found is None:
        return {}
    return without_nulls(found) if isinstance(found, dict) else value


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def without_nulls(value: Any) -> Any:
    """Return a copy in which no object, at any depth, has a key whose value is null."""
    if isinstance(value, Mapping):
        return {name: without_nulls(item) for name, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [without_nulls(item) for item in value]
    return value


def _refuse(field: str, message: str) -> NoReturn:
    raise ConversationError(field, message)
