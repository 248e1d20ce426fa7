"""Streams of an external API: their events are passed on as they are, and recorded, whatever their text says."""

from __future__ import annotations

import itertools
import json
import socketserver
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import orjson
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from areal.http.events import EventReader
from areal.services.inference.data_proxy.external_recording import MessagesRecorder, ResponseRecorder
from tests.services.inference.data_proxy.test_external import external
from tests.services.processes import Process, Processes, wait_ready

Event = tuple[str, Any]
MARKERS = [
    "data: [DONE]\n",
    "message_stop",
    '"error"',
    '"finish_reason":"stop"',
    "event: message_stop\ndata: {}\n\n",
    "\r",
]
PIECES = st.lists(st.one_of(st.sampled_from(MARKERS), st.text(max_size=8)), min_size=1, max_size=5)


def chat_events(pieces: list[str]) -> list[Event]:
    chunk = lambda delta, finish=None: {"id": "x", "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}  # noqa: E731
    return [("", chunk({"content": piece})) for piece in pieces] + [("", chunk({}, "stop")), ("", "[DONE]")]


def messages_events(pieces: list[str]) -> list[Event]:
    deltas = [{"type": "content_block_delta", "delta": {"type": "text_delta", "text": piece}} for piece in pieces]
    ends = [{"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 3}}]
    events: list[dict[str, Any]] = [
        {"type": "message_start", "message": {"id": "m"}},
        *deltas,
        *ends,
        {"type": "message_stop"},
    ]
    return [(event["type"], event) for event in events]


def encoded(events: list[Event], end: str = "\n") -> list[bytes]:
    blocks = []
    for name, data in events:
        text = data if isinstance(data, str) else json.dumps(data)
        lines = [f"event: {name}"] if name else []
        blocks.append("".join(line + end for line in [*lines, f"data: {text}", ""]).encode())
    return blocks


def relayed(recorder: ResponseRecorder, stream: bytes, places: list[int]) -> bytes:
    """What a caller gets of a stream that comes in parts, before its last event."""
    edges = sorted({0, len(stream), *(place % (len(stream) + 1) for place in places)})
    reader, passed = EventReader(), b""
    for start, end in itertools.pairwise(edges):
        passed += b"".join(map(recorder.event, reader.feed(stream[start:end])))
    return passed + (recorder.event(last) if (last := reader.end()) is not None else b"")


@given(PIECES, st.sampled_from(["\n", "\r\n", "\r"]), st.lists(st.integers(0, 2000), max_size=12), st.integers(0, 2000))
@example(["data: [DONE]\n", "and message_stop"], "\n", [], 150)
@example(['"error"'] * 3, "\r\n", [403], 0)  # cut between the CR and the LF of a blank line
@pytest.mark.parametrize(
    ("kind", "events_of", "last"), [(ResponseRecorder, chat_events, 2), (MessagesRecorder, messages_events, 1)]
)
def test_streams_are_relayed_recorded_and_checked_for_cuts(
    kind: type[ResponseRecorder], events_of: Any, last: int, pieces: list[str], end: str, places: list[int], cut: int
) -> None:
    blocks = encoded(events_of(pieces), end)
    stream = b"".join(blocks)
    recorder = kind(None)
    passed = relayed(recorder, stream, places)
    assert passed + recorder.held == stream and recorder.held.strip() == blocks[-1].strip()
    completion = recorder._assembler.completion()
    assert recorder.is_whole and completion is not None
    assert completion["choices"][0]["message"]["content"] == "".join(pieces)

    cut_recorder, finish = kind(None), b"".join(blocks[: len(blocks) - last])  # all before what ends it
    relayed(cut_recorder, stream[: cut % (len(finish) + 1)], places)
    assert not cut_recorder.is_whole


@dataclass
class Provider:
    """An API that answers each call with ``answer``, raw, and then ends the connection."""

    url: str
    answer: bytes = b""


@pytest.fixture(scope="module")
def provider() -> Iterator[Provider]:
    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            head = b""
            while not head.endswith(b"\r\n\r\n"):
                head += self.rfile.readline()
            length = [
                int(line.split(b":")[1]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length")
            ]
            self.rfile.read(sum(length))
            self.wfile.write(found.answer if head.startswith(b"POST") else b"HTTP/1.0 200 OK\r\n\r\n{}")

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        found = Provider(f"http://127.0.0.1:{server.server_address[1]}")
        threading.Thread(target=server.serve_forever, name="provider", daemon=True).start()
        yield found
        server.shutdown()


@pytest.fixture(scope="module", params=["openai", "anthropic"])
def proxy(
    request: pytest.FixtureRequest,
    provider: Provider,
    module_processes: Processes,
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[str, Process]:
    state = str(tmp_path_factory.mktemp("state"))
    flags = ("--allow-private", "--provider-api", request.param, "--state-dir", state)
    started = external(module_processes, provider.url, "k", *flags)
    wait_ready(started)
    return request.param, started


ANSWER = ["A stream ends with\n", "data: [DONE]\n", "and a message with message_stop."]
PATHS = {"openai": ("/v1/chat/completions", chat_events), "anthropic": ("/v1/messages", messages_events)}


def test_stream_with_end_marker_in_text_is_recorded(
    proxy: tuple[str, Process], provider: Provider, module_processes: Processes
) -> None:
    api, process = proxy
    path, events_of = PATHS[api]
    opened = process.call("POST", "/rl/start_session", {"task_id": "t"}, key=module_processes.key).json()["sessions"][0]
    blocks = encoded(events_of(ANSWER))
    whole, cut = b"".join(blocks), b"".join(blocks[: 3 if api == "openai" else 4])
    answers = []
    for sent in (whole, cut):
        provider.answer = b"HTTP/1.0 200 OK\r\nContent-Type: text/event-stream\r\n\r\n" + sent
        answers.append(process.call("POST", path, asked(path), key=opened["session_api_key"]))
    assert [answer.status for answer in answers] == [200, 200]
    assert answers[0].body == whole
    assert answers[1].body.startswith(cut) and b"the stream was cut" in answers[1].body
    process.call("POST", "/rl/end_session", {}, key=opened["session_api_key"])
    body = {"session_ids": [opened["session_id"]]}
    exported = process.call("POST", "/export_trajectories", body, key=module_processes.key).json()
    (recorded,) = exported["traj"]["interactions"]
    assert recorded["response"]["content"] == "".join(ANSWER)
    assert [(each["code"], each["count"]) for each in exported["failures"]] == [("engine_failed", 1)]


def test_half_an_event_at_the_end_is_not_passed_on(
    proxy: tuple[str, Process], provider: Provider, module_processes: Processes
) -> None:
    api, process = proxy
    path, events_of = PATHS[api]
    blocks = encoded(events_of(ANSWER))
    for count in (3, len(blocks) - 1):
        sent, half = b"".join(blocks[:count]), blocks[1][: len(blocks[1]) // 2]
        provider.answer = b"HTTP/1.0 200 OK\r\nContent-Type: text/event-stream\r\n\r\n" + sent + half
        body = process.call("POST", path, asked(path), key=module_processes.key).body
        assert body.startswith(sent)
        reader = EventReader()
        more = [orjson.loads(event.data) for event in reader.feed(body[len(sent) :])]
        assert reader.end() is None and all("was cut" in each["error"]["message"] for each in more)
        assert len(more) == (0 if api == "openai" and count > 3 else 1)


def test_error_names_provider_that_does_not_stream(
    proxy: tuple[str, Process], provider: Provider, module_processes: Processes
) -> None:
    api, process = proxy
    body = orjson.dumps({"choices": [{"message": {"content": "hi"}, "finish_reason": "stop"}]})
    provider.answer = b"HTTP/1.0 200 OK\r\nContent-Type: application/json\r\n\r\n" + body
    for path in (PATHS[api][0], *(["/v1/responses"] if api == "openai" else [])):
        answer = process.call("POST", path, asked(path), key=module_processes.key)
        assert answer.status == 502, path
        assert "the request was for a stream, but the answer is application/json" in answer.json()["error"]["message"]


def test_error_of_the_provider_has_the_request_id_of_the_reply(
    proxy: tuple[str, Process], provider: Provider, module_processes: Processes
) -> None:
    api, process = proxy
    error = {"message": "no", "type": "invalid_request_error", "request_id": "theirs"}
    body = {"error": error} if api == "openai" else {"type": "error", "error": error, "request_id": "theirs"}
    provider.answer = b"HTTP/1.0 400 Bad Request\r\nContent-Type: application/json\r\n\r\n" + orjson.dumps(body)
    path = PATHS[api][0]
    answer = process.call("POST", path, {**asked(path), "stream": False}, key=module_processes.key)
    data = answer.json()
    assert answer.status == 400 and data["error"]["message"] == "no"
    assert (data["error"] if api == "openai" else data)["request_id"] == answer.headers["x-request-id"]


def asked(path: str) -> dict[str, Any]:
    body = {"model": "friend", "stream": True}
    if path == "/v1/responses":
        return {**body, "input": "hello"}
    return {**body, "max_tokens": 9, "messages": [{"role": "user", "content": "hello"}]}
