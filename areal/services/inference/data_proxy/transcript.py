"""What an external model answered, put together from its chunks as one chat completion.

It is what is recorded, and what a repeated call is told.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from areal.services.inference.data_proxy.shapes import DONE, event
from areal.services.inference.recording.conversation import Conversation
from areal.services.inference.recording.values import TextSample, TextTurn, Turn

_JOINED = ("content", "reasoning_content", "reasoning", "refusal")


class Transcript:
    """Hears an answer, whole or in chunks."""

    def __init__(self) -> None:
        self._completion: dict[str, Any] = {}
        self._choices: dict[int, dict[str, Any]] = {}

    def whole(self, data: Mapping[str, Any]) -> None:
        self._completion = dict(data)
        self._choices = {place: dict(choice) for place, choice in enumerate(data.get("choices") or ())}

    def chunk(self, data: Mapping[str, Any]) -> None:
        for name in ("id", "created", "model", "usage"):
            if data.get(name) is not None:
                self._completion[name] = data[name]
        for chosen in data.get("choices") or ():
            index = chosen.get("index", 0)
            blank = {"index": index, "message": {"role": "assistant", "content": ""}, "finish_reason": None}
            choice = self._choices.setdefault(index, blank)
            choice["finish_reason"] = chosen.get("finish_reason") or choice["finish_reason"]
            _join(choice["message"], chosen.get("delta") or {})

    def completion(self) -> dict[str, Any] | None:
        """None when the answer is not complete."""
        if not self._choices or any(choice.get("finish_reason") is None for choice in self._choices.values()):
            return None
        choices = [self._choices[index] for index in sorted(self._choices)]
        return {"object": "chat.completion", **self._completion, "choices": choices}


def _join(message: dict[str, Any], delta: Mapping[str, Any]) -> None:
    for name in _JOINED:
        if delta.get(name):
            message[name] = (message.get(name) or "") + delta[name]
    for position, fragment in enumerate(delta.get("tool_calls") or ()):
        calls = message.setdefault("tool_calls", [])
        index = fragment.get("index", position)
        while len(calls) <= index:
            calls.append({"type": "function", "function": {"name": "", "arguments": ""}})
        if fragment.get("id"):
            calls[index]["id"] = fragment["id"]
        function = fragment.get("function") or {}
        for name in ("name", "arguments"):
            calls[index]["function"][name] += function.get(name) or ""


def text_samples(
    completion: Mapping[str, Any], messages: Sequence[Mapping[str, Any]], conversation: Conversation
) -> list[TextSample]:
    """One a choice; the first one keeps the whole answer, to be said again."""
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


def recorded_completion(turns: Sequence[Turn]) -> dict[str, Any]:
    first = turns[0]
    assert isinstance(first, TextTurn)
    completion: dict[str, Any] = first.extra["completion"]
    return completion


def chunks_of(completion: Mapping[str, Any]) -> Iterator[bytes]:
    """A completion as a stream says it."""
    head = {name: completion.get(name) for name in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
    for choice in completion["choices"]:
        message = dict(choice["message"])
        if "tool_calls" in message:
            message["tool_calls"] = [{"index": at, **call} for at, call in enumerate(message["tool_calls"])]
        index = choice.get("index", 0)
        yield event({**head, "choices": [{"index": index, "delta": message, "finish_reason": None}]})
        yield event({**head, "choices": [{"index": index, "delta": {}, "finish_reason": choice.get("finish_reason")}]})
    if completion.get("usage"):
        yield event({**head, "choices": [], "usage": completion["usage"]})
    yield DONE
