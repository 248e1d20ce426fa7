"""Anthropic's SDK."""

from __future__ import annotations

from typing import Any

import pytest

from tests.clients.conftest import MODEL, Served
from tests.clients.known import covers
from tests.clients.shapes import SAY, TOKENS, TOOL

ASKED: Any = {"model": MODEL, "messages": [{"role": "user", "content": SAY}], "max_tokens": TOKENS}
TOOLS: Any = [{"name": "set_light", "input_schema": TOOL["function"]["parameters"]}]


def client(served: Served, retries: int = 0, kind: str = "Anthropic") -> Any:
    anthropic = pytest.importorskip("anthropic")
    return getattr(anthropic, kind)(base_url=served.url, api_key=served.key, max_retries=retries)


@covers("anthropic", "chat", "usage")
def test_chat_and_usage(served: Served) -> None:
    answer = client(served).messages.create(**ASKED)
    assert answer.role == "assistant" and answer.stop_reason in ("end_turn", "max_tokens")
    counted = client(served).messages.count_tokens(model=MODEL, messages=ASKED["messages"])
    assert answer.usage.input_tokens == counted.input_tokens and answer.usage.output_tokens > 0


@covers("anthropic", "streaming")
def test_streaming(served: Served) -> None:
    with client(served).messages.stream(**ASKED) as stream:
        kinds = {event.type for event in stream}
        assert stream.get_final_message().usage.output_tokens > 0
    assert kinds >= {"message_start", "content_block_delta", "message_stop"}


@covers("anthropic", "tools")
def test_tools(served: Served) -> None:
    given = {**ASKED, "tools": TOOLS, "tool_choice": {"type": "any"}, "max_tokens": 200}
    answer = client(served).messages.create(**given)
    (call,) = [block for block in answer.content if block.type == "tool_use"]
    assert answer.stop_reason == "tool_use" and call.input["state"] in ("on", "off")
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "done"}]}
    reply = {"role": "assistant", "content": answer.content}
    again = {**ASKED, "tools": TOOLS, "messages": [*ASKED["messages"], reply, result]}
    assert client(served).messages.create(**again).stop_reason


@covers("anthropic", "errors")
def test_errors(served: Served) -> None:
    anthropic = pytest.importorskip("anthropic")
    with pytest.raises(anthropic.NotFoundError):
        client(served).messages.create(**{**ASKED, "model": "absent"})
    with pytest.raises(anthropic.AuthenticationError):
        client(Served(served.url, "wrong", "")).messages.create(**ASKED)
    with pytest.raises(anthropic.BadRequestError):
        client(served).messages.create(**{**ASKED, "messages": []})


@covers("anthropic", "retries")
def test_retries(flaky: Served) -> None:
    assert client(flaky, retries=2).messages.create(**ASKED).content is not None


@covers("anthropic", "async")
async def test_async(served: Served) -> None:
    async with client(served, kind="AsyncAnthropic") as ours, ours.messages.stream(**ASKED) as stream:
        assert [event async for event in stream]
