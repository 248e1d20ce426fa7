"""GuideLLM's requests, as its HTTP backend makes them."""

from __future__ import annotations

import http.client
import json
from typing import Any

import pytest

from tests.clients.conftest import MODEL, Served
from tests.clients.known import covers

OPTIONS = {"include_usage": True, "continuous_usage_stats": True}
CHAT = {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hello there"}]}]}


def post(served: Served, path: str, body: dict[str, Any]) -> tuple[int, str]:
    connection = http.client.HTTPConnection(served.url.removeprefix("http://"), timeout=60)
    headers = {"Authorization": f"Bearer {served.key}", "Content-Type": "application/json"}
    connection.request("POST", path, json.dumps(body), headers)
    answer = connection.getresponse()
    reply = answer.status, answer.read().decode()
    connection.close()
    return reply


@covers("guidellm", "chat", "streaming", "usage")
@pytest.mark.parametrize(
    ("path", "asked", "limit"),
    [("/v1/chat/completions", CHAT, "max_completion_tokens"), ("/v1/completions", {"prompt": "Hello"}, "max_tokens")],
)
def test_streamed_request(served: Served, path: str, asked: dict[str, Any], limit: str) -> None:
    body = {**asked, "model": MODEL, "stream": True, "stream_options": OPTIONS, limit: 8, "stop": None}
    status, reply = post(served, path, {**body, "ignore_eos": True})
    assert status == 200, reply
    events = [json.loads(line[6:]) for line in reply.splitlines() if line.startswith("data: {")]
    assert events[-1]["usage"]["completion_tokens"] == 8
    assert all(event["usage"] is not None for event in events), "continuous usage is in each event"
