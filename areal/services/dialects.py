"""Forms of OpenAI's APIs that several services have: texts of requests, and answers from the pieces that they come in.

A tool call is its start, fragments of its arguments (JSON text, to be joined), and its end, unless that was not seen.
Calls are numbered from 0 and come one after the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import orjson
from pydantic_core import from_json

from areal.dataclasses import dataclass, field
from areal.services.http.errors import bad_field, bad_request

TEXT_PARTS = ("input_text", "output_text", "text", "refusal", "reasoning_text", "summary_text")


def string_of(item: Mapping[str, object], name: str, where: str) -> str:
    """Return a field of an item at ``where``. Raises 400 unless it is a string."""
    value = item.get(name)
    if not isinstance(value, str):
        raise bad_field(f"{where}.{name}", "must be a string")
    return value


def joined_text(content: object, where: str, between: str) -> str:
    """Return the text of a content at ``where``: a string, or ``TEXT_PARTS``, joined. Raises 400."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad_field(where, "must be a string or a list of parts")
    texts = []
    for index, part in enumerate(content):
        place = f"{where}[{index}]"
        if not isinstance(part, Mapping):
            raise bad_field(place, "must be an object with a type")
        kind = part.get("type")
        if kind not in TEXT_PARTS:
            raise bad_request(f"{place}: this model takes text only, not {kind!r}", param=f"{place}.type")
        texts.append(string_of(part, "refusal" if kind == "refusal" else "text", place))
    return between.join(texts)


# Custom tools, whose input is a text: the model knows each as a function whose one argument is ``input``. Responses and
# chat completions write the same tool and the same call in two forms.
# https://platform.openai.com/docs/guides/function-calling#custom-tools

_PARAMETERS = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}


def custom_function(tool: Mapping[str, object]) -> dict[str, object]:
    """Return the function that a custom tool is to the model, without its name. A grammar is described."""
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
    """Return a custom tool's input from the model's arguments; all else is the input itself."""
    try:
        value = from_json(arguments, allow_partial="trailing-strings")["input"]
    except (ValueError, KeyError, TypeError):
        return arguments
    return value if isinstance(value, str) else arguments


def custom_call(call_id: str, name: str, given: str) -> dict[str, object]:
    return {"id": call_id, "type": "custom", "custom": {"name": name, "input": given}}


def function_of(item: object) -> object:
    """Return a custom tool, or the choice of one, of a chat completion as a function. Others stay as they are."""
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


@dataclass(slots=True)  # not frozen: there is one for each step of each stream, and freezing doubles its cost
class Content:
    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """``id`` is the one that later messages refer to."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    index: int
    fragment: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    index: int


Piece = Content | Reasoning | CallStart | CallArguments | CallEnd


def joined(pieces: Iterable[Piece]) -> tuple[Piece, ...]:
    """Return the same in as few pieces as can be."""
    out: list[Piece] = []
    for piece in pieces:
        match out[-1] if out else None, piece:
            case Content(before), Content(text):
                out[-1] = Content(before + text)
            case Reasoning(before), Reasoning(text):
                out[-1] = Reasoning(before + text)
            case CallArguments(index, before), CallArguments(_, text):
                out[-1] = CallArguments(index, before + text)
            case _:
                out.append(piece)
    return tuple(out)


@dataclass
class ToolCall:
    id: str
    name: str
    arguments: str = ""


@dataclass
class Reply:
    """Pieces, joined. Equal texts give equal replies, however they were split."""

    content: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list)

    def add(self, pieces: Iterable[Piece]) -> None:
        content, reasoning = [], []
        for piece in pieces:
            match piece:
                case Content(text):
                    content.append(text)
                case Reasoning(text):
                    reasoning.append(text)
                case CallStart(_, call_id, name):
                    self.calls.append(ToolCall(call_id, name))
                case CallArguments(index, fragment):
                    self.calls[index].arguments += fragment
                case CallEnd():
                    pass
        self.content += "".join(content)
        self.reasoning += "".join(reasoning)

    def pieces(self) -> Iterator[Piece]:
        """Yield the reply in its pieces, without the ends of calls."""
        if self.reasoning:
            yield Reasoning(self.reasoning)
        if self.content:
            yield Content(self.content)
        for index, call in enumerate(self.calls):
            yield CallStart(index, call.id, call.name)
            yield CallArguments(index, call.arguments)


DONE = b"data: [DONE]\n\n"


def sse_data(data: object) -> bytes:
    return b"data: " + orjson.dumps(data) + b"\n\n"


def sse_event(kind: str, data: Mapping[str, object]) -> bytes:
    return b"event: " + kind.encode() + b"\ndata: " + orjson.dumps({"type": kind, **data}) + b"\n\n"


def assistant_message(reply: Reply) -> dict[str, Any]:
    """Return the reply as the message with which clients send it back."""
    message: dict[str, Any] = {"role": "assistant", "content": reply.content, "refusal": None}
    if reply.reasoning:
        message["reasoning_content"] = reply.reasoning
    if reply.calls:
        message["content"] = reply.content or None
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in reply.calls
        ]
    return message


def chat_delta(piece: Piece) -> dict[str, object] | None:
    match piece:
        case Content(text):
            return {"content": text}
        case Reasoning(text):
            return {"reasoning_content": text}
        case CallStart(index, call_id, name):
            call = {"index": index, "id": call_id, "type": "function", "function": {"name": name, "arguments": ""}}
            return {"tool_calls": [call]}
        case CallArguments(index, fragment):
            return {"tool_calls": [{"index": index, "function": {"arguments": fragment}}]}
        case CallEnd():
            return None


# Responses: one item at a time (reasoning, a message, a function's call), done before the next one is added. Events are
# numbered from 0. https://platform.openai.com/docs/api-reference/responses-streaming

_INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter"}
_ID_PREFIXES = {
    "message": "msg_",
    "reasoning": "rs_",
    "function_call": "fc_",
    "custom_tool_call": "ctc_",
    "mcp_call": "mcp_",
}


@dataclass(frozen=True)
class CallForm:
    """How the call of a tool is answered, where the model knows the tool by another name. ``is_custom``: its input is a
    text, not an object; the model writes it as the argument ``input``."""

    name: str
    namespace: str | None = None
    is_custom: bool = False


def _text_item(kind: str, status: str, text: str, item_id: str) -> dict[str, Any]:
    """Return a message or reasoning, with its one part."""
    item = {"id": item_id, "type": kind, "status": status}
    if kind == "message":
        part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
        return {**item, "role": "assistant", "content": [part]}
    return {**item, "summary": [], "content": [{"type": "reasoning_text", "text": text}]}


def _call(status: str, call_id: str, form: CallForm, arguments: str, item_id: str) -> dict[str, Any]:
    item = {"id": item_id, "type": "custom_tool_call" if form.is_custom else "function_call", "status": status}
    item |= {"call_id": call_id, "name": form.name}
    if form.namespace is not None:
        item["namespace"] = form.namespace
    return {**item, "input" if form.is_custom else "arguments": arguments}


@dataclass(frozen=True)
class ResponseSummary:
    """The end of an answer. ``finish``: a chat completion's finish reason; ``stop``: the stop string that was met."""

    finish: str
    prompt_tokens: int
    output_tokens: int
    reasoning_tokens: int = 0
    stop: str | None = None


class ResponsesWriter:
    """Items are named after the answer and their place in it: a replayed answer has the same ids. ``forms``: of tools
    that the model knows by another name. ``whole_only``: build the response, but no stream events."""

    whole_only = False

    def __init__(
        self,
        answer_id: str,
        model: str,
        created: int,
        *,
        echoed: Mapping[str, object],
        forms: Mapping[str, CallForm] = {},
    ) -> None:
        self._id = answer_id
        self._model = model
        self._echoed = echoed
        self._forms = forms
        self._created = created
        self._number = -1
        self._items: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None  # the item that is being written
        self._open_form = CallForm("")  # of that item, if it is a call
        self._text: list[str] = []  # of that item

    def _event(self, kind: str, **data: Any) -> bytes:
        if self.whole_only:
            return b""
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
        self, status: str, output: list[dict[str, object]], usage: dict[str, object] | None, cut: str | None
    ) -> dict[str, object]:
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
                done, form = self._done("completed"), self._forms.get(name) or CallForm(name)
                self._open_form = form
                item_id = self._item_id("custom_tool_call" if form.is_custom else "function_call", len(self._items))
                return done + self._add(_call("in_progress", call_id, form, "", item_id))
            case CallArguments(_, fragment) if self._open_form.is_custom:
                self._text.append(fragment)  # its input can be read from the whole
                return b""
            case CallArguments(_, fragment):
                return self._delta("response.function_call_arguments.delta", fragment)
            case CallEnd():
                return self._done("completed")

    def _at(self) -> dict[str, Any]:
        assert self._open is not None
        return {"item_id": self._open["id"], "output_index": len(self._items)}

    def _in(self, kind: str) -> bytes:
        """Make sure that an item of this kind is open, with its one part."""
        if self._open is not None and self._open["type"] == kind:
            return b""
        done = self._done("completed")
        item_id = self._item_id(kind, len(self._items))
        item = _text_item(kind, "in_progress", "", item_id)
        added = self._add({**item, "content": []})
        part = self._event("response.content_part.added", **self._at(), content_index=0, part=item["content"][0])
        return done + added + part

    def _add(self, item: dict[str, object]) -> bytes:
        self._open, self._text = item, []
        return self._event("response.output_item.added", output_index=len(self._items), item=item)

    def _delta(self, kind: str, text: str, **more: Any) -> bytes:
        self._text.append(text)
        return self._event(kind, **self._at(), delta=text, **more)

    def _done(self, status: str) -> bytes:
        """Return the events that complete the open item, if one is open."""
        item = self._open
        if item is None:
            return b""
        text, kind, at = "".join(self._text), item["type"], self._at()
        if kind == "custom_tool_call":
            given = custom_input(text)
            whole = _call(status, item["call_id"], self._open_form, given, item["id"])
            events = [
                self._event("response.custom_tool_call_input.delta", **at, delta=given),
                self._event("response.custom_tool_call_input.done", **at, input=given),
            ]
        elif kind == "function_call":
            whole = _call(status, item["call_id"], self._open_form, text or "{}", item["id"])
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
        done, response = self._end(summary)
        return done + self._event(f"response.{response['status']}", response=response)

    def whole(self, reply: Reply, summary: ResponseSummary) -> dict[str, object]:
        self.whole_only = True
        self.pieces(reply.pieces())
        return self._end(summary)[1]

    def _end(self, summary: ResponseSummary) -> tuple[bytes, dict[str, object]]:
        """Return the events that complete the last item, and the whole response."""
        cut = _INCOMPLETE.get(summary.finish)
        status = "incomplete" if cut else "completed"
        return self._done(status), self._response(status, self._items, _usage(summary), cut)


def _usage(summary: ResponseSummary) -> dict[str, object]:
    return {
        "input_tokens": summary.prompt_tokens,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": summary.output_tokens,
        "output_tokens_details": {"reasoning_tokens": summary.reasoning_tokens},
        "total_tokens": summary.prompt_tokens + summary.output_tokens,
    }
