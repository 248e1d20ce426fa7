"""What text there is in an agent's own stream."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from areal.services.agent.own_stream import OwnStreamText


def events_of(*data: object) -> str:
    return "".join(f"data: {each if isinstance(each, str) else json.dumps(each)}\n\n" for each in data)


def read(kind: str | None, text: str | bytes, status: int = 200, size: int = 3) -> str:
    body, own = text.encode() if isinstance(text, str) else text, OwnStreamText()
    headers = {} if kind is None else {"content-Type": kind}
    found = own.take({"type": "response", "status": status, "headers": headers})
    for start in range(0, len(body), size):
        found += own.take({"type": "data", "data": base64.b64encode(body[start : start + size]).decode()})
    return found + own.end()


CHAT = [
    {"choices": [{"delta": {"role": "assistant"}}]},
    *({"choices": [{"delta": {"content": each}}]} for each in "né"),
]
RESPONSES = [
    {"type": "response.created", "response": {}},
    {"type": "response.output_text.delta", "delta": "n"},
    {"type": "response.function_call_arguments.delta", "delta": "no"},
    {"type": "response.output_text.delta", "delta": "é"},
]
MESSAGES = [{"type": "content_block_delta", "delta": {"type": "text_delta", "text": each}} for each in "né"]
TEXT = [{"type": "output_text", "text": "né"}]


@pytest.mark.parametrize("size", [1, 3, 10_000])
@pytest.mark.parametrize(
    ("kind", "body", "text"),
    [
        ("text/event-stream", events_of(*CHAT, "[DONE]"), "né"),
        ("text/event-stream; charset=utf-8", events_of(*RESPONSES), "né"),
        ("Text/Event-Stream", events_of(*MESSAGES, {"type": "message_stop"}), "né"),
        ("text/event-stream", events_of("one", {"mine": 1}), 'one\n{"mine": 1}'),
        ("text/event-stream", events_of({"type": "token", "text": "né"}), '{"type": "token", "text": "n\\u00e9"}'),
        ("text/event-stream", events_of({"type": "ping"}, {"type": "message_start", "message": {}}), ""),
        ("text/event-stream", "data: one\n\ndata: two", "one\ntwo"),
        ("text/plain", "né\r\n", "né\r\n"),
        ("text/plain", b"n\xff", "n\ufffd"),
        ("application/json", json.dumps({"choices": [{"message": {"content": "né"}}]}), "né"),
        ("application/json", json.dumps({"object": "response", "output": [{"content": TEXT}, {"type": "x"}]}), "né"),
        ("application/json", json.dumps({"type": "message", "content": TEXT}), "né"),
        ("application/json", '{"mine": 1}', '{"mine": 1}'),
        ("image/png", b"\x89PNG", ""),
        (None, "né", ""),
    ],
)
def test_stream_text_is_independent_of_chunking(kind: str | None, body: Any, text: str, size: int) -> None:
    assert read(kind, body, size=size) == text


def test_oversized_json_yields_no_text() -> None:
    part = 3 * 1024 * 1024
    assert read("application/json", json.dumps({"mine": "x" * 2 * part}), size=part) == ""


def test_error_yields_no_text() -> None:
    assert read("text/plain", "internal error", status=500) == ""
