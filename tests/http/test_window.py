"""Parts of a stream that come close together are handed on as one; none is late, none is lost, all are in order."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal.http.client import Connection, ResponseLost, Window
from areal.services.inference.engines.base import EngineDelta, FinishReason
from areal.services.inference.engines.embedded_client import read_delta
from areal.services.inference.engines.transport import JsonLines

NEVER_S = 3600.0
HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


class Transport(asyncio.Transport):
    def write(self, data: bytes | bytearray | memoryview) -> None:
        pass

    def abort(self) -> None:
        pass


class Stream:
    """An answer of which the test says when each part comes, and what was handed on."""

    def __init__(self, window: Window) -> None:
        self.handed_on: list[bytes] = []
        self.fails = False
        self.connection = Connection()
        self.connection.connection_made(Transport())
        self._pouring = asyncio.create_task(self._pour(window), name="pour")

    async def _pour(self, window: Window) -> None:
        await self.connection.ask(b"")
        await self.connection.stream_to(self._sink, window=window)

    def _sink(self, data: bytes) -> None:
        self.handed_on.append(data)
        if self.fails:
            raise ConnectionResetError("the caller is gone")

    async def begun(self) -> Stream:
        await asyncio.sleep(0)
        self.says(HEAD)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        self.says(chunk(b"first "))
        assert self.handed_on == [b"first "], "the beginning never waits"
        return self

    def says(self, data: bytes) -> None:
        self.connection.data_received(data)

    async def ended(self) -> None:
        async with asyncio.timeout(10):
            await self._pouring


async def test_64_parts_of_one_window_are_passed_in_two() -> None:
    stream = await Stream(Window(NEVER_S)).begun()
    for _ in range(62):
        stream.says(chunk(b"more "))
    assert len(stream.handed_on) == 1
    stream.says(chunk(b"last") + END)
    assert stream.handed_on == [b"first ", b"more " * 62, b"last"], "nor does the end"
    await stream.ended()


async def test_parts_slower_than_window_are_passed_singly() -> None:
    stream = await Stream(Window(0.0)).begun()
    stream.says(chunk(b"a"))
    stream.says(chunk(b"b"))
    assert stream.handed_on == [b"first ", b"a", b"b"]


async def test_all_streams_share_one_timer_while_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    timers: list[Callable[[], None]] = []

    def call_later(seconds: float, action: Callable[[], None]) -> asyncio.TimerHandle:
        timers.append(action)
        return asyncio.TimerHandle(0.0, action, (), asyncio.get_running_loop())

    window = Window(NEVER_S)
    streams = [await Stream(window).begun() for _ in range(16)]
    monkeypatch.setattr(asyncio.get_running_loop(), "call_later", call_later)
    for part in (b"a", b"b", b"c"):
        for stream in streams:
            stream.says(chunk(part))
    (end,) = timers
    end()
    assert all(stream.handed_on == [b"first ", b"abc"] for stream in streams)
    assert len(timers) == 1


async def test_window_ends_by_real_timer() -> None:
    stream = await Stream(Window(0.01)).begun()
    stream.says(chunk(b"a"))
    ended = asyncio.Event()
    window = Window(0.02)
    window.wait(ended.set)
    async with asyncio.timeout(10):
        await ended.wait()
    assert b"".join(stream.handed_on) == b"first a"


async def test_data_before_lost_connection_is_passed_first() -> None:
    stream = await Stream(Window(NEVER_S)).begun()
    stream.says(chunk(b"a"))
    stream.connection.connection_lost(None)
    assert stream.handed_on == [b"first ", b"a"]
    with pytest.raises(ResponseLost):
        await stream.ended()


async def test_failing_sink_at_window_end_ends_call() -> None:
    window = Window(NEVER_S)
    stream = await Stream(window).begun()
    stream.says(chunk(b"a"))
    stream.fails = True
    window.end()
    stream.says(chunk(b"b") + END)
    with pytest.raises(ConnectionResetError):
        await stream.ended()
    assert stream.handed_on == [b"first ", b"a"]


async def test_abandoned_call_is_passed_nothing_more() -> None:
    window = Window(NEVER_S)
    stream = await Stream(window).begun()
    stream.says(chunk(b"a"))
    stream._pouring.cancel()
    await asyncio.gather(stream._pouring, return_exceptions=True)
    window.end()
    assert stream.handed_on == [b"first "]


def line(token: int, last: bool) -> bytes:
    finish = b'"length"' if last else b"null"
    template = b'{"index":0,"token_ids":[%d],"logprobs":[-0.%d],"versions":[%d],"finish_reason":%b}\n'
    return template % (token, token + 1, token // 20, finish)


async def test_window_merges_tokens_into_one_delta() -> None:
    window, reader = Window(NEVER_S), JsonLines(lambda data: (read_delta(data),))
    stream, deltas = Stream(window), list[EngineDelta]()
    stream._sink = lambda data: deltas.extend(reader.feed(data))  # type: ignore[method-assign]
    await asyncio.sleep(0)
    stream.says(HEAD)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    for token in range(63):
        stream.says(chunk(line(token, last=False)))
    window.end()
    stream.says(chunk(line(63, last=True)) + END)
    await stream.ended()
    assert [delta.token_ids for delta in deltas] == [(0,), tuple(range(1, 63)), (63,)]
    tokens = [each for delta in deltas for each in zip(delta.token_ids, delta.logprobs, delta.versions, strict=True)]
    assert tokens == [(token, float(f"-0.{token + 1}"), token // 20) for token in range(64)]
    assert deltas[-1].finish_reason is FinishReason.LENGTH


@given(st.lists(st.tuples(st.binary(min_size=1, max_size=20), st.integers(1, 3), st.booleans()), max_size=20))
def test_every_byte_is_passed_once_in_order(parts: list[tuple[bytes, int, bool]]) -> None:
    """``parts``: of the body, in how many reads each comes, and whether a window ends after it."""

    async def talk() -> None:
        window = Window(NEVER_S)
        stream = await Stream(window).begun()
        for part, reads, ends in parts:
            data = chunk(part)
            size = -(-len(data) // reads)
            for start in range(0, len(data), size):
                stream.says(data[start : start + size])
            if ends:
                window.end()
        stream.says(END)
        await stream.ended()
        assert b"".join(stream.handed_on) == b"first " + b"".join(part for part, _, _ in parts)

    asyncio.run(talk())
