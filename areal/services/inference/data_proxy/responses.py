"""Translates requests of OpenAI's Responses API to chat completions.

Input items become messages: the reasoning, text and calls of one response are one message. Responses are not stored, so
each request has the whole conversation. https://platform.openai.com/docs/api-reference/responses
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from areal.services.dialects import ResponsesWriter, joined_text, string_of
from areal.services.http.errors import bad_request, unsupported
from areal.services.inference.data_proxy.fields import Fields
from areal.services.inference.data_proxy.serializers import ChatTranslation, TemplateUses

_NOT_KEPT = "responses are not kept: send the whole conversation as input"
_REFUSED = {
    "previous_response_id": _NOT_KEPT,
    "conversation": _NOT_KEPT,
    "prompt": "there are no stored prompts",
    "moderation": "there is no moderation",
}
_NO_EFFECT = (
    "user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "prompt_cache_options",
)  # fmt: skip
_INCLUDABLE = ("reasoning.encrypted_content",)  # reasoning is sent as plain text, so there is nothing to encrypt
_NAMES = {"max_tokens": "max_output_tokens", "response_format": "text.format", "messages": "input"}


def translate(fields: Fields, uses: TemplateUses) -> ChatTranslation:
    """Translate a request body. ``uses``: which variables the chat template has. Raises 400 naming the field."""
    fields.refuse(_REFUSED)
    if fields.flag("background"):
        raise unsupported("background", _NOT_KEPT)
    if fields.flag("store"):
        raise unsupported("store", _NOT_KEPT)
    if fields.take("truncation", "disabled") != "disabled":
        raise unsupported("truncation", "input that is too long is refused")
    _check_include(fields)
    instructions = fields.text("instructions")
    chat: dict[str, Any] = {"messages": _messages(instructions, fields.take("input")), "stream": fields.flag("stream")}
    stream_options = Fields(fields.mapping("stream_options"))
    stream_options.accept(("include_obfuscation",))
    tools = fields.items("tools")
    choice = fields.take("tool_choice", "auto")
    chat |= {
        "tools": [_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools)],
        "tool_choice": _choice(choice),
    }
    parallel = fields.flag("parallel_tool_calls", True)
    if tools and not parallel:
        chat["parallel_tool_calls"] = False
    chat["max_tokens"] = fields.whole("max_output_tokens", 1, 2**31 - 1)
    sampling = {name: fields.take(name) for name in ("temperature", "top_p")}
    chat |= sampling | {"metadata": fields.mapping("metadata")}
    reasoning = Fields(fields.mapping("reasoning"))
    if uses("reasoning_effort") and (effort := reasoning.text("effort")) is not None:
        chat["reasoning_effort"] = effort
    ignored = [*_text(fields, chat), *(f"reasoning.{name}" for name in reasoning.ignored())]
    ignored += [f"stream_options.{name}" for name in stream_options.ignored()]
    fields.accept(_NO_EFFECT)
    echoed = {
        "instructions": instructions,
        "max_output_tokens": chat["max_tokens"],
        "metadata": chat["metadata"],
        "parallel_tool_calls": parallel,
        "tool_choice": choice,
        "tools": tools,
        **{name: 1.0 if value is None else value for name, value in sampling.items()},
    }
    return ChatTranslation(chat, partial(ResponsesWriter, echoed=echoed), (*fields.ignored(), *ignored), _NAMES)


def _check_include(fields: Fields) -> None:
    if fields.take("top_logprobs", 0) != 0:
        raise unsupported("top_logprobs", "this API's answers carry none here; chat completions have them")
    for name in fields.texts("include", 16):
        if name not in _INCLUDABLE:
            raise unsupported("include", f"there is no {name!r} here")


def _text(fields: Fields, chat: dict[str, Any]) -> list[str]:
    config = Fields(fields.mapping("text"))
    wanted = config.mapping("format")
    match wanted.get("type", "text"):
        case "text":
            pass
        case "json_object":
            chat["response_format"] = {"type": "json_object"}
        case "json_schema":
            schema = {name: value for name, value in wanted.items() if name != "type"}
            chat["response_format"] = {"type": "json_schema", "json_schema": schema}
        case _:
            message = "text.format.type must be text, json_object or json_schema"
            raise bad_request(message, param="text.format")
    return [f"text.{name}" for name in config.ignored()]


def _tool(tool: object, where: str) -> dict[str, Any]:
    if not isinstance(tool, Mapping):
        raise bad_request(f"{where} must be an object", param=where)
    if tool.get("type") != "function":
        raise unsupported(f"{where}.type", f"there is no {tool.get('type')!r} here, only functions")
    if not isinstance(tool.get("name"), str):
        raise bad_request(f"{where}.name must be a string", param=f"{where}.name")
    names = ("name", "description", "parameters", "strict")
    return {"type": "function", "function": {name: tool[name] for name in names if tool.get(name) is not None}}


def _choice(choice: object) -> object:
    """Return a ``tool_choice`` in the form of chat completions, whose reader rejects a malformed one."""
    if not isinstance(choice, Mapping):
        return choice
    if choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    if choice.get("type") == "allowed_tools":
        tools = choice.get("tools")
        listed = [_choice(tool) for tool in tools] if isinstance(tools, list) else tools
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode"), "tools": listed}}
    return choice


class _MessageBuilder:
    """Builds messages from items. The items of one response make one message: reasoning, then text, then calls."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []

    def add(self, role: str, content: object, **more: Any) -> dict[str, Any]:
        self.messages.append({"role": role, "content": content, **more})
        return self.messages[-1]

    def add_text(self, role: str, text: str) -> None:
        answer = self._answer() if role == "assistant" else None
        if answer is not None and not answer["content"] and "tool_calls" not in answer:
            answer["content"] = text
        else:
            self.add(role, text)

    def add_call(self, call: dict[str, Any]) -> None:
        answer = self._answer() or self.add("assistant", "")
        answer.setdefault("tool_calls", []).append(call)

    def _answer(self) -> dict[str, Any] | None:
        last = self.messages[-1] if self.messages else {}
        return last if last.get("role") == "assistant" else None


def _messages(instructions: str | None, value: object) -> list[dict[str, Any]]:
    builder = _MessageBuilder()
    if instructions:
        builder.add_text("system", instructions)
    if isinstance(value, str):
        builder.add_text("user", value)
    elif isinstance(value, list) and value:
        for index, item in enumerate(value):
            _add(builder, item, f"input[{index}]")
    else:
        raise bad_request("input must be a string or a list of items, not empty", param="input")
    return builder.messages


def _add(builder: _MessageBuilder, item: object, where: str) -> None:
    if not isinstance(item, Mapping):
        raise bad_request(f"{where} must be an object", param=where)
    match item.get("type", "message"):
        case "message":
            role = item.get("role")
            if role not in ("user", "assistant", "system", "developer"):
                message = f"{where}.role must be user, assistant, system or developer"
                raise bad_request(message, param=f"{where}.role")
            content = item.get("content")
            if role == "user" and isinstance(content, list) and any(map(_is_image, content)):
                builder.add("user", _parts(content, f"{where}.content"))
            else:
                builder.add_text(role, joined_text(content, f"{where}.content", "" if role == "assistant" else "\n"))
        case "reasoning":
            parts = item.get("content") or item.get("summary") or []
            builder.add("assistant", "", reasoning_content=joined_text(parts, f"{where}.content", "\n"))
        case "function_call":
            names = ("call_id", "name", "arguments")
            call_id, name, arguments = (string_of(item, each, where) for each in names)
            function = {"name": name, "arguments": arguments}
            builder.add_call({"id": call_id, "type": "function", "function": function})
        case "function_call_output":
            text = joined_text(item.get("output"), f"{where}.output", "\n")
            builder.add("tool", text, tool_call_id=string_of(item, "call_id", where))
        case "item_reference":
            raise unsupported(f"{where}.type", _NOT_KEPT)
        case kind:
            raise unsupported(f"{where}.type", f"there is no {kind!r} here")


def _is_image(part: object) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "input_image"


def _parts(content: list[Any], where: str) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = []
    for index, part in enumerate(content):
        place = f"{where}[{index}]"
        if not _is_image(part):
            parts.append({"type": "text", "text": joined_text([part], where, "")})
            continue
        if part.get("file_id") is not None:
            raise unsupported(f"{place}.file_id", "no files are kept here; give the image's URL or its data")
        image = {"url": string_of(part, "image_url", place)} | (
            {"detail": part["detail"]} if part.get("detail") else {}
        )
        parts.append({"type": "image_url", "image_url": image})
    return parts
