"""OpenAI's Responses API: its bodies as chat bodies.

Items become messages: an answer's reasoning, text and calls are one message again. Nothing is kept between calls, so
the conversation comes whole each time. https://platform.openai.com/docs/api-reference/responses
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from areal.services.http.errors import bad_request
from areal.services.inference.data_proxy.fields import Fields, string_of, unsupported
from areal.services.inference.data_proxy.parsers.reader import (
    CallArguments,
    CallEnd,
    CallStart,
    Content,
    Piece,
    Reasoning,
    Reply,
)
from areal.services.inference.data_proxy.serializers import ChatTranslation, ResponseSummary, TemplateUses, sse_event

# Answers: one item at a time (reasoning, a message, a function's call), done before the next one is added. Events are
# numbered from 0. https://platform.openai.com/docs/api-reference/responses-streaming

_INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter"}
_ID_PREFIXES = {"message": "msg_", "reasoning": "rs_", "function_call": "fc_"}


def _text_item(kind: str, status: str, text: str, item_id: str) -> dict[str, Any]:
    """A message or reasoning, with its one part."""
    item = {"id": item_id, "type": kind, "status": status}
    if kind == "message":
        part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
        return {**item, "role": "assistant", "content": [part]}
    return {**item, "summary": [], "content": [{"type": "reasoning_text", "text": text}]}


def _call(status: str, call_id: str, name: str, arguments: str, item_id: str) -> dict[str, Any]:
    item = {"id": item_id, "type": "function_call", "status": status}
    return {**item, "call_id": call_id, "name": name, "arguments": arguments}


class ResponsesWriter:
    """Items are named after the answer and their place in it: a replayed answer has the same ids."""

    def __init__(self, answer_id: str, model: str, created: int, *, echoed: Mapping[str, Any]) -> None:
        self._id = answer_id
        self._model = model
        self._echoed = echoed
        self._created = created
        self._number = -1
        self._items: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None  # the item that is being written
        self._text: list[str] = []  # of that item

    def _event(self, kind: str, **data: Any) -> bytes:
        self._number += 1
        return sse_event(kind, {"sequence_number": self._number, **data})

    def _item_id(self, kind: str, place: int) -> str:
        return f"{_ID_PREFIXES[kind]}{self._id.removeprefix('resp_')}_{place}"

    def opening(self, prompt_tokens: int) -> bytes:
        response = self._response("in_progress", [], None, None)
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def _response(
        self, status: str, output: list[dict[str, Any]], usage: dict[str, Any] | None, cut: str | None
    ) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": cut} if cut else None,
            "model": self._model,
            "output": output,
            "previous_response_id": None,
            "store": False,
            "truncation": "disabled",
            "usage": usage,
            **self._echoed,
        }

    def pieces(self, pieces: Iterable[Piece]) -> bytes:
        return b"".join(map(self._piece, pieces))

    def _piece(self, piece: Piece) -> bytes:
        match piece:
            case Content(text):
                return self._in("message") + self._delta(
                    "response.output_text.delta", text, content_index=0, logprobs=[]
                )
            case Reasoning(text):
                return self._in("reasoning") + self._delta("response.reasoning_text.delta", text, content_index=0)
            case CallStart(_, call_id, name):
                done = self._done("completed")
                item_id = self._item_id("function_call", len(self._items))
                return done + self._add(_call("in_progress", call_id, name, "", item_id))
            case CallArguments(_, fragment):
                return self._delta("response.function_call_arguments.delta", fragment)
            case CallEnd():
                return self._done("completed")

    def _at(self) -> dict[str, Any]:
        assert self._open is not None
        return {"item_id": self._open["id"], "output_index": len(self._items)}

    def _in(self, kind: str) -> bytes:
        """Makes sure that an item of this kind is open, with its one part."""
        if self._open is not None and self._open["type"] == kind:
            return b""
        done = self._done("completed")
        item_id = self._item_id(kind, len(self._items))
        item = _text_item(kind, "in_progress", "", item_id)
        added = self._add({**item, "content": []})
        part = self._event("response.content_part.added", **self._at(), content_index=0, part=item["content"][0])
        return done + added + part

    def _add(self, item: dict[str, Any]) -> bytes:
        self._open, self._text = item, []
        return self._event("response.output_item.added", output_index=len(self._items), item=item)

    def _delta(self, kind: str, text: str, **more: Any) -> bytes:
        self._text.append(text)
        return self._event(kind, **self._at(), delta=text, **more)

    def _done(self, status: str) -> bytes:
        """The events that complete the open item, if one is open."""
        item = self._open
        if item is None:
            return b""
        text, kind, at = "".join(self._text), item["type"], self._at()
        if kind == "function_call":
            whole = _call(status, item["call_id"], item["name"], text or "{}", item["id"])
            more = {"name": item["name"], "arguments": whole["arguments"]}
            events = [self._event("response.function_call_arguments.done", **at, **more)]
        else:
            whole = _text_item(kind, status, text, item["id"])
            name, more = ("output_text", {"logprobs": []}) if kind == "message" else ("reasoning_text", {})
            events = [
                self._event(f"response.{name}.done", **at, content_index=0, text=text, **more),
                self._event("response.content_part.done", **at, content_index=0, part=whole["content"][0]),
            ]
        events.append(self._event("response.output_item.done", output_index=len(self._items), item=whole))
        self._items.append(whole)
        self._open = None
        return b"".join(events)

    def closing(self, summary: ResponseSummary) -> bytes:
        cut = _INCOMPLETE.get(summary.finish)
        done = self._done("incomplete" if cut else "completed")
        status = "incomplete" if cut else "completed"
        response = self._response(status, self._items, _usage(summary), cut)
        return done + self._event(f"response.{status}", response=response)

    def whole(self, reply: Reply, summary: ResponseSummary) -> dict[str, Any]:
        output = []
        if reply.reasoning:
            output.append(_text_item("reasoning", "completed", reply.reasoning, self._item_id("reasoning", 0)))
        if reply.content:
            output.append(_text_item("message", "completed", reply.content, self._item_id("message", len(output))))
        for call in reply.calls:
            item_id = self._item_id("function_call", len(output))
            output.append(_call("completed", call.id, call.name, call.arguments or "{}", item_id))
        cut = _INCOMPLETE.get(summary.finish)
        status = "incomplete" if cut else "completed"
        if cut and output:
            output[-1]["status"] = status
        return self._response(status, output, _usage(summary), cut)


def _usage(summary: ResponseSummary) -> dict[str, Any]:
    return {
        "input_tokens": summary.prompt_tokens,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": summary.output_tokens,
        "output_tokens_details": {"reasoning_tokens": summary.reasoning_tokens},
        "total_tokens": summary.prompt_tokens + summary.output_tokens,
    }


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
_INCLUDABLE = ("reasoning.encrypted_content",)  # reasoning is sent in the clear, so there is nothing to encrypt
_NAMES = {"max_tokens": "max_output_tokens", "response_format": "text.format", "messages": "input"}
_TEXT_PARTS = ("input_text", "output_text", "text", "refusal", "reasoning_text", "summary_text")


def translate(fields: Fields, uses: TemplateUses) -> ChatTranslation:
    """Raises 400 naming the field."""
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
    kept = ("name", "description", "parameters", "strict")
    return {"type": "function", "function": {name: tool[name] for name in kept if tool.get(name) is not None}}


def _choice(choice: object) -> object:
    """The choice in the form of chat completions, whose reader refuses a malformed one."""
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
    """Builds messages from items. The items of one answer make one message: reasoning, then text, then calls."""

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
                builder.add_text(role, _joined_text(content, f"{where}.content", "" if role == "assistant" else "\n"))
        case "reasoning":
            parts = item.get("content") or item.get("summary") or []
            builder.add("assistant", "", reasoning_content=_joined_text(parts, f"{where}.content", "\n"))
        case "function_call":
            names = ("call_id", "name", "arguments")
            call_id, name, arguments = (string_of(item, each, where) for each in names)
            function = {"name": name, "arguments": arguments}
            builder.add_call({"id": call_id, "type": "function", "function": function})
        case "function_call_output":
            text = _joined_text(item.get("output"), f"{where}.output", "\n")
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
            parts.append({"type": "text", "text": _joined_text([part], where, "")})
            continue
        if part.get("file_id") is not None:
            raise unsupported(f"{place}.file_id", "no files are kept here; give the image's URL or its data")
        image = {"url": string_of(part, "image_url", place)} | (
            {"detail": part["detail"]} if part.get("detail") else {}
        )
        parts.append({"type": "image_url", "image_url": image})
    return parts


def _joined_text(content: object, where: str, between: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad_request(f"{where} must be a string or a list of parts", param=where)
    texts = []
    for index, part in enumerate(content):
        place = f"{where}[{index}]"
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind not in _TEXT_PARTS:
            raise bad_request(f"{place} is of type {kind!r}; this model takes text only", param=f"{place}.type")
        texts.append(string_of(part, "refusal" if kind == "refusal" else "text", place))
    return between.join(texts)
