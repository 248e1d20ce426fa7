"""How answers are written, how streams flow, and what a caller that leaves or lags does to them."""

from __future__ import annotations

import asyncio
import gc
import socket
from collections.abc import Awaitable, Callable
from dataclasses import replace
from email.utils import parsedate_to_datetime

import pytest

from areal.services.http.messages import AnyResponse, Request, Response, ServerLimits, StreamingResponse
from areal.services.http.server import HttpConnection
from tests.services.http.server.server_fixture import QUICK, echo, get, post, serving


def streaming(*parts: bytes, **headers: str) -> Callable[[Request], Awaitable[AnyResponse]]:
    async def stream(request: Request) -> AnyResponse:
        out = StreamingResponse(headers={"Content-Type": "text/plain", **headers})
        out.begin(request)
        for part in parts:
            await out.write(part)
            await asyncio.sleep(0)
        return out

    return stream


async def test_answer_has_its_length_date_and_id() -> None:
    async def plain(request: Request) -> AnyResponse:
        return Response(201, b"hi", content_type="text/plain", headers={"x-a": "é"})

    async with serving(plain) as fixture:
        answer = await fixture.ask(get("/", "x-request-id: r-1"))
    assert (answer.status, answer.body, answer.headers["content-type"]) == (201, b"hi", "text/plain")
    assert answer.headers["x-request-id"] == "r-1" and answer.headers["content-length"] == "2"
    assert parsedate_to_datetime(answer.headers["date"])


async def test_large_answer_arrives_whole() -> None:
    body = bytes(range(256)) * 40_000

    async def large(request: Request) -> AnyResponse:
        return Response(200, body)

    async with serving(large) as fixture:
        assert (await fixture.ask(get())).body == body


async def test_stream_is_chunked_and_ends() -> None:
    async with serving(streaming(b"one", b"", b"two")) as fixture, fixture.caller() as caller:
        for _ in range(2):
            await caller.say(get())
            answer = await caller.answer()
            assert answer.body == b"onetwo" and answer.headers["transfer-encoding"] == "chunked"


@pytest.mark.parametrize("handler", [streaming(b"one", b"two"), echo])
async def test_request_and_connection_are_freed_without_gc(
    handler: Callable[[Request], Awaitable[AnyResponse]],
) -> None:
    gc.collect()
    gc.disable()
    try:
        async with serving(handler) as fixture, fixture.caller() as caller:
            await caller.say(post(b"body"))
            await caller.answer()
            await caller.say(get())
            await caller.answer()
            assert not [each for each in gc.get_objects() if type(each) is Request]
            caller.leave()
            await fixture.emptied()
            assert not [each for each in gc.get_objects() if type(each) is HttpConnection]
    finally:
        gc.enable()


async def test_http_1_0_stream_ends_with_connection() -> None:
    async with serving(streaming(b"one", b"two")) as fixture:
        answer = await fixture.ask(b"GET / HTTP/1.0\r\n\r\n")
    assert answer.body == b"onetwo" and "transfer-encoding" not in answer.headers


async def test_unwritten_stream_is_empty() -> None:
    async def nothing(request: Request) -> AnyResponse:
        return StreamingResponse()

    async with serving(nothing) as fixture, fixture.caller() as caller:
        await caller.say(get() + b"HEAD / HTTP/1.1\r\nHost: here\r\n\r\n" + get())
        assert (await caller.answer()).body == b""
        assert (await caller.answer(of="HEAD")).status == 200
        assert (await caller.answer()).body == b""


async def test_early_answer_is_not_sent_again() -> None:
    async def early(request: Request) -> AnyResponse:
        response = Response(200, b"now")
        await request.answer(response)
        return response

    async with serving(early) as fixture, fixture.caller() as caller:
        await caller.say(get() * 2)
        assert [(await caller.answer()).body for _ in range(2)] == [b"now", b"now"]


@pytest.mark.parametrize("value", ["a\r\nb: c", "a\nb", "a\rb"])
async def test_header_with_a_line_break_is_never_written(value: str) -> None:
    async def splitting(request: Request) -> AnyResponse:
        return Response(200, headers={"x-a": value})

    async with serving(splitting) as fixture, fixture.caller() as caller:
        await caller.say(get())
        assert await caller.ended()


async def test_caller_disconnect_cancels_handler() -> None:
    begun, cancelled = asyncio.Event(), asyncio.Event()

    async def waits(request: Request) -> AnyResponse:
        begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise
        return Response(200)

    for how in ("aborts", "hangs up"):
        begun.clear()
        cancelled.clear()
        async with serving(waits) as fixture, fixture.caller() as caller:
            await caller.say(get())
            await asyncio.wait_for(begun.wait(), 10)
            caller.leave() if how == "aborts" else caller.writer.close()
            await asyncio.wait_for(cancelled.wait(), 10)


async def test_disconnect_mid_body_cancels_handler() -> None:
    ended: asyncio.Queue[type[BaseException]] = asyncio.Queue()

    async def reads(request: Request) -> AnyResponse:
        try:
            await request.read(100)
        except BaseException as error:
            ended.put_nowait(type(error))
            raise
        return Response(200)

    async with serving(reads) as fixture, fixture.caller() as caller:
        await caller.say(post(b"hello")[:-1])
        await asyncio.sleep(0.05)
        caller.leave()
        assert await asyncio.wait_for(ended.get(), 10) is asyncio.CancelledError


async def test_slow_caller_slows_its_stream() -> None:
    written = 0
    part, parts = b"x" * 65536, 1024

    async def much(request: Request) -> AnyResponse:
        nonlocal written
        out = StreamingResponse()
        out.begin(request)
        for _ in range(parts):
            await out.write(part)
            written += 1
        return out

    async with serving(much) as fixture, fixture.caller() as caller:
        caller.lag()
        await caller.say(get())
        before = -1
        while before != written:
            before = written
            await asyncio.sleep(0.1)
        assert 0 < written < parts
        caller.catch_up()
        assert len((await caller.answer()).body) == len(part) * parts


class Tap:
    """A source that notes how it is held back."""

    def __init__(self) -> None:
        self.answer: list[str] = []
        self.flows = asyncio.Event()
        self.flows.set()

    def pause(self) -> None:
        self.answer.append("pause")
        self.flows.clear()

    def resume(self) -> None:
        self.answer.append("resume")
        self.flows.set()


async def test_stream_source_pauses_and_resumes_with_caller() -> None:
    tap = Tap()
    part, parts = b"x" * 65536, 512

    async def fed(request: Request) -> AnyResponse:
        out = StreamingResponse()
        out.begin(request)
        out.set_backpressure(tap)
        for _ in range(parts):
            await tap.flows.wait()
            out.write_nowait(part)
        out.set_backpressure(None)
        return out

    async with serving(fed) as fixture, fixture.caller() as caller:
        caller.lag()
        await caller.say(get())
        await asyncio.sleep(0.2)
        assert tap.answer[-1] == "pause"
        caller.catch_up()
        assert len((await caller.answer()).body) == len(part) * parts
    assert tap.answer[:2] == ["pause", "resume"]


@pytest.mark.parametrize(("method", "version"), [("GET", "1.1"), ("GET", "1.0"), ("HEAD", "1.1")])
async def test_first_bytes_of_stream_are_framed_like_rest(method: str, version: str) -> None:
    async def answer_at_once(request: Request) -> AnyResponse:
        out = StreamingResponse(headers={"X-Y": "z"})
        out.begin(request, b"first ")
        out.write_nowait(b"second")
        return out

    async with serving(answer_at_once) as fixture, fixture.caller() as caller:
        await caller.say(f"{method} /x HTTP/{version}\r\nHost: h\r\nConnection: close\r\n\r\n".encode())
        async with asyncio.timeout(20):
            head, _, body = (await caller.reader.read()).partition(b"\r\n\r\n")
    chunks = b"6\r\nfirst \r\n6\r\nsecond\r\n0\r\n\r\n" if version == "1.1" else b"first second"
    assert b"X-Y: z" in head and body == (chunks if method == "GET" else b"")


async def test_writing_to_disconnected_caller_raises() -> None:
    raised: asyncio.Queue[str] = asyncio.Queue()

    async def late(request: Request) -> AnyResponse:
        out = StreamingResponse()
        out.begin(request)
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            with pytest.raises(ConnectionResetError):
                out.write_nowait(b"x")
            with pytest.raises(ConnectionResetError):
                await out.write(b"x")
            raised.put_nowait("both")
            raise
        return out

    async with serving(late) as fixture, fixture.caller() as caller:
        await caller.say(get())
        await caller.head()
        caller.leave()
        assert await asyncio.wait_for(raised.get(), 10) == "both"


async def test_failing_handler_closes_connection() -> None:
    async def broken(request: Request) -> AnyResponse:
        raise RuntimeError("a fault of ours")

    async with serving(broken) as fixture, fixture.caller() as caller:
        await caller.say(get())
        assert await caller.ended()


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nHost: h\r\nx: ",
        post(b"hello")[:-1],
        post(b"hello", "Expect: 100-continue")[:-5],
        b"POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhe",
    ],
    ids=["head", "body", "continue", "chunk"],
)
async def test_missing_request_is_408(data: bytes) -> None:
    async with serving(echo, QUICK) as fixture, fixture.caller() as caller:
        await caller.say(data)
        answer = await caller.answer()
        if answer.status == 100:
            answer = await caller.answer()
        assert answer.status == 408 and answer.headers["connection"] == "close"
        assert await caller.ended()


async def test_dripping_request_is_408() -> None:
    patient = replace(QUICK, linger_s=10.0)  # a machine that stands still must not cost the answer
    async with serving(echo, patient) as fixture, fixture.caller() as caller:
        answer = asyncio.create_task(caller.answer(), name="answer")
        await caller.say(post(b"x" * 1000)[:-1000])
        for _ in range(500):
            await caller.say(b"x")
            await asyncio.sleep(0.01)
            if answer.done():
                break
        assert (await answer).status == 408


async def test_idle_connection_is_closed_after_timeout() -> None:
    async with serving(echo, ServerLimits(keep_alive_s=20.0)) as fixture:
        async with fixture.caller() as fresh, fixture.caller() as used:
            for _ in range(2):
                await used.say(get())
                assert (await used.answer()).status == 200
                fixture.sweep_idle(after_s=19.9)
            fixture.sweep_idle(after_s=20.1)
            assert await used.ended() and await fresh.ended()


async def test_server_without_connections_has_no_timer() -> None:
    async with serving(echo, replace(QUICK, keep_alive_s=20.0)) as fixture:
        async with fixture.caller() as caller:
            await caller.say(get())
            assert (await caller.answer()).status == 200
            assert fixture.server._sweeps is not None
        async with asyncio.timeout(20):
            while fixture.server._sweeps is not None:  # noqa: ASYNC110 - a timer has no event for its end
                await asyncio.sleep(0.01)
        assert (await fixture.ask(get())).status == 200


async def test_slow_handler_is_not_an_idle_connection() -> None:
    async def slow(request: Request) -> AnyResponse:
        await asyncio.sleep(0.5)
        return Response(200)

    async with serving(slow, QUICK) as fixture:
        assert (await fixture.ask(get())).status == 200


async def test_caller_reading_nothing_is_disconnected() -> None:
    async def much(request: Request) -> AnyResponse:
        return Response(200, b"x" * 2**26)

    async with serving(much, QUICK) as fixture, fixture.caller() as caller:
        caller.lag()
        await caller.say(get())
        await fixture.emptied()


async def test_slow_reader_of_last_answer_gets_all_of_it() -> None:
    size = 2**26

    async def much(request: Request) -> AnyResponse:
        return Response(200, b"x" * size)

    async with serving(much, QUICK) as fixture, fixture.caller() as caller:
        await caller.say(get("/", "Connection: close"))
        await caller.head()
        async with asyncio.timeout(60):
            for _ in range(16):
                caller.lag()
                await asyncio.sleep(0.05)  # longer in all than anybody who takes nothing is waited for
                caller.catch_up()
                assert len(await caller.reader.readexactly(size // 16)) == size // 16
        assert await caller.ended()


async def test_answer_without_body_has_no_content_length() -> None:
    async def empty(request: Request) -> AnyResponse:
        return Response(204)

    async with serving(empty) as fixture, fixture.caller() as caller:
        for _ in range(2):
            await caller.say(get())
            assert "content-length" not in (await caller.answer()).headers


async def test_close_answers_connections_not_yet_accepted() -> None:
    async with serving(echo) as fixture:
        with socket.create_connection(("127.0.0.1", fixture.port)) as caller:  # blocks the loop, which accepts nothing
            caller.sendall(get("/waiting"))
            await fixture.server.close()
            caller.settimeout(20)
            assert caller.recv(4096).startswith(b"HTTP/1.1 200 ")


async def test_drain_finishes_running_requests_and_closes_others() -> None:
    gate, begun = asyncio.Event(), asyncio.Event()

    async def gated(request: Request) -> AnyResponse:
        begun.set()
        await gate.wait()
        return Response(200, b"done")

    async with serving(gated) as fixture, fixture.caller() as running, fixture.caller() as silent:
        await running.say(get())
        await asyncio.wait_for(begun.wait(), 10)
        closing = asyncio.create_task(fixture.server.close(), name="close")
        assert await silent.ended()
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", fixture.port)
        assert not closing.done()
        gate.set()
        answer = await running.answer()
        assert answer.body == b"done" and answer.headers["connection"] == "close"
        assert await running.ended()
        await asyncio.wait_for(closing, 10)


async def test_cancel_ends_running_requests() -> None:
    ended = asyncio.Event()

    async def waits(request: Request) -> AnyResponse:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.set()
        return Response(200)

    async with serving(waits) as fixture, fixture.caller() as caller:
        await caller.say(get())
        await asyncio.sleep(0.05)
        await fixture.server.cancel()
        assert ended.is_set()
        assert await caller.ended()


async def test_thousands_of_idle_connections_are_freed() -> None:
    async with serving(echo, ServerLimits()) as fixture:
        opened = await asyncio.gather(*(asyncio.open_connection("127.0.0.1", fixture.port) for _ in range(400)))
        assert (await fixture.ask(get())).status == 200
        for _, writer in opened:
            writer.transport.abort()
        await fixture.emptied()
