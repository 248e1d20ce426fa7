"""A service's routes, errors and counts, over its real server."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal.http.client import HttpReply
from areal.http.headers import Headers
from areal.services.http.auth import Access, AdminKey
from areal.services.http.errors import ApiError, refusal
from areal.services.http.messages import AnyResponse, Request, Response, StreamingResponse
from areal.services.http.service import EventCutter, Metrics, Service, json_response, to_response
from tests.services.http.server.server_fixture import RawAnswer, ServerFixture, get, post, serving

KEY = "Authorization: Bearer secret"


def make() -> Service:
    return Service("test", key=AdminKey(b"secret"), loopback=True, details=lambda: {"version": 7})


def error(answer: RawAnswer) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(answer.body)["error"]
    return found


@contextlib.asynccontextmanager
async def answering(service: Service) -> AsyncIterator[ServerFixture]:
    async with serving(service.answer) as fixture:
        yield fixture


async def test_probes_return_details() -> None:
    reason: str | None = "loading"
    service = Service("test", key=None, loopback=True, not_ready=lambda: reason, details=lambda: {"version": 7})
    local = "Host: localhost"
    async with answering(service) as fixture:
        health = json.loads((await fixture.ask(get("/health").replace(b"Host: here", local.encode()))).body)
        assert (health["status"], health["component"], health["version"], health["in_flight"]) == ("ok", "test", 7, 0)
        not_ready = await fixture.ask(get("/ready").replace(b"Host: here", local.encode()))
        assert not_ready.status == 503 and json.loads(not_ready.body)["reason"] == "loading"
        reason = None
        assert (await fixture.ask(get("/ready").replace(b"Host: here", local.encode()))).status == 200
        service.lifetime.drain()
        draining = await fixture.ask(get("/ready").replace(b"Host: here", local.encode()))
        assert draining.status == 503 and json.loads(draining.body)["status"] == "draining"


async def test_unknown_path_and_method_use_error_shape_of_api() -> None:
    async with answering(make()) as fixture:
        unknown = await fixture.ask(get("/nope", "x-request-id: r-1"))
        assert unknown.status == 404 and error(unknown)["code"] == "unknown_path"
        assert error(unknown)["request_id"] == unknown.headers["x-request-id"] == "r-1"
        wrong = await fixture.ask(post(b"", path="/health"))
        assert wrong.status == 405 and wrong.headers["allow"] == "GET, HEAD"
        anthropic = await fixture.ask(get("/v1/messages/nope", "x-request-id: r-2"))
        assert json.loads(anthropic.body)["type"] == "error" and anthropic.headers["request-id"] == "r-2"


async def test_key_is_checked_before_body() -> None:
    async def take(request: Request) -> AnyResponse:
        return Response(200, await request.read(10))

    service = make()
    service.route("POST", "/take", take, Access.ADMIN)
    data = post(b"x" * 10, "Expect: 100-continue", path="/take")[:-10]
    async with answering(service) as fixture:
        assert (await fixture.ask(data)).status == 401
        assert (await fixture.ask(data.replace(b"Expect", f"{KEY}\r\nExpect".encode()))).status == 100


async def test_handler_sees_if_admin_key_was_given() -> None:
    async def who(request: Request) -> AnyResponse:
        return json_response({"admin": request.by_admin})

    service = make()
    service.route("GET", "/who", who, Access.SESSION)
    async with answering(service) as fixture:
        assert json.loads((await fixture.ask(get("/who", KEY))).body) == {"admin": True}
        assert json.loads((await fixture.ask(get("/who", "x-api-key: sk-other"))).body) == {"admin": False}
        assert (await fixture.ask(get("/who"))).status == 401


async def test_internal_fault_is_500_without_detail(caplog: pytest.LogCaptureFixture) -> None:
    async def broken(request: Request) -> AnyResponse:
        raise RuntimeError("the inside")

    service = make()
    service.route("GET", "/broken", broken, Access.ADMIN)
    async with answering(service) as fixture:
        answer = await fixture.ask(get("/broken", KEY))
    assert answer.status == 500 and error(answer)["code"] == "internal_error" and b"inside" not in answer.body
    assert "the inside" in caplog.text


async def test_failure_in_a_stream_of_events_is_its_last_event() -> None:
    async def stream(request: Request) -> AnyResponse:
        out = StreamingResponse(headers={"Content-Type": "text/event-stream"})
        out.begin(request)
        await out.write(b"data: {}\n\n")
        raise ApiError(502, "the worker was lost", code="worker_lost")

    service = make()
    for path in ("/v1/chat/completions", "/v1/messages"):
        service.route("POST", path, stream, Access.INFERENCE)
    async with answering(service) as fixture, fixture.caller() as caller:
        for path, named in (("/v1/chat/completions", b"data: "), ("/v1/messages", b"event: error\ndata: ")):
            await caller.say(post(b"{}", KEY, path=path))
            answer = await caller.answer()
            first, last, rest = answer.body.split(b"\n\n")
            assert (answer.status, first, rest) == (200, b"data: {}", b"") and last.startswith(named)
            assert json.loads(last.removeprefix(named))["error"]["message"] == "the worker was lost"


async def test_failure_in_other_stream_aborts_it() -> None:
    async def stream(request: Request) -> AnyResponse:
        out = StreamingResponse(headers={"Content-Type": "application/x-ndjson"})
        out.begin(request)
        await out.write(b"{}\n")
        await asyncio.sleep(0.05)
        raise ApiError(502, "the engine was lost")

    service = make()
    service.route("GET", "/lines", stream, Access.ADMIN)
    async with answering(service) as fixture, fixture.caller() as caller:
        await caller.say(get("/lines", KEY))
        await caller.head()
        rest = b""
        with contextlib.suppress(ConnectionResetError):
            rest = await asyncio.wait_for(caller.reader.read(), 10)
    assert b"0\r\n\r\n" not in rest


async def test_requests_are_counted_by_outcome() -> None:
    begun = asyncio.Event()

    async def call(request: Request) -> AnyResponse:
        what = request.query.get("what")
        if what == "wait":
            begun.set()
            await asyncio.Event().wait()
        if what == "refuse":
            raise ApiError(409, "no")
        if what == "break":
            raise RuntimeError("a fault")
        return Response(200)

    service = make()
    service.route("GET", "/call", call, Access.INFERENCE)
    async with answering(service) as fixture:
        for what in ("ok", "ok", "refuse", "break"):
            await fixture.ask(get(f"/call?what={what}", KEY))
        async with fixture.caller() as leaving:
            await leaving.say(get("/call?what=wait", KEY))
            await asyncio.wait_for(begun.wait(), 10)
            assert service.lifetime.in_flight == 1
        await fixture.emptied()
        assert (await fixture.ask(get("/call", "x-api-key: wrong"))).status == 401  # not counted
        text = (await fixture.ask(get("/metrics"))).body.decode()
    for status, count in (("200", 2.0), ("409", 1.0), ("500", 1.0), ("499", 1.0)):
        assert f'areal_http_requests_total{{route="/call",status="{status}"}} {count}' in text
    assert 'status="401"' not in text and "areal_http_in_flight 0.0" in text


async def test_companions_live_as_long_as_service() -> None:
    answer: list[str] = []

    @contextlib.asynccontextmanager
    async def companion() -> AsyncIterator[None]:
        answer.append("enters")
        yield
        answer.append("leaves")

    service = make()
    service.add_lifespan(companion)
    async with service.lifespan():
        assert answer == ["enters"]
    assert answer == ["enters", "leaves"]


EVENTS = st.lists(
    st.sampled_from([b"data: {}\n\n", b"data: a\ndata: b\n\n", b": note\n\n", b"data: x\r\n\r\n", b"data: y\r\r"])
)


def test_partial_event_is_held_until_complete() -> None:
    cutter = EventCutter()
    assert cutter.push(b'data: {"a"') == b""
    assert cutter.push(b": 1}\n") == b""
    assert cutter.push(b"\ndata: ") == b'data: {"a": 1}\n\n'
    assert cutter.held == b"data: "


@given(EVENTS, st.lists(st.integers(0, 100)), st.binary(max_size=5))
def test_events_pass_unchanged_for_any_chunking(events: list[bytes], places: list[int], tail: bytes) -> None:
    tail = tail.replace(b"\n", b"").replace(b"\r", b"")
    stream = b"".join(events) + tail
    edges = sorted({0, len(stream), *(place % (len(stream) + 1) for place in places)})
    cutter, passed = EventCutter(), b""
    for start, end in itertools.pairwise(edges):
        passed += cutter.push(stream[start:end])
        assert passed == b"" or passed.endswith((b"\n\n", b"\n\r\n", b"\r\r", b"\n\r"))
    assert passed + cutter.held == stream
    assert cutter.held in (tail, b"\n" + tail)


def test_overlong_event_is_not_held_forever() -> None:
    cutter = EventCutter()
    huge = b"x" * (17 * 1024 * 1024)
    assert cutter.push(huge) == huge


COUNT = """
from areal.services.http.service import Metrics
metrics = Metrics()
metrics.in_flight.inc()
metrics.requests.labels("/x", "200").inc()
"""


def test_processes_sharing_a_folder_are_summed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    env = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    for _ in range(2):
        subprocess.run([sys.executable, "-c", COUNT], env=env, check=True, timeout=60)
    (tmp_path / "gauge_livesum_0.db").touch()  # of a process that starts just now
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    text = Metrics().exposition().decode()
    assert 'areal_http_requests_total{route="/x",status="200"} 2.0' in text
    assert "areal_http_in_flight 2.0" in text


def test_missing_metrics_folder_exposes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path / "gone"))
    assert Metrics().exposition() == b""


def test_relayed_answer_keeps_retry_after() -> None:
    reply = HttpReply(503, Headers({b"retry-after": b"2", b"server": b"x"}), b"{}")
    answer = to_response(reply)
    assert (answer.status, answer.body) == (503, b"{}")
    assert answer.headers == {"Content-Type": "application/json", "Retry-After": "2"}


def test_relayed_refusal_keeps_reason_or_is_502() -> None:
    reported = json.dumps({"error": {"message": "no model", "code": "model_not_found", "param": "model"}}).encode()
    error = refusal(HttpReply(404, Headers({}), reported), "the router")
    assert (error.status, error.message, error.code, error.param) == (404, "no model", "model_not_found", "model")
    error = refusal(HttpReply(404, Headers({}), b"<html>"), "the router")
    assert (error.status, error.message, error.code) == (502, "the router answered 404", "bad_gateway")
