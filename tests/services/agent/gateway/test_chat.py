"""Turns by the Chat Completions API."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.services.agent.gateway.conftest import AgentService
from tests.services.processes import chat_text


def chat(service: AgentService, message: str, **body: Any) -> Any:
    return service.call("POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": message}], **body})


def test_client_has_whole_completion(service: AgentService) -> None:
    messages: Any = [{"role": "user", "content": "tools"}]
    answer = service.sdk().chat.completions.create(model="m", messages=messages)
    [choice] = answer.choices
    assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == ("Sunny.", None, "stop")
    assert (answer.model, answer.object) == ("m", "chat.completion")


def test_client_has_streamed_completion(service: AgentService) -> None:
    messages: Any = [{"role": "user", "content": "good day"}]
    stream = service.sdk().chat.completions.create(model="m", messages=messages, stream=True)
    chunks = list(stream)
    deltas = [chunk.choices[0].delta.content for chunk in chunks]
    assert deltas == ["You", " said:", " good", " day", None]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_summary_is_sent_when_no_deltas_were(service: AgentService) -> None:
    events = list(service.stream("metadata", "summary", "/v1/chat/completions").events())
    assert events[-1] == "[DONE]"
    assert "chat_request" in json.loads(chat_text(events))


@pytest.mark.parametrize("stream", [False, True])
def test_raw_agent_stream_is_passed_on(service: AgentService, stream: bool) -> None:
    answer = chat(service, "stream", stream=stream, user="own-stream")
    assert (answer.status, answer.body) == (200, b"data: one\n\ndata: two\n\n")
    assert (answer.headers["content-type"], answer.headers["x-own"]) == ("text/event-stream", "1")
    assert answer.headers["x-areal-session-key"] == "own-stream"


def test_retry_replays_raw_agent_stream(service: AgentService) -> None:
    headers = {"X-AReaL-Session-Key": "stream-again", "Idempotency-Key": "once"}
    body = {"messages": [{"role": "user", "content": "stream"}]}
    for _ in range(2):
        answer = service.call("POST", "/v1/chat/completions", body, headers=headers)
        assert (answer.status, answer.body) == (200, b"data: one\n\ndata: two\n\n")
        assert answer.headers["x-own"] == "1"
    assert service.call("GET", "/sessions/stream-again").json()["turns"] == 1


def test_retry_of_unkept_stream_is_410_or_summary(service: AgentService) -> None:
    headers = {"X-AReaL-Session-Key": "stream-much", "Idempotency-Key": "once"}
    body = {"messages": [{"role": "user", "content": "stream much"}]}
    assert service.call("POST", "/v1/chat/completions", body, headers=headers).status == 200
    again = service.call("POST", "/v1/chat/completions", body, headers=headers)
    assert (again.status, again.json()["error"]["code"]) == (410, "stream_lost")
    answers = [
        service.call("POST", "/v1/responses", {"input": "stream much"}, headers={**headers, "Idempotency-Key": "other"})
        for _ in range(2)
    ]
    assert [answer.json()["status"] for answer in answers] == ["completed", "completed"]
    assert service.call("GET", "/sessions/stream-much").json()["turns"] == 2


def test_large_number_of_deltas_is_passed_on(service: AgentService) -> None:
    events = list(service.stream("many", "chat-many", "/v1/chat/completions").events())
    assert len(chat_text(events[:-1])) == 20_000 * 1000


def test_agent_sees_request_without_session_keys(service: AgentService) -> None:
    body = {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "metadata"}], "seed": 3}
    answer = service.call("POST", "/chat/completions", {**body, "user": "secret", "metadata": {"a": 1}})
    reported = json.loads(answer.json()["choices"][0]["message"]["content"])
    assert reported == {"a": 1, "chat_request": body}


BAD = [
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "hello"}, "messages"),
    ({"messages": ["hello"]}, "messages[0]"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    ({"messages": [{"role": "assistant", "content": "me"}]}, "messages"),
    ({"n": 2}, "n"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"metadata": {"chat_request": 1}}, "metadata.chat_request"),
]


@pytest.mark.parametrize(("body", "param"), BAD, ids=[f"{param}-{place}" for place, (_, param) in enumerate(BAD)])
def test_bad_body_is_refused_by_name(service: AgentService, body: dict[str, Any], param: str) -> None:
    answer = chat(service, "hello", **body)
    assert (answer.status, answer.json()["error"]["param"]) == (400, param)


def test_failure_before_and_in_a_stream(service: AgentService) -> None:
    answer = chat(service, "fail", stream=True)
    assert (answer.status, answer.json()["error"]["code"]) == (500, "agent_failed")
    events = list(service.stream("lose", "chat-lost", "/v1/chat/completions").events())
    assert events[-1]["error"]["code"] == "worker_lost"
