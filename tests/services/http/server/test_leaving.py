"""Callers that break off at each stage leave nothing behind, and all callers together have bounded bodies."""

from __future__ import annotations

import asyncio
import gc
import gzip
import os
from collections.abc import Iterator

import pytest
from wsproto.connection import Connection as Frames
from wsproto.connection import ConnectionType
from wsproto.events import CloseConnection, Event, TextMessage

from areal.http.client import CallFailed, HttpClient
from areal.http.client import Connection as ClientConnection
from areal.services.http.errors import OPENAI, ApiError
from areal.services.http.messages import AnyResponse, Request, Response, ServerLimits, StreamingResponse, error_response
from areal.services.http.server import HttpConnection, RequestReader
from areal.services.http.websocket import WebSocket, accept
from tests.services.http.server.server_fixture import QUICK, Caller, ServerFixture, get, post, serving

_MIB = 2**20
_PART = os.urandom(_MIB)
_OURS = {HttpConnection, Request, RequestReader, WebSocket, StreamingResponse, ClientConnection, ApiError}
_HANDSHAKE = (
    "Upgrade: websocket",
    "Connection: Upgrade",
    "Sec-WebSocket-Version: 13",
    "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
)


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


async def application(request: Request) -> AnyResponse:
    """Reads, then answers never, at once, or in a stream without an end, as the path says."""
    if request.path == "/ws":
        socket = accept(request, 64 * _MIB, trusted=request.query_string != "stranger")
        while await socket.receive() is not None:
            if request.query_string == "busy":
                await asyncio.Event().wait()
        socket.close()
        return Response(101)
    try:
        body = await request.read(64 * _MIB)
    except ApiError as error:
        return error_response(error, OPENAI, request.id)
    if request.path == "/never":
        await asyncio.Event().wait()
    if request.path == "/answer":
        return Response(200, body)
    stream = StreamingResponse(headers={"Content-Type": "text/event-stream"})
    stream.begin(request)
    while True:
        await stream.write(_PART)


def head(size: int, path: str = "/never") -> bytes:
    return f"POST {path} HTTP/1.1\r\nHost: here\r\nContent-Length: {size}\r\n\r\n".encode()


def message(text: str, *, whole: bool = True) -> bytes:
    return Frames(ConnectionType.CLIENT).send(TextMessage(data=text, message_finished=whole))


STAGES = {
    "header": [b"GET / HTTP/1.1\r\nHost: here\r\nX-Long: " + b"x" * 60_000],
    "header that is refused": [b"GET / HTTP/1.1\r\n" + b"x" * 100_000],
    "no HTTP": [b"\x16\x03\x01" + _PART[:1000]],
    "body": [head(2 * _MIB) + _PART],
    "body that is too large": [head(100 * _MIB) + _PART],
    "whole body": [post(_PART, path="/never")],
    "next request": [post(_PART, path="/never") + get() * 8],
    "chunk that is none": [b"POST / HTTP/1.1\r\nHost: here\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nabcdexx" + _PART],
    "answer": [post(_PART, path="/answer") * 4],
    "stream": [post(_PART, path="/stream")],
    "frame": [get("/ws", *_HANDSHAKE), message("x" * _MIB, whole=False)],
    # A third message could fill the server's receive buffer: the kernel could then not deliver the caller's FIN.
    "message that waits": [get("/ws?busy", *_HANDSHAKE), message("x" * _MIB) * 2],
    "frame of a stranger": [get("/ws?stranger", *_HANDSHAKE), message("x" * 8000, whole=False)],
    "frame of a stranger that is too large": [get("/ws?stranger", *_HANDSHAKE), message("x" * _MIB)],
}


def ours() -> list[object]:
    return [each for each in gc.get_objects() if type(each) in _OURS]


@pytest.mark.parametrize("stage", STAGES)
async def test_aborted_callers_leave_nothing(stage: str, no_collector: None) -> None:
    async with serving(application, QUICK) as fixture:
        before = len(ours())
        for lag in (False, True, False):
            await break_off(fixture, STAGES[stage], lag=lag)
        await fixture.emptied()
        await check_left(before)
        assert fixture.server.budget.held == 0


async def check_left(before: int) -> None:
    """As many of our objects as before, once the cancelled handlers have ended."""
    deadline = asyncio.get_running_loop().time() + 10
    while len(left := ours()) > before:
        assert asyncio.get_running_loop().time() < deadline, [type(each).__name__ for each in left]
        del left
        await asyncio.sleep(0.05)


async def break_off(fixture: ServerFixture, parts: list[bytes], *, lag: bool) -> None:
    async with fixture.caller() as caller:
        if lag:
            caller.lag()
        for part in parts:
            caller.writer.write(part)
            await asyncio.sleep(0.05)
        caller.leave()


async def test_aborted_answer_leaves_nothing_at_reader(no_collector: None) -> None:
    async with serving(application, QUICK) as fixture, HttpClient() as http:
        base, before = f"http://127.0.0.1:{fixture.port}", len(ours())
        for _ in range(3):
            with pytest.raises((CallFailed, TimeoutError)):
                await http.fetch("POST", base, "/stream", timeout_s=0.2)
            breaks = asyncio.get_running_loop().call_later(0.1, _break_all, fixture)
            with pytest.raises(CallFailed):
                await http.fetch("POST", base, "/stream", timeout_s=20)
            breaks.cancel()
        await fixture.emptied()
        await check_left(before)


def _break_all(fixture: ServerFixture) -> None:
    for connection in list(fixture.server.connections):
        connection.abort()


async def test_total_body_bytes_are_bounded() -> None:
    """The large body beyond the bound is 503; a small one is still taken; all of it is given back."""
    async with serving(application, ServerLimits(bodies_bytes=4 * _MIB)) as fixture:
        async with fixture.caller() as one, fixture.caller() as other:
            await one.say(head(8 * _MIB) + _PART * 3)
            await fixture_holds(fixture, 3 * _MIB)
            await other.say(head(4 * _MIB, "/answer") + _PART * 3)
            refused = await other.answer()
            assert (refused.status, refused.headers["retry-after"]) == (503, "1")
            assert b"too_many_bytes" in refused.body
            assert (await fixture.ask(post(_PART[:1000], path="/answer"))).status == 200
        await fixture.emptied()
        assert fixture.server.budget.held == 0
        assert (await fixture.ask(post(_PART * 3, path="/answer"))).status == 200


ZIPPED = "Content-Encoding: gzip"


async def test_compressed_body_is_counted_at_memory_size() -> None:
    """While it is decompressed both sides are counted, after that the plain one."""
    plain = _PART * 3
    async with serving(application, ServerLimits(bodies_bytes=16 * _MIB)) as fixture:
        async with fixture.caller() as one:
            await one.say(post(gzip.compress(plain), ZIPPED, path="/never"))
            await fixture_holds(fixture, len(plain))
            async with asyncio.timeout(20):
                while fixture.server.budget.held != len(plain):  # noqa: ASYNC110 - as below
                    await asyncio.sleep(0.01)
        await fixture.emptied()
        assert fixture.server.budget.held == 0


async def test_compressed_bodies_over_budget_are_503() -> None:
    """Ten callers of 60 MiB each, in 60 KiB on the wire, never have more than the bound together."""
    bomb, most = gzip.compress(bytes(60 * _MIB)), 0
    async with serving(application, ServerLimits(bodies_bytes=8 * _MIB)) as fixture, fixture.caller() as other:
        await other.say(head(4 * _MIB) + _PART * 2)  # so that no body is the only one
        await fixture_holds(fixture, 2 * _MIB)
        asked = [fixture.ask(post(bomb, ZIPPED, path="/answer")) for _ in range(10)]
        answers = asyncio.gather(*asked)
        while not answers.done():
            most = max(most, fixture.server.budget.held)
            await asyncio.sleep(0.001)
        assert {answer.status for answer in await answers} == {503}
        assert 2 * _MIB < most <= 16 * _MIB
        assert fixture.server.budget.held == 2 * _MIB


async def test_bomb_is_413_at_body_limit() -> None:
    async with serving(application) as fixture:
        answer = await fixture.ask(post(gzip.compress(bytes(200 * _MIB)), ZIPPED, path="/answer"))
        assert answer.status == 413 and fixture.server.budget.held == 0


@pytest.mark.parametrize("lag", [False, True])
async def test_disconnect_during_decompression_leaves_nothing(lag: bool, no_collector: None) -> None:
    async with serving(application, QUICK) as fixture:
        before, zipped = len(ours()), gzip.compress(bytes(60 * _MIB))
        for _ in range(3):
            await break_off(fixture, [post(zipped, ZIPPED, path="/answer")], lag=lag)
        await fixture.emptied()
        await check_left(before)
        assert fixture.server.budget.held == 0


async def fixture_holds(fixture: ServerFixture, size: int) -> None:
    async with asyncio.timeout(20):
        while fixture.server.budget.held < size:  # noqa: ASYNC110 - the server has no event for each part
            await asyncio.sleep(0.01)


async def test_caller_sending_after_last_answer_is_disconnected() -> None:
    async with serving(application, ServerLimits(linger_bytes=4 * _MIB)) as fixture, fixture.caller() as caller:
        await caller.say(head(2**40))
        with pytest.raises(ConnectionError):
            for _ in range(64):
                await caller.say(_PART)


async def closing(caller: Caller) -> int | None:
    """The code of the WebSocket's close frame, once the server has closed the connection."""
    frames, events = Frames(ConnectionType.CLIENT), list[Event]()
    async with asyncio.timeout(20):
        while data := await caller.reader.read(65536):
            frames.receive_data(data)
            events += frames.events()
    return next((int(event.code) for event in events if isinstance(event, CloseConnection)), None)


async def test_first_message_is_limited_to_8_kib() -> None:
    async with serving(application) as fixture:
        for first, code in (("é" * 4096, None), ("é" * 4096 + "x", 1009)):
            async with fixture.caller() as caller:
                await caller.say(get("/ws?stranger", *_HANDSHAKE))
                assert (await caller.head())[0] == 101
                await caller.say(message(first) + message("x" * _MIB) * (code is None))
                await caller.say(Frames(ConnectionType.CLIENT).send(CloseConnection(code=1000)))
                assert await closing(caller) == (code or 1000)


async def test_waiting_messages_are_bounded_in_bytes() -> None:
    async with serving(application, ServerLimits(bodies_bytes=64 * _MIB)) as fixture, fixture.caller() as caller:
        await caller.say(get("/ws?busy", *_HANDSHAKE))
        assert (await caller.head())[0] == 101
        caller.writer.write(message("x" * _MIB) * 12)
        await fixture_holds(fixture, _MIB)
        await asyncio.sleep(0.3)
        assert fixture.server.budget.held < 3 * _MIB
