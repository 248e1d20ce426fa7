"""Connections to other services, against a server that says byte by byte what the test tells it."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import ssl
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal.http import client
from areal.http.client import Connection, HttpClient, NotConnected, ResponseLost, parse_address, start_of_chunk

Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"


async def read_request(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
    return head, await reader.readexactly(length)


@asynccontextmanager
async def worker(talk: Talk, tls: ssl.SSLContext | None = None) -> AsyncIterator[str]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await talk(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=tls)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


def says(*answers: bytes) -> Talk:
    """Each request of a connection gets the next answer; then the connection ends."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for answer in answers:
            await read_request(reader)
            writer.write(answer)
            await writer.drain()

    return talk


async def ask(pool: HttpClient, url: str) -> bytes:
    async with asyncio.timeout(10), pool.call("POST", url, "/x", {"a": "b"}, b"{}") as answer:
        return await answer.whole()


@pytest.fixture
async def pool() -> AsyncIterator[HttpClient]:
    pool = HttpClient()
    yield pool
    pool.close()


def test_url_with_prefix_is_parsed_into_address() -> None:
    address = parse_address("http://[::1]:81/deep/")
    assert (address.host, address.port, address.prefix, address.authority) == ("::1", 81, "/deep", "[::1]:81")
    assert parse_address("https://a.b").port == 443


@pytest.mark.parametrize("url", ["h:1", "ws://h:1", "http://", "http://:80", "http://h:x", "http://u:p@h", "/path"])
def test_invalid_url_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match=r"address|[Pp]ort"):
        parse_address(url)


async def test_close_ends_running_calls(pool: HttpClient) -> None:
    asked = asyncio.Event()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        asked.set()
        await reader.read()

    async with worker(talk) as url:
        running = asyncio.ensure_future(ask(pool, url))
        await asked.wait()
        pool.close()
        with pytest.raises(ResponseLost):
            await running


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """A certificate of localhost that no client trusts, with its key."""
    file = tmp_path / "certificate.pem"
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    made += ["-addext", "subjectAltName=DNS:localhost", "-keyout", str(file), "-out", str(tmp_path / "public.pem")]
    subprocess.run(made, check=True, capture_output=True)
    file.write_bytes(file.read_bytes() + (tmp_path / "public.pem").read_bytes())
    return file


async def test_tls_verifies_the_server(pool: HttpClient, certificate: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(certificate)
    async with worker(says(OK), tls) as url:
        url = url.replace("http://127.0.0.1", "https://localhost")
        with pytest.raises(NotConnected, match="CERTIFICATE_VERIFY_FAILED"):
            await ask(pool, url)
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        client._tls_context.cache_clear()
        try:
            assert await ask(pool, url) == b"hello"
        finally:
            client._tls_context.cache_clear()


@pytest.mark.parametrize(
    "answer",
    [
        OK,
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhe\r\n3\r\nllo\r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n\r\nhello",
        b"HTTP/1.1 100 Continue\r\n\r\n" + OK,
    ],
    ids=["length", "chunked", "until-close", "after-an-interim-answer"],
)
async def test_answer_of_any_framing_is_read(pool: HttpClient, answer: bytes) -> None:
    async with worker(says(answer)) as url:
        assert await ask(pool, url) == b"hello"


async def test_trailers_are_not_read_as_headers(pool: HttpClient) -> None:
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nX-A: 1\r\n\r\n"
    async with worker(says(head + b"2\r\nhe\r\n0\r\nX-A: 2\r\nX-B: 3\r\n\r\n")) as url:
        async with asyncio.timeout(10), pool.call("POST", url, "/x", {}, b"") as answer:
            assert await answer.whole() == b"he"
            assert (answer.headers["x-a"], "x-b" in answer.headers) == ("1", False)


async def test_answer_sent_byte_by_byte_is_read(pool: HttpClient) -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        for index in range(len(OK)):
            writer.write(OK[index : index + 1])
            await writer.drain()
            await asyncio.sleep(0)

    async with worker(talk) as url:
        assert await ask(pool, url) == b"hello"


async def test_request_has_host_length_and_given_headers(pool: HttpClient) -> None:
    seen: list[tuple[bytes, bytes]] = []

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(await read_request(reader))
        writer.write(OK)

    async with worker(talk) as url:
        await ask(pool, url)
    head, body = seen[0]
    assert head.startswith(b"POST /x HTTP/1.1\r\nHost: 127.0.0.1:") and b"\r\na: b\r\n" in head and body == b"{}"


async def test_only_finished_connection_is_reused(pool: HttpClient) -> None:
    connections = 0
    ended = asyncio.Event()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        await says(OK, OK, b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nbegun")(reader, writer)
        assert await reader.read() == b""
        ended.set()

    async with worker(talk) as url:
        assert [await ask(pool, url) for _ in range(2)] == [b"hello", b"hello"]
        async with pool.call("POST", url, "/x", {}, b"{}") as answer:
            assert await answer.part() == b"begun"
        await asyncio.wait_for(ended.wait(), 10)  # leaving early told the worker
        assert connections == 1
        assert await ask(pool, url) == b"hello"
        assert connections == 2


async def test_connection_closed_by_worker_is_not_reused(pool: HttpClient) -> None:
    closing = OK.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n", 1)
    async with worker(says(closing)) as url:
        assert [await ask(pool, url) for _ in range(3)] == [b"hello"] * 3


@pytest.mark.parametrize(
    "answer",
    [b"", b"HTTP/1.1 200", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nbegun", b"garbage\r\n\r\n"],
    ids=["nothing", "half-a-head", "half-a-body", "no-http"],
)
async def test_truncated_answer_is_lost(pool: HttpClient, answer: bytes) -> None:
    async with worker(says(answer)) as url:
        with pytest.raises(ResponseLost):
            await ask(pool, url)


async def test_answer_with_an_endless_head_is_lost(pool: HttpClient) -> None:
    async with worker(says(b"HTTP/1.1 200 OK\r\n" + b"a: " + b"b" * 1000 + b"\r\n" + b"c: d\r\n" * 20000)) as url:
        with pytest.raises(ResponseLost):
            await ask(pool, url)


async def test_unknown_worker_raises_not_connected(pool: HttpClient) -> None:
    async with worker(says(OK)) as url:
        pass
    with pytest.raises(NotConnected):
        await ask(pool, url)


async def test_header_with_a_line_break_is_never_sent(pool: HttpClient) -> None:
    async with worker(says(OK)) as url:
        with pytest.raises(ValueError):
            pool.call("POST", url, "/x", {"a": "b\r\nc: d"}, b"{}")


class LargeAnswer:
    """A worker that sends 64 MiB as fast as they are read."""

    size = 64 * 1024 * 1024

    def __init__(self) -> None:
        self.written = 0

    async def talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % self.size)
        while self.written < self.size:
            writer.write(bytes(65536))
            await writer.drain()
            self.written += 65536

    async def stuck(self) -> None:
        """Until the reader takes no more."""
        before = -1
        while before != self.written:
            before = self.written
            await asyncio.sleep(0.1)


async def test_slow_reader_slows_worker(pool: HttpClient) -> None:
    large = LargeAnswer()
    async with worker(large.talk) as url:
        async with asyncio.timeout(60), pool.call("POST", url, "/x", {}, b"{}") as answer:
            await large.stuck()
            assert large.written < large.size
            assert len(await answer.whole()) == large.size


def chunked(*parts: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"".join(map(chunk_of, parts))


def chunk_of(part: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(part), part)


async def test_streamed_body_reaches_sink_and_keeps_connection(pool: HttpClient) -> None:
    whole = chunked(b"one", b"two", b"three") + b"0\r\n\r\n"
    async with worker(says(whole, OK)) as url:
        for expected in (b"onetwothree", b"hello"):
            reply: list[bytes] = []
            async with asyncio.timeout(10), pool.call("POST", url, "/x", {}, b"{}") as answer:
                await answer.stream_to(reply.append)
            assert b"".join(reply) == expected


async def test_truncated_stream_is_lost_after_its_data(pool: HttpClient) -> None:
    reply: list[bytes] = []
    async with worker(says(chunked(b"one", b"two"))) as url, asyncio.timeout(10):
        with pytest.raises(ResponseLost):
            async with pool.call("POST", url, "/x", {}, b"{}") as answer:
                await answer.stream_to(reply.append)
    assert b"".join(reply) == b"onetwo"


async def test_failing_sink_ends_stream_and_notifies_worker(pool: HttpClient) -> None:
    left = asyncio.Event()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(chunked(b"one"))
        await asyncio.sleep(0.05)
        writer.write(b"3\r\ntwo\r\n")
        with contextlib.suppress(ConnectionError):
            await reader.read()
        left.set()

    def sink(part: bytes) -> None:
        if b"two" in part:
            raise ConnectionResetError("the port is closed")

    async with worker(talk) as url, asyncio.timeout(10):
        with pytest.raises(ConnectionResetError):
            async with pool.call("POST", url, "/x", {}, b"{}") as answer:
                await answer.stream_to(sink)
        await left.wait()


async def test_paused_stream_slows_worker(pool: HttpClient) -> None:
    large, got = LargeAnswer(), 0
    async with worker(large.talk) as url:
        async with asyncio.timeout(60), pool.call("POST", url, "/x", {}, b"{}") as answer:

            def sink(part: bytes) -> None:
                nonlocal got
                if not got:
                    answer.pause()
                got += len(part)

            streaming = asyncio.create_task(answer.stream_to(sink), name="stream")
            await large.stuck()
            assert got < large.size and large.written < large.size
            answer.resume()
            await streaming
    assert got == large.size


def test_single_whole_chunk_is_detected_without_parsing() -> None:
    for size in (1, 9, 15, 16, 255, 256, 4095, 4096, 65535, 65536):
        chunk = b"%x\r\n%b\r\n" % (size, b"x" * size)
        assert chunk[start_of_chunk(chunk) : -2] == b"x" * size
        others = [chunk[:-1], chunk[1:], chunk + b"x", chunk + chunk, chunk[:-1] + b"x", b"0" + chunk]
        assert not any(map(start_of_chunk, others))
        for longer in (chunk[:-2] + b"x\r\n", chunk[:-3] + b"\r\n"):  # than its size says, or shorter
            assert not start_of_chunk(longer)
    assert not any(
        map(start_of_chunk, [b"", b"0\r\n\r\n", b"1\r\n", b"\r\n", b"-1\r\n\r\n", b"a;b=c\r\n0123456789\r\n"])
    )


@given(
    st.lists(st.sampled_from([b"a", b"data: {}\n\n", b"3\r\nabc\r\n", b"\r\n", b"x" * 40]), min_size=1, max_size=6),
    st.lists(st.integers(0, 400)),
    st.booleans(),
)
def test_streamed_body_is_independent_of_chunking_and_consumer(
    parts: list[bytes], places: list[int], takes: bool
) -> None:
    """What ``framed`` takes is a chunk of the body, between what the sink had before and after it."""
    stream = chunked(*parts) + b"0\r\n\r\n"
    edges = sorted({0, len(stream), *(place % (len(stream) + 1) for place in places)})
    reply: list[bytes] = []

    def framed(chunk: bytes) -> bool:
        if takes:
            size, _, rest = chunk.partition(b"\r\n")
            assert len(rest) == int(size, 16) + 2
            reply.append(rest[:-2])
        return takes

    async def streamed() -> None:
        connection = Connection()
        connection.connection_made(Deaf())
        asking = asyncio.create_task(_ask_stream(connection, reply.append, framed), name="stream")
        for start, end in itertools.pairwise(edges):
            for _ in range(3):  # turns of the loop, until what came has found its reader
                await asyncio.sleep(0)
            connection.data_received(stream[start:end])
        async with asyncio.timeout(10):
            await asking

    asyncio.run(streamed())
    assert b"".join(reply) == b"".join(parts)


async def _ask_stream(connection: Connection, sink: Callable[[bytes], None], framed: Callable[[bytes], bool]) -> None:
    await connection.ask(b"")
    await connection.stream_to(sink, framed)


class Deaf(asyncio.Transport):
    def write(self, data: bytes | bytearray | memoryview) -> None:
        """The port is closed."""


async def test_single_chunks_are_passed_unparsed(pool: HttpClient) -> None:
    events = [b"data: %d\n\n" % number for number in range(20)]

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(chunked())
        for event in events:
            await asyncio.sleep(0.005)
            writer.write(chunk_of(event))
        writer.write(b"0\r\n\r\n")

    reply: list[bytes] = []
    offered: list[bytes] = []

    def framed(chunk: bytes) -> bool:
        offered.append(chunk)
        reply.append(chunk.split(b"\r\n")[1])
        return True

    async with worker(talk) as url, asyncio.timeout(10), pool.call("POST", url, "/x", {}, b"{}") as answer:
        await answer.stream_to(reply.append, framed)
    assert b"".join(reply) == b"".join(events)
    assert set(offered) <= set(map(chunk_of, events)) and len(offered) > len(events) // 2


async def test_fetched_answer_has_its_status_fields_and_object(pool: HttpClient) -> None:
    body = b'{"a": 1}'
    reply = b"HTTP/1.1 404 Not Found\r\nX-Y: z\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    async with worker(says(reply, OK)) as url:
        fetched = await pool.fetch("GET", url, "/x?y=1", timeout_s=10)
        assert (fetched.status, fetched.headers["x-y"], fetched.object()) == (404, "z", {"a": 1})
        assert (await pool.fetch("GET", url, "/x", timeout_s=10)).object() == {}


async def test_fetch_has_deadline_and_maximum_body(pool: HttpClient) -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async with worker(silent) as url:
        with pytest.raises(TimeoutError):
            await pool.fetch("GET", url, "/x", timeout_s=0.05)
    async with worker(says(OK)) as url:
        with pytest.raises(ResponseLost, match="more than 4 bytes"):
            await pool.fetch("GET", url, "/x", timeout_s=10, most=4)


@pytest.mark.parametrize("path", ["/a b", "/a\r\nb", "/a\nb"])
async def test_unsafe_path_is_never_sent(pool: HttpClient, path: str) -> None:
    with pytest.raises(ValueError):
        pool.call("GET", "http://127.0.0.1:9", path, {})


async def test_long_idle_connection_is_not_reused() -> None:
    connections = 0

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        await says(OK, OK, OK)(reader, writer)

    async with worker(talk) as url, HttpClient(idle_s=0.2) as pool:
        assert [await ask(pool, url) for _ in range(2)] == [b"hello"] * 2
        assert connections == 1
        await asyncio.sleep(0.3)
        assert await ask(pool, url) == b"hello"
        assert connections == 2


@pytest.mark.parametrize(
    ("method", "unused_s", "expected"), [("GET", 40, 1), ("GET", 61, 2), ("POST", 29, 1), ("POST", 31, 2)]
)
async def test_only_get_uses_connection_that_was_unused_for_long(method: str, unused_s: float, expected: int) -> None:
    connections = 0

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        await says(OK, OK)(reader, writer)

    async with worker(talk) as url, HttpClient(idle_s=60) as pool:
        for _ in range(2):
            assert (await pool.fetch(method, url, "/", timeout_s=10)).body == b"hello"
            ((kept,),) = pool._idle.values()
            kept.idle_since -= unused_s
        assert connections == expected


async def test_idle_connection_is_closed_while_others_are_reused() -> None:
    both, closed = asyncio.Barrier(2), asyncio.Event()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        await both.wait()  # each call has a connection of its own
        writer.write(OK)
        try:
            await says(*[OK] * 1000)(reader, writer)
        finally:
            closed.set()

    async with worker(talk) as url, HttpClient(idle_s=0.1) as pool, asyncio.timeout(10):
        await asyncio.gather(ask(pool, url), ask(pool, url))
        while not closed.is_set():
            assert await ask(pool, url) == b"hello"
            await asyncio.sleep(0.02)


async def test_only_connection_closed_by_worker_is_reported() -> None:
    leave, lost = asyncio.Event(), asyncio.Event()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await says(OK)(reader, writer)
        await leave.wait()

    async with worker(talk) as url:
        async with HttpClient(on_lost=lost.set) as pool:
            assert await ask(pool, url) == b"hello"
            assert not lost.is_set()
            leave.set()
            await asyncio.wait_for(lost.wait(), 10)
        lost.clear()
        leave.clear()
        async with HttpClient(on_lost=lost.set) as pool:
            assert await ask(pool, url) == b"hello"
        leave.set()
        await asyncio.sleep(0)
        assert not lost.is_set()


async def test_ended_connection_is_freed_without_gc() -> None:
    gc.collect()
    gc.disable()
    try:
        async with worker(says(OK)) as url, HttpClient() as pool:
            assert await ask(pool, url) == b"hello"
        async with asyncio.timeout(20):
            while any(type(each) is Connection for each in gc.get_objects()):  # noqa: ASYNC110 - no event tells of it
                await asyncio.sleep(0)  # the transport's end is a callback of the loop
    finally:
        gc.enable()
