"""Records an external model's responses while they are relayed, before their last bytes are sent."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import orjson

from areal.dataclasses import dataclass, field
from areal.http.events import ServerEvent
from areal.services.dialects import DONE, sse_data
from areal.services.http.errors import ApiError, bad_request
from areal.services.inference.data_proxy.anthropic import chat_messages
from areal.services.inference.data_proxy.sessions import CallRecorder
from areal.services.inference.recorder.records import ConversationDigest, TextSample

T = TypeVar("T")
_JOINED = ("content", "reasoning_content", "reasoning", "refusal")


class NotACompletion(Exception):
    """An external API's response is not a chat completion."""


def decoded_answer(body: bytes) -> Mapping[str, object]:
    """Decode a JSON object. Raises NotACompletion."""
    try:
        data = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise NotACompletion(f"it is not valid JSON: {error}") from error
    if not isinstance(data, dict):
        raise NotACompletion("it is not an object")
    return data


def field_of(data: Mapping[str, object], name: str, kind: type[T], default: T) -> T:
    """Return a field of an external API's response; ``default`` for null. Raises NotACompletion for another type."""
    value = data.get(name)
    if value is None:
        return default
    if not isinstance(value, kind):
        raise NotACompletion(f"{name} is a {type(value).__name__}")
    return value


def items_of(data: Mapping[str, object], name: str) -> list[Mapping[str, object]]:
    """Return a field that is a list of objects; empty for null. Raises NotACompletion."""
    items = field_of(data, name, list, [])
    if not all(isinstance(item, dict) for item in items):
        raise NotACompletion(f"{name} has an item that is not an object")
    return items


def message_of(completion: Mapping[str, object]) -> Mapping[str, object]:
    """Return the first choice's message. Raises NotACompletion."""
    for choice in items_of(completion, "choices"):
        if choice.get("message") is not None:
            return field_of(choice, "message", dict, {})
        break
    raise NotACompletion("it has no message")


class CompletionAssembler:
    """Assembles one chat completion from its chunks, or takes a whole one. The completion is recorded, and replayed for
    repeated calls. Raises NotACompletion."""

    def __init__(self) -> None:
        self._completion: dict[str, object] = {}
        self._choices: dict[int, dict[str, Any]] = {}
        self._calls: dict[int, dict[int, dict[str, object]]] = {}  # of streamed choices, by the provider's numbers

    def whole(self, data: Mapping[str, object]) -> None:
        self._completion = dict(data)
        for place, choice in enumerate(items_of(data, "choices")):
            field_of(choice, "message", dict, {})
            self._choices[place] = dict(choice)

    def chunk(self, data: Mapping[str, object]) -> None:
        for name in ("id", "created", "model", "usage"):
            if data.get(name) is not None:
                self._completion[name] = data[name]
        for chosen in items_of(data, "choices"):
            index = field_of(chosen, "index", int, 0)
            blank = {"text": ""} if "text" in chosen else {"message": {"role": "assistant", "content": ""}}
            choice = self._choices.setdefault(index, {"index": index, **blank, "finish_reason": None})
            choice["finish_reason"] = chosen.get("finish_reason") or choice["finish_reason"]
            if "text" in choice:
                choice["text"] += field_of(chosen, "text", str, "")
            else:
                delta: Mapping[str, object] = field_of(chosen, "delta", dict, {})
                for name in _JOINED:
                    if text := field_of(delta, name, str, ""):
                        choice["message"][name] = (choice["message"].get(name) or "") + text
                _join_calls(self._calls.setdefault(index, {}), delta)

    def completion(self) -> dict[str, Any] | None:
        """Return the completion; None if it is incomplete."""
        if not self._choices or any(choice.get("finish_reason") is None for choice in self._choices.values()):
            return None
        for index, calls in self._calls.items():
            if calls:
                self._choices[index]["message"]["tool_calls"] = [calls[number] for number in sorted(calls)]
        choices = [self._choices[index] for index in sorted(self._choices)]
        kind = "text_completion" if "text" in choices[0] else "chat.completion"
        return {"object": kind, **self._completion, "choices": choices}


def _join_calls(calls: dict[int, dict[str, Any]], delta: Mapping[str, object]) -> None:
    for position, fragment in enumerate(items_of(delta, "tool_calls")):
        index = field_of(fragment, "index", int, position)
        call = calls.setdefault(index, {"type": "function", "function": {"name": "", "arguments": ""}})
        if fragment.get("id"):
            call["id"] = fragment["id"]
        function: Mapping[str, object] = field_of(fragment, "function", dict, {})
        for name in ("name", "arguments"):
            call["function"][name] += field_of(function, name, str, "")


def text_samples(
    completion: Mapping[str, Any], messages: Sequence[Mapping[str, Any]], conversation: ConversationDigest
) -> list[TextSample]:
    """Return one sample per choice. The first one contains the whole completion, for replays."""
    samples = []
    for place, choice in enumerate(completion["choices"]):
        message = choice.get("message") or {"role": "assistant", "content": choice.get("text")}
        samples.append(
            TextSample(
                messages=list(messages),
                response=message,
                finish_reason=str(choice.get("finish_reason") or "stop"),
                after=conversation.after(message),
                extra={"completion": dict(completion)} if place == 0 else {},
            )
        )
    return samples


def chunks_of(completion: Mapping[str, Any]) -> Iterator[bytes]:
    """Yield a recorded completion as stream events."""
    is_text = any("text" in choice for choice in completion["choices"])
    head = {name: completion.get(name) for name in ("id", "created", "model")}
    head["object"] = "text_completion" if is_text else "chat.completion.chunk"
    for choice in completion["choices"]:
        if is_text:
            yield sse_data({**head, "choices": [choice]})
            continue
        message = dict(choice["message"])
        if "tool_calls" in message:
            message["tool_calls"] = [{"index": at, **call} for at, call in enumerate(message["tool_calls"])]
        index = choice.get("index", 0)
        yield sse_data({**head, "choices": [{"index": index, "delta": message, "finish_reason": None}]})
        yield sse_data(
            {**head, "choices": [{"index": index, "delta": {}, "finish_reason": choice.get("finish_reason")}]}
        )
    if completion.get("usage"):
        yield sse_data({**head, "choices": [], "usage": completion["usage"]})
    yield DONE


CHAT_PATH = "/chat/completions"


@dataclass(eq=False)
class ResponseRecorder:
    """Reads one response while it is relayed, and records it. ``call`` None: nothing is recorded. ``held``: the bytes
    from the stream's last event on, which are sent once the response is recorded."""

    _call: CallRecorder | None
    _model: str = ""
    _messages: Sequence[Mapping[str, object]] = ()
    _answer_id: str | None = None
    _assembler: CompletionAssembler = field(default_factory=CompletionAssembler, init=False)
    _malformed: bool = field(default=False, init=False)
    _ended: bool = field(default=False, init=False)
    held: bytes = field(default=b"", init=False)

    def event(self, event: ServerEvent) -> bytes:
        """Take a stream's event; return the bytes that may be sent now."""
        if not self._ended and event.data:
            self._read(event.data)
        if self._ended:
            self.held += event.raw
            return b""
        return event.raw

    def _read(self, data: bytes) -> None:
        if data.strip() == b"[DONE]":
            self.done()
            return
        try:
            decoded = decoded_answer(data)
        except NotACompletion:
            self._malformed = True
            return
        if decoded.get("error") is None:
            self._take(decoded)
        else:  # the API's own error, which is passed on
            self._ended = self._malformed = True

    def done(self) -> None:
        """Take the stream's last event, ``[DONE]``."""
        self._ended = True

    def _take(self, chunk: Mapping[str, object]) -> None:
        self.data(chunk, whole=False)

    @property
    def is_whole(self) -> bool:
        """Whether the stream is complete: after its last event, after the API's error, or with all choices finished."""
        return self._ended or self._assembler.completion() is not None

    def data(self, data: Mapping[str, object], *, whole: bool) -> None:
        try:
            if whole:
                self._assembler.whole(self._completion(data))
            else:
                self._assembler.chunk(data)
        except NotACompletion:
            self._malformed = True

    def _completion(self, data: Mapping[str, object]) -> Mapping[str, object]:
        """Return a whole response as a chat completion. Raises NotACompletion."""
        return data

    async def answer(self, status: int, body: bytes) -> None:
        """Record a whole response. A status of 500 or more is counted as a failure, other errors are not."""
        if self._call is None:
            return
        if status != 200:
            if status >= 500:
                await self._call.fail("engine_failed")
            return
        with contextlib.suppress(NotACompletion):
            self.data(decoded_answer(body), whole=True)
        await self.end()

    async def end(self) -> None:
        """Store the response; an incomplete one is counted as a failure. Raises ApiError 507 if it cannot be stored."""
        if self._call is None:
            return
        completion = None if self._malformed else self._assembler.completion()
        if completion is None:
            await self._call.fail("engine_failed")
            return
        conversation = self._call.set_conversation(self._messages)
        answer_id = self._answer_id or str(completion.get("id") or self._call.answer_id("chatcmpl-"))
        created = completion.get("created")
        samples = text_samples(completion, self._messages, conversation)
        await self._call.record(answer_id, self._model, created if isinstance(created, int) else 0, samples)


def chat_recorder(
    recorder: CallRecorder, model: str, path: str, data: Mapping[str, object], answer_id: str | None = None
) -> ResponseRecorder:
    """Return the recorder of a call's response. Raises 400 for a session's call that cannot be recorded."""
    if not recorder.records(data.get("store") is not False):
        return ResponseRecorder(None)
    messages = data.get("messages")
    if path != CHAT_PATH:
        prompt = data.get("prompt")
        if not isinstance(prompt, str) and not recorder.has_session_key:
            return ResponseRecorder(None)
        if not isinstance(prompt, str):
            raise bad_request("a session's completion needs one prompt, as text", param="prompt")
        messages = [{"role": "user", "content": prompt}]
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        return ResponseRecorder(None)  # the API will refuse it
    return ResponseRecorder(recorder, model, messages, answer_id)


# Anthropic's events and messages, recorded as chat completions.

_FINISH = {"max_tokens": "length", "tool_use": "tool_calls", "refusal": "content_filter"}  # everything else: stop


class MessagesRecorder(ResponseRecorder):
    """Reads Anthropic's events and messages, as ``ResponseRecorder`` reads OpenAI's chunks and completions."""

    _blocks = 0  # tool_use blocks so far

    def _take(self, event: Mapping[str, object]) -> None:
        if event.get("type") == "message_stop":
            self._ended = True
        try:
            for chunk in self._chunks(event):
                self.data(chunk, whole=False)
        except NotACompletion:
            self._malformed = True

    @property
    def is_whole(self) -> bool:
        return self._ended

    def _completion(self, data: Mapping[str, object]) -> Mapping[str, object]:
        return _completion(data)

    def _chunks(self, event: Mapping[str, object]) -> Iterator[dict[str, object]]:
        match event.get("type"):
            case "message_start":
                message = _mapping(event, "message")
                yield {**_chunk({}), "id": message.get("id"), "usage": _usage(_mapping(message, "usage"))}
            case "content_block_start" if _mapping(event, "content_block").get("type") == "tool_use":
                block = _mapping(event, "content_block")
                self._blocks += 1
                yield self._call_chunk({"id": block.get("id")}, {"name": block.get("name"), "arguments": ""})
            case "content_block_delta":
                delta = _mapping(event, "delta")
                match delta.get("type"):
                    case "text_delta":
                        yield _chunk({"content": delta.get("text")})
                    case "thinking_delta":
                        yield _chunk({"reasoning_content": delta.get("thinking")})
                    case "input_json_delta":
                        yield self._call_chunk({}, {"arguments": delta.get("partial_json")})
            case "message_delta":
                reason = _mapping(event, "delta").get("stop_reason")
                yield {**_chunk({}, reason), "usage": _usage(_mapping(event, "usage"))}

    def _call_chunk(self, head: dict[str, object], function: dict[str, object]) -> dict[str, object]:
        return _chunk({"tool_calls": [{**head, "index": self._blocks - 1, "function": function}]})


def messages_recorder(recorder: CallRecorder, model: str, data: Mapping[str, object]) -> ResponseRecorder:
    """Return the recorder of a call's response. Raises 400 for a session's call whose messages are no chat."""
    if not recorder.records(True):
        return MessagesRecorder(None)
    try:
        messages = chat_messages(data.get("system"), data.get("messages"))
    except ApiError:
        if recorder.has_session_key:
            raise
        return MessagesRecorder(None)  # the API may accept it
    return MessagesRecorder(recorder, model, messages, None)


def _mapping(data: Mapping[str, object], name: str) -> Mapping[str, object]:
    value = data.get(name)
    return value if isinstance(value, Mapping) else {}


def _chunk(delta: dict[str, object], stop_reason: object = None) -> dict[str, object]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": _finish(stop_reason)}]}


def _finish(stop_reason: object) -> str | None:
    return None if stop_reason is None else _FINISH.get(str(stop_reason), "stop")


def _usage(usage: Mapping[str, object]) -> dict[str, int]:
    prompt, completion = (field_of(usage, name, int, 0) for name in ("input_tokens", "output_tokens"))
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def _completion(message: Mapping[str, object]) -> dict[str, object]:
    """Convert a whole Anthropic message to a chat completion."""
    answer: dict[str, Any] = {"role": "assistant", "content": ""}
    for block in items_of(message, "content"):
        match block.get("type"):
            case "text":
                answer["content"] += field_of(block, "text", str, "")
            case "thinking":
                answer["reasoning_content"] = answer.get("reasoning_content", "") + field_of(block, "thinking", str, "")
            case "tool_use":
                function = {"name": block.get("name"), "arguments": orjson.dumps(block.get("input") or {}).decode()}
                call = {"id": block.get("id"), "type": "function", "function": function}
                answer.setdefault("tool_calls", []).append(call)
    choice = {"index": 0, "message": answer, "finish_reason": _finish(message.get("stop_reason"))}
    return {"id": message.get("id"), "choices": [choice], "usage": _usage(_mapping(message, "usage"))}
