"""Anthropic's Messages API: answers as messages and as their events.

A block at a time: thinking, text, a tool's use; it is stopped before the next one starts.
https://docs.anthropic.com/en/docs/build-with-claude/streaming
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pydantic_core import from_json

from areal.services.inference.data_proxy.dialects.writer import Outcome, sse
from areal.services.inference.data_proxy.parsers import (
    CallArguments,
    CallEnd,
    CallStart,
    Content,
    Piece,
    Reasoning,
    Reply,
)

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use", "content_filter": "refusal"}


class AnthropicWriter:
    def __init__(self, answer_id: str, model: str) -> None:
        self._id = answer_id
        self._model = model
        self._index = -1
        self._open: str | None = None  # the type of the block that is open

    def opening(self, prompt_tokens: int) -> bytes:
        message = self._message([], None, None, _usage(prompt_tokens, 0))
        return sse("message_start", {"message": message}) + sse("ping", {})

    def _message(
        self, content: list[dict[str, Any]], stop_reason: str | None, stop: str | None, usage: dict[str, int]
    ) -> dict[str, Any]:
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

    def _in(self, kind: str, empty: dict[str, Any]) -> bytes:
        """Makes sure that a block of this kind is open."""
        if self._open == kind:
            return b""
        stopped = self._stop()
        self._index += 1
        self._open = kind
        return stopped + sse("content_block_start", {"index": self._index, "content_block": {"type": kind, **empty}})

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return sse("content_block_delta", {"index": self._index, "delta": delta})

    def _stop(self) -> bytes:
        if self._open is None:
            return b""
        self._open = None
        return sse("content_block_stop", {"index": self._index})

    def closing(self, outcome: Outcome) -> bytes:
        delta = {"stop_reason": _stop_reason(outcome), "stop_sequence": outcome.stop}
        usage = _usage(outcome.prompt_tokens, outcome.output_tokens)
        return self._stop() + sse("message_delta", {"delta": delta, "usage": usage}) + sse("message_stop", {})

    def whole(self, reply: Reply, outcome: Outcome) -> dict[str, Any]:
        content: list[dict[str, Any]] = []
        if reply.reasoning:
            content.append({"type": "thinking", "thinking": reply.reasoning, "signature": ""})
        if reply.content:
            content.append({"type": "text", "text": reply.content})
        for call in reply.calls:
            block = {"type": "tool_use", "id": call.id, "name": call.name, "input": _input(call.arguments)}
            content.append(block)
        usage = _usage(outcome.prompt_tokens, outcome.output_tokens)
        return self._message(content, _stop_reason(outcome), outcome.stop, usage)


def _usage(prompt_tokens: int, output_tokens: int) -> dict[str, int]:
    return {
        "input_tokens": prompt_tokens,
        "output_tokens": output_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 0,
    }


def _stop_reason(outcome: Outcome) -> str:
    if outcome.finish == "stop" and outcome.stop is not None:
        return "stop_sequence"
    return _STOP_REASONS.get(outcome.finish, outcome.finish)


def _input(arguments: str) -> dict[str, Any]:
    """The arguments as the object that this API wants; of those cut short, as much as there is."""
    try:
        value = from_json(arguments, allow_partial="trailing-strings")
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
