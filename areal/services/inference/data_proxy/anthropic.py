"""Translates requests of Anthropic's Messages API to chat completions, and writes their responses.

Content blocks become messages: each tool result is a message of its own, thinking becomes reasoning. Images become
parts of the chat API, for models that accept them; documents are refused. https://docs.anthropic.com/en/api/messages
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import orjson
from pydantic_core import from_json

from areal.services.dialects import (
    CallArguments,
    CallEnd,
    CallStart,
    Content,
    Piece,
    Reasoning,
    Reply,
    ResponseSummary,
    sse_event,
    string_of,
)
from areal.services.http.errors import ApiError, bad_field, bad_request
from areal.services.inference.data_proxy.fields import Fields, left_out_tool
from areal.services.inference.data_proxy.serializers import ChatTranslation, TemplateUses
from areal.wire.sampling import MAX_STOPS

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use", "content_filter": "refusal"}


class AnthropicWriter:
    """Writes a response as content blocks (thinking, text, tool use), each stopped before the next one starts.
    https://docs.anthropic.com/en/docs/build-with-claude/streaming"""

    def __init__(self, answer_id: str, model: str) -> None:
        self._id = answer_id
        self._model = model
        self._index = -1
        self._open: str | None = None  # the type of the block that is open

    def opening(self, prompt_tokens: int) -> bytes:
        message = self._message([], None, None, _usage(prompt_tokens, 0))
        return sse_event("message_start", {"message": message}) + sse_event("ping", {})

    def _message(
        self, content: Sequence[Mapping[str, object]], stop_reason: str | None, stop: str | None, usage: dict[str, int]
    ) -> dict[str, object]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": stop_reason,
            "stop_sequence": stop,
            "usage": usage,
        }

    def pieces(self, pieces: Iterable[Piece]) -> bytes:
        return b"".join(map(self._piece, pieces))

    def _piece(self, piece: Piece) -> bytes:
        match piece:
            case Content(text):
                return self._in("text", {"text": ""}) + self._delta({"type": "text_delta", "text": text})
            case Reasoning(text):
                empty = {"thinking": "", "signature": ""}
                return self._in("thinking", empty) + self._delta({"type": "thinking_delta", "thinking": text})
            case CallStart(_, call_id, name):
                return self._stop() + self._in("tool_use", {"id": call_id, "name": name, "input": {}})
            case CallArguments(_, fragment):
                return self._delta({"type": "input_json_delta", "partial_json": fragment})
            case CallEnd():
                return self._stop()

    def _in(self, kind: str, empty: Mapping[str, object]) -> bytes:
        """Return the events that open a block of this kind, unless one is open."""
        if self._open == kind:
            return b""
        stopped = self._stop()
        self._index += 1
        self._open = kind
        return stopped + sse_event(
            "content_block_start", {"index": self._index, "content_block": {"type": kind, **empty}}
        )

    def _delta(self, delta: Mapping[str, object]) -> bytes:
        return sse_event("content_block_delta", {"index": self._index, "delta": delta})

    def _stop(self) -> bytes:
        if self._open is None:
            return b""
        self._open = None
        return sse_event("content_block_stop", {"index": self._index})

    def closing(self, summary: ResponseSummary) -> bytes:
        delta = {"stop_reason": _stop_reason(summary), "stop_sequence": summary.stop}
        usage = _usage(summary.prompt_tokens, summary.output_tokens)
        return (
            self._stop() + sse_event("message_delta", {"delta": delta, "usage": usage}) + sse_event("message_stop", {})
        )

    def whole(self, reply: Reply, summary: ResponseSummary) -> dict[str, object]:
        content: list[Mapping[str, object]] = []
        if reply.reasoning:
            content.append({"type": "thinking", "thinking": reply.reasoning, "signature": ""})
        if reply.content:
            content.append({"type": "text", "text": reply.content})
        for call in reply.calls:
            block = {"type": "tool_use", "id": call.id, "name": call.name, "input": _input(call.arguments)}
            content.append(block)
        usage = _usage(summary.prompt_tokens, summary.output_tokens)
        return self._message(content, _stop_reason(summary), summary.stop, usage)


def _usage(prompt_tokens: int, output_tokens: int) -> dict[str, int]:
    return {
        "input_tokens": prompt_tokens,
        "output_tokens": output_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
    }


def _stop_reason(summary: ResponseSummary) -> str:
    if summary.finish == "stop" and summary.stop is not None:
        return "stop_sequence"
    return _STOP_REASONS.get(summary.finish, summary.finish)


def _input(arguments: str) -> dict[str, object]:
    """Return the arguments as the object that this API requires. Incomplete arguments are parsed as far as they go."""
    try:
        value = from_json(arguments, allow_partial="trailing-strings")
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


_NO_EFFECT = ("cache_control", "user_profile_id", "workspace_id")
_LEFT_OUT: dict[str, tuple[Any, ...]] = {
    "service_tier": ("auto", "standard_only"),
    "speed": ("standard",),
    "container": (),  # for code that the provider runs
    "mcp_servers": (),  # servers to which the provider connects
    "context_management": (),
    "betas": (),
}
"""Known fields without effect here, and the values that request nothing."""
_NAMES = {
    "messages": "messages",
    "stop": "stop_sequences",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    "response_format": "output_config.format",
}
_THINKING_SWITCHES = ("enable_thinking", "thinking")  # template variables that turn thinking on and off


def translate(fields: Fields, uses: TemplateUses, *, counting: bool = False) -> ChatTranslation:
    """Translate a request body. ``uses``: which variables the chat template has. ``counting``: nothing is generated, so
    ``max_tokens`` is optional. Raises 400 naming the field."""
    fields.leave_out(_LEFT_OUT)
    chat: dict[str, Any] = {"messages": chat_messages(fields.take("system"), fields.take("messages"), fields)}
    if chat["messages"][-1]["role"] == "assistant":
        chat |= {"continue_final_message": True, "add_generation_prompt": False}
    chat |= _tools(fields)
    chat |= {"stop": list(fields.texts("stop_sequences", MAX_STOPS)), "stream": fields.flag("stream")}
    if fields.given("temperature"):
        chat["temperature"] = fields.number("temperature", 1.0, 0.0, 1.0)
    chat |= {name: fields.take(name) for name in ("top_p", "top_k", "metadata")}
    chat["max_tokens"] = fields.whole("max_tokens", 1, 2**31 - 1)
    if chat["max_tokens"] is None and not counting:
        raise bad_field("max_tokens", "is required", code="missing_field")
    ignored = [*_thinking(fields, uses, chat), *_output_config(fields, uses, chat)]
    fields.accept(_NO_EFFECT)
    return ChatTranslation(
        chat, lambda answer_id, model, _: AnthropicWriter(answer_id, model), (*fields.ignored(), *ignored), _NAMES
    )


def _thinking(fields: Fields, uses: TemplateUses, chat: dict[str, object]) -> list[str]:
    """Set the template's thinking switch, if it has one. Return the fields of ``thinking`` without effect."""
    thinking = fields.mapping("thinking")
    kind = thinking.get("type") if thinking else "disabled"
    if kind not in ("enabled", "adaptive", "disabled"):
        raise bad_field("thinking.type", "must be enabled, adaptive or disabled")
    if thinking:
        chat["chat_template_kwargs"] = {name: kind != "disabled" for name in _THINKING_SWITCHES if uses(name)}
    return [f"thinking.{name}" for name in ("budget_tokens", "display") if thinking.get(name) is not None]


def _output_config(fields: Fields, uses: TemplateUses, chat: dict[str, object]) -> list[str]:
    config = Fields(fields.mapping("output_config"))
    wanted = config.mapping("format") or fields.mapping("output_format")
    if wanted:
        if wanted.get("type") != "json_schema" or not isinstance(wanted.get("schema"), dict):
            raise bad_field("output_config.format", "must be a json_schema with a schema")
        schema = {"name": "answer", "schema": wanted["schema"]}
        chat["response_format"] = {"type": "json_schema", "json_schema": schema}
    if uses("reasoning_effort") and (effort := config.text("effort")) is not None:
        chat["reasoning_effort"] = effort
    return [f"output_config.{name}" for name in config.ignored()]


def _tools(fields: Fields) -> dict[str, object]:
    tools = [
        _tool(tool, f"tools[{index}]")
        for index, tool in enumerate(fields.items("tools"))
        if not left_out_tool(fields, {"type": "custom", **tool} if isinstance(tool, Mapping) else tool, ("custom",))
    ]
    choice = Fields(fields.mapping("tool_choice"))
    kind, name = choice.text("type") or ("auto" if choice.is_empty else None), choice.text("name")
    chat: dict[str, object] = {"tools": tools}
    if choice.flag("disable_parallel_tool_use"):
        chat["parallel_tool_calls"] = False
    match kind:
        case "auto" | "none":
            return {**chat, "tool_choice": kind}
        case "any":
            return {**chat, "tool_choice": "required"}
        case "tool" if name:
            return {**chat, "tool_choice": {"type": "function", "function": {"name": name}}}
    raise bad_field("tool_choice", "must be of type auto, any, none, or tool with a name")


def _tool(tool: object, where: str) -> dict[str, object]:
    if not isinstance(tool, Mapping):
        raise bad_field(where, "must be an object")
    name, schema = tool.get("name"), tool.get("input_schema")
    if not isinstance(name, str) or not name:
        raise bad_field(f"{where}.name", "must be a string")
    if not isinstance(schema, Mapping):
        raise bad_field(f"{where}.input_schema", "must be an object")
    function = {"name": name, "description": tool.get("description") or "", "parameters": schema}
    return {"type": "function", "function": function}


_PROVIDERS = (
    *("server_tool_use", "web_search_tool_result", "web_fetch_tool_result", "code_execution_tool_result"),
    *("bash_code_execution_tool_result", "text_editor_code_execution_tool_result", "tool_search_tool_result"),
    *("advisor_tool_result", "mcp_tool_use", "mcp_tool_result", "compaction"),
    "redacted_thinking",  # only the service that wrote it can decrypt it
)
"""Types of blocks for a provider's own actions and results. They are left out; the text beside them is kept."""


def chat_messages(system: object, messages: object, fields: Fields | None = None) -> list[dict[str, object]]:
    """Return the messages in OpenAI's form; ``fields`` records omitted fields. Raises 400 naming the block."""
    if not isinstance(messages, list) or not messages:
        raise bad_field("messages", "must be a list with at least one message")
    out: list[dict[str, object]] = []
    if system is not None:
        out.append({"role": "system", "content": "\n".join(_texts(system, "system"))})
    known_calls: set[str] = set()
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        match message.get("role") if isinstance(message, Mapping) else None:
            case "user":
                _add_user(out, message.get("content"), f"{where}.content", known_calls)
            case "assistant":
                answer = _assistant(message.get("content"), f"{where}.content", fields)
                known_calls |= {call["id"] for call in answer.get("tool_calls", ())}
                out.append(answer)
            case "system":
                texts = _texts(message.get("content"), f"{where}.content")
                out.append({"role": "system", "content": "\n".join(texts)})
            case _:
                raise bad_field(f"{where}.role", "must be user or assistant")
    if out[-1].get("tool_calls"):
        raise bad_request("the last message's tool calls have no tool_result blocks after them", param="messages")
    return out


def _blocks(content: object, where: str) -> list[tuple[str, Mapping[str, object], str]]:
    """Return each block's type, the block, and its place in the body."""
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise bad_field(where, "must be a string or a list of blocks")
    blocks = []
    for index, block in enumerate(content):
        place = f"{where}[{index}]"
        if not isinstance(block, Mapping) or not isinstance(block.get("type"), str):
            raise bad_field(place, "must be an object with a type")
        blocks.append((block["type"], block, place))
    return blocks


def _foreign(kind: str, where: str) -> ApiError:
    return bad_request(f"{where}: this model takes text only, not {kind!r}", param=f"{where}.type")


def _texts(content: object, where: str) -> list[str]:
    texts = []
    for kind, block, place in _blocks(content, where):
        if kind != "text":
            raise _foreign(kind, place)
        texts.append(string_of(block, "text", place))
    return texts


def _add_user(out: list[dict[str, object]], content: object, where: str, known_calls: set[str]) -> None:
    """Add tool results first, as chat APIs require, then the user's text. Two user texts in a row are merged."""
    texts: list[str] = []
    parts: list[dict[str, object]] = []  # the texts and images, in order
    for kind, block, place in _blocks(content, where):
        if kind == "tool_result":
            out.append(_tool_result(block, place, known_calls))
        elif kind == "text":
            texts.append(string_of(block, "text", place))
            parts.append({"type": "text", "text": texts[-1]})
        elif kind == "image":
            parts.append(_image(block, place))
        else:
            raise _foreign(kind, place)
    if len(parts) > len(texts):
        out.append({"role": "user", "content": parts})
    elif texts and out and out[-1]["role"] == "user" and isinstance(out[-1]["content"], str):
        out[-1]["content"] += "\n" + "\n".join(texts)
    elif texts:
        out.append({"role": "user", "content": "\n".join(texts)})
    elif not content:
        raise bad_field(where, "must not be empty")


def _image(block: Mapping[str, object], where: str) -> dict[str, object]:
    given = block.get("source")
    source: Mapping[str, object] = given if isinstance(given, Mapping) else {}
    match source.get("type"):
        case "url":
            url = string_of(source, "url", f"{where}.source")
        case "base64":
            kind, data = (string_of(source, name, f"{where}.source") for name in ("media_type", "data"))
            url = f"data:{kind};base64,{data}"
        case _:
            raise bad_field(f"{where}.source", "must be of type url or base64")
    return {"type": "image_url", "image_url": {"url": url}}


def _tool_result(block: Mapping[str, object], where: str, known_calls: set[str]) -> dict[str, object]:
    call_id = string_of(block, "tool_use_id", where)
    if call_id not in known_calls:
        message = f"{where}.tool_use_id: no tool_use block before it has the id {call_id!r}"
        raise bad_request(message, param=f"{where}.tool_use_id")
    content = block.get("content")
    texts = _texts(content, f"{where}.content") if content is not None else []
    result: dict[str, object] = {"role": "tool", "tool_call_id": call_id, "content": "\n".join(texts)}
    if block.get("is_error"):
        result["is_error"] = True  # for templates that show it
    return result


def _assistant(content: object, where: str, fields: Fields | None) -> dict[str, Any]:
    texts, thoughts, calls = [], [], []
    for kind, block, place in _blocks(content, where):
        match kind:
            case "text":
                texts.append(string_of(block, "text", place))
            case "thinking":
                thoughts.append(string_of(block, "thinking", place))
            case "tool_use":
                calls.append(_tool_use(block, place))
            case kind if kind in _PROVIDERS:
                if fields is not None:
                    fields.name_left_out(f"messages.{kind}")
            case _:
                raise _foreign(kind, place)
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    if any(thoughts):
        message["reasoning_content"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _tool_use(block: Mapping[str, object], where: str) -> dict[str, object]:
    arguments = block.get("input")
    if not isinstance(arguments, Mapping):
        raise bad_field(f"{where}.input", "must be an object")
    function = {"name": string_of(block, "name", where), "arguments": orjson.dumps(arguments).decode()}
    return {"id": string_of(block, "id", where), "type": "function", "function": function}
