"""Custom tools, whose input is a text: the model knows each as a function whose one argument is ``input``.

Responses and chat completions write the same tool and the same call in two forms.
https://platform.openai.com/docs/guides/function-calling#custom-tools
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson
from pydantic_core import from_json

_PARAMETERS = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}


def custom_function(tool: Mapping[str, object]) -> dict[str, object]:
    """Return the function that a custom tool is to the model, without its name. A grammar is part of the
    description."""
    description, form = str(tool.get("description") or ""), tool.get("format")
    if isinstance(form, Mapping) and form.get("type") == "grammar":
        inner = form.get("grammar")  # of chat completions
        grammar = inner if isinstance(inner, Mapping) else form
        rule = f"The input follows this {grammar.get('syntax')} grammar:\n{grammar.get('definition')}"
        description = f"{description}\n\n{rule}".strip()
    return {"description": description, "parameters": _PARAMETERS}


def custom_arguments(text: str) -> str:
    """Return the arguments with which the model calls a custom tool with this input."""
    return orjson.dumps({"input": text}).decode()


def custom_input(arguments: str) -> str:
    """Return the input of a custom tool from the model's arguments, which may be cut; what is not an object with that
    text is the input itself."""
    try:
        value = from_json(arguments, allow_partial="trailing-strings")["input"]
    except (ValueError, KeyError, TypeError):
        return arguments
    return value if isinstance(value, str) else arguments


# Chat completions.


def custom_call(call_id: str, name: str, given: str) -> dict[str, object]:
    return {"id": call_id, "type": "custom", "custom": {"name": name, "input": given}}


def function_of(item: object) -> object:
    """Return a custom tool, or the choice of one, of a chat completion as a function. Others are returned as they
    are."""
    custom = item.get("custom") if isinstance(item, Mapping) and item.get("type") == "custom" else None
    if not isinstance(custom, Mapping):
        return item
    return {"type": "function", "function": {"name": custom.get("name"), **custom_function(custom)}}


def with_function_calls(messages: object) -> Any:
    """Return messages of a chat completion whose calls of custom tools are calls of functions."""
    if not isinstance(messages, list) or not any(map(_custom_calls, messages)):
        return messages
    return [
        {**message, "tool_calls": [_function_call(call) for call in message["tool_calls"]]}
        if _custom_calls(message)
        else message
        for message in messages
    ]


def _custom_calls(message: object) -> bool:
    calls = message.get("tool_calls") if isinstance(message, Mapping) else None
    return isinstance(calls, list) and any(isinstance(call, Mapping) and "custom" in call for call in calls)


def _function_call(call: Any) -> Any:
    custom = call.get("custom") if isinstance(call, Mapping) else None
    if not isinstance(custom, Mapping) or not isinstance(custom.get("input"), str):
        return call
    function = {"name": custom.get("name"), "arguments": custom_arguments(custom["input"])}
    return {"id": call.get("id"), "type": "function", "function": function}
