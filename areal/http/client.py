"""The asyncio HTTP client of the services and the SDK: a pool of connections with one call at a time on each.

A response is parsed just far enough to pass it on. A reader that lags behind pauses the connection, so that a slow
caller holds back the service that answers. ``stream_to`` passes a body on from inside the loop's callback, without a
task switch. While it streams, a read that is exactly one chunk, as nearly every event is, is not parsed at all; with a
``Window`` such chunks are coalesced.
"""

from __future__ import annotations

import asyncio
import math
import ssl
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from typing import Any, cast
from urllib.parse import urlsplit

from areal.dataclasses import dataclass
from areal.http import tracing
from areal.http.headers import Headers

try:
    from httptools import HttpParserError, HttpResponseParser
    from orjson import loads
except ImportError:
    from areal.http.fallback import HttpParserError, HttpResponseParser, loads  # type: ignore[assignment]


class CallFailed(Exception):
    """The call has no complete response. A missed deadline is TimeoutError instead."""


class NotConnected(CallFailed):
    """The connection could not be made: the server has not seen the call."""


class ResponseLost(CallFailed):
    """The connection ended, or did not speak HTTP, before the response's end."""


# Coalescing. An event costs each process on its way the same with one token as with several. So a part that arrives
# within a window after the last delivery waits for the window's end, which is the same for all streams: relays then
# read and write for all of them in one turn of their loop. A stream's first and last parts never wait, nor do those of
# a source that is slower than the window.


class Window:
    """The timer of all streams, which runs only while something waits."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._loop = asyncio.get_running_loop()
        self._waiting: list[Callable[[], None]] = []
        self._timer: asyncio.TimerHandle | None = None

    def wait(self, action: Callable[[], None]) -> None:
        """Call ``action``, which must not raise, at the window's end."""
        self._waiting.append(action)
        if self._timer is None:
            self._timer = self._loop.call_later(self.seconds, self.end)

    def end(self) -> None:
        """End the window now: nothing waits when it returns."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        waiting, self._waiting = self._waiting, []
        for action in waiting:
            action()


_HIGH_WATER = 256 * 1024
_MOST_HEADER_BYTES = 64 * 1024
_LONGEST_LINE = 64 * 1024 * 1024
_SIZES: dict[int, bytes] = {}
_MOST_SIZES = 4096
_NO_SIZE = b"\n"  # for lengths that no chunk has: no chunk begins so


def start_of_chunk(data: bytes) -> int:
    """Return the offset of the content where ``data`` is exactly one chunk with a size line in the usual form; the
    content ends two bytes before the end of ``data``. 0 for anything else, also for the last chunk."""
    size = _SIZES.get(len(data)) or _size_line(len(data))
    return len(size) if data.startswith(size) and data.endswith(b"\r\n") else 0


def _size_line(length: int) -> bytes:
    """Return the size line of a chunk of ``length`` bytes in all, cached: a few lengths recur."""
    if len(_SIZES) > _MOST_SIZES:
        _SIZES.clear()
    lines = [b"%x\r\n" % (length - 4 - digits) for digits in range(1, 9) if length - 4 - digits > 0]
    line = next((line for line in lines if int(line, 16) + len(line) + 2 == length), _NO_SIZE)
    _SIZES[length] = line
    return line


class Connection(asyncio.Protocol):
    """After ``ask`` returned, ``status`` and ``headers`` are set; read the body by ``part`` until it is empty, or by
    ``stream_to``."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None
        self._error: Exception | None = None
        self._paused = False
        self.closed = False
        self.idle_since = 0.0
        self.on_lost: Callable[[], None] | None = None  # called when it is lost while idle
        self._delivered_at = -math.inf  # loop time of the last delivery to the sink
        self._reset()

    def _reset(self) -> None:
        self._parser = HttpResponseParser(self)
        self._parts: list[bytes] = []
        self._buffered = 0
        self._header_bytes = 0
        self._has_head = False
        self._ended = True  # there is no request yet
        self._keep_alive = False
        self._sink: Callable[[bytes], None] | None = None
        self._framed: Callable[[bytes], bool] | None = None
        self._window: Window | None = None
        self._deferred: list[bytes] = []  # contents of chunks that wait for the window's end
        self._at_boundary = False  # the parser is at a chunk's boundary
        self._raw: dict[bytes, bytes] = {}
        self.status = 0

    @property
    def headers(self) -> Headers:
        return Headers(self._raw)

    # Called by the owner.

    async def ask(self, request: bytes) -> None:
        """Send ``request`` and wait for the response's head. Raises ResponseLost."""
        self._reset()
        self._ended = False
        self._transport.write(request)
        while not self._has_head:
            await self._wait()

    async def part(self) -> bytes:
        """Return the next bytes of the body; empty at its end. Raises ResponseLost."""
        while not self._parts:
            if self._ended:
                return b""
            await self._wait()
        data = self._take()
        self.resume()
        return data

    async def whole(self, most: int | None = None) -> bytes:
        """Return the rest of the body. Raises ResponseLost, also if it has more than ``most`` bytes."""
        parts = []
        size = 0
        while part := await self.part():
            parts.append(part)
            size += len(part)
            if most is not None and size > most:
                raise ResponseLost(f"the answer has more than {most} bytes")
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def stream_to(
        self, sink: Callable[[bytes], None], framed: Callable[[bytes], bool] | None = None, window: Window | None = None
    ) -> None:
        """Give the rest of the body to ``sink`` as it arrives, and return at its end. Raises ResponseLost, and errors
        of ``sink``. The sink's owner controls the flow by ``pause`` and ``resume``. A chunk that arrives alone is first
        offered to ``framed`` with its size line; ``sink`` gets it unless that returns True. With a ``window``, chunks
        that arrive alone within it are given to ``sink`` at its end, joined."""
        self._delivered_at = -math.inf
        if self._parts:
            self._delivered_at = self._loop.time()
            sink(self._take())
        self._sink, self._framed, self._window = sink, framed, window
        try:
            while not self._ended:
                await self._wait()
        finally:
            self._sink = self._framed = self._window = None
            self._deferred.clear()
        if self._error is not None:
            raise self._error

    def _take(self) -> bytes:
        parts = self._parts
        data = parts[0] if len(parts) == 1 else b"".join(parts)
        parts.clear()
        self._buffered = 0
        return data

    def pause(self) -> None:
        if not self._paused and not self.closed:
            self._paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        if self._paused and not self.closed:
            self._paused = False
            self._transport.resume_reading()

    @property
    def reusable(self) -> bool:
        return self._ended and self._keep_alive and not self.closed and not self._paused

    def abort(self) -> None:
        self.closed = True
        self._transport.abort()

    def forget(self) -> None:
        """Free the buffers and break reference cycles: an error that was raised holds the frames of its reader."""
        self._error = self._sink = self._framed = None
        self._parts.clear()
        self._deferred.clear()

    async def _wait(self) -> None:
        if self._error is not None:
            raise self._error
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # Called by the event loop.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are none by their class

    def data_received(self, data: bytes) -> None:
        if self._ended:  # a response without a request
            self.abort()
            return
        if self._at_boundary and self._sink is not None and (start := start_of_chunk(data)):
            if self._window is not None and self._defer(self._window, data[start:-2]):
                return
            try:
                if self._framed is None or not self._framed(data):
                    self._sink(data[start:-2])
            except Exception as error:  # noqa: BLE001 - the boundary of a callback: the caller of ``stream_to`` raises it
                self._fail(error)
            return
        if self._deferred:
            self._deliver_deferred()
        if self._error is None:
            self._parse(data)

    def _defer(self, window: Window, part: bytes) -> bool:
        """Return whether ``part`` is deferred to the window's end."""
        now = self._loop.time()
        if not self._deferred:
            if now - self._delivered_at >= window.seconds:
                self._delivered_at = now
                return False
            window.wait(self._deliver_deferred)
        self._deferred.append(part)
        return True

    def _deliver_deferred(self) -> None:
        if not self._deferred or self._sink is None or self._error is not None:
            return
        late, self._delivered_at = b"".join(self._deferred), self._loop.time()
        self._deferred.clear()
        try:
            self._sink(late)
        except Exception as error:  # noqa: BLE001 - as in ``data_received``
            self._fail(error)

    def _parse(self, data: bytes) -> None:
        self._at_boundary = False
        try:
            self._parser.feed_data(data)
        except HttpParserError as error:
            self._fail(ResponseLost(f"the other side speaks no HTTP: {error}"))
            return
        self._at_boundary = self._at_boundary and data.endswith(b"\r\n")  # else part of the next size line has arrived
        if self._sink is None:
            if self._buffered > _HIGH_WATER and not self._ended:
                self.pause()
            self._wake()
            return
        if self._parts:
            self._delivered_at = self._loop.time()
            try:
                self._sink(self._take())
            except Exception as error:  # noqa: BLE001 - as above
                self._fail(error)
                return
        if self._ended:
            self._wake()

    def connection_lost(self, error: Exception | None) -> None:
        if self.on_lost is not None and not self.closed:
            self.on_lost()
        self.closed = True
        self._deliver_deferred()
        if not self._ended:
            until_close = b"content-length" not in self._raw and b"transfer-encoding" not in self._raw
            if error is None and self._has_head and until_close:
                self._ended = True
            else:
                why = f": {error!r}" if error is not None else ""
                self._error = self._error or ResponseLost(f"the connection ended{why}")
        del self._parser  # a reference cycle
        self._wake()

    def _fail(self, error: Exception) -> None:
        self._error = error
        self.abort()
        self._wake()

    # Called by the parser.

    def on_header(self, name: bytes, value: bytes) -> None:
        self._header_bytes += len(name) + len(value)
        if self._header_bytes > _MOST_HEADER_BYTES:
            raise HttpParserError("the answer's header is too large")
        if not self._has_head:  # otherwise it is a trailer
            name = name.lower()
            self._raw[name] = self._raw[name] + b", " + value if name in self._raw else value

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status >= 200:
            self.status = status
            self._has_head = True

    def on_chunk_header(self) -> None:
        self._at_boundary = False

    def on_chunk_complete(self) -> None:
        self._at_boundary = True

    def on_body(self, data: bytes) -> None:
        self._parts.append(data)
        self._buffered += len(data)

    def on_message_complete(self) -> None:
        if not self._has_head:  # an interim answer, such as 100
            self._raw.clear()
            return
        self._ended = True
        self._keep_alive = self._parser.should_keep_alive()


# The pool: as many connections as there are calls, the last used first; idle ones close after a while. Leaving a
# response before its end closes its connection, which tells the server that it has no reader.

CONNECT_TIMEOUT_S = 5.0
POOL_IDLE_S = 30.0  # shorter than any server's keep-alive here
_MOST_ADDRESSES = 65_536
ENGINE_IDLE_S = 4.5  # longer than between polls of an idle engine; uvicorn, under vLLM and SGLang, closes after five


@dataclass(frozen=True)
class Address:
    host: str
    port: int
    tls: bool
    authority: str
    prefix: str


def parse_address(url: str) -> Address:
    """Raise ValueError for a URL that is not ``http(s)://host[:port][/path]``."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc:
        raise ValueError(f"{url!r} is not an address like http://host:port")
    tls = parts.scheme == "https"
    port = parts.port or (443 if tls else 80)
    return Address(parts.hostname, port, tls, parts.netloc, parts.path.rstrip("/"))


@cache
def _tls_context() -> ssl.SSLContext:
    return ssl.create_default_context()  # reads all certificates of the system: some 20 ms


@dataclass(frozen=True)
class HttpReply:
    """A whole response."""

    status: int
    headers: Headers
    body: bytes

    def json(self) -> Any:
        """Return the decoded body. Raises ValueError."""
        return loads(self.body)

    def object(self) -> dict[str, Any]:
        """Return the JSON object in the body; empty if it holds none."""
        try:
            data = self.json()
        except ValueError:
            return {}
        return data if isinstance(data, dict) else {}

    def error(self) -> dict[str, Any]:
        """Return the error object (``message``, ``code``, ``param``) in the body; empty if it holds none."""
        error = self.object().get("error")
        return error if isinstance(error, dict) else {}


class PendingCall:
    """A call: entering it sends the request and returns the connection with the response's head read; leaving it
    returns the connection to the pool, or closes it."""

    def __init__(self, pool: HttpClient, address: Address, request: bytes) -> None:
        self._pool = pool
        self._address = address
        self._request = request
        self._connection: Connection | None = None

    async def __aenter__(self) -> Connection:
        read_only = self._request.startswith(b"GET ")
        connection = self._connection = await self._pool.connection(self._address, read_only=read_only)
        try:
            request, self._request = self._request, b""  # frees a large body while the response is read
            await connection.ask(request)
        except BaseException:
            self._pool.release(self._address, connection)
            raise
        return connection

    async def __aexit__(self, *error: object) -> None:
        assert self._connection is not None
        self._pool.release(self._address, self._connection)


class HttpClient:
    """Calls to other services; ``async with`` closes all connections at its end, also those of running calls. ``base``
    is a URL to which the path is added. Entering a call raises NotConnected or ResponseLost."""

    def __init__(self, *, idle_s: float = POOL_IDLE_S, on_lost: Callable[[], None] | None = None) -> None:
        """``idle_s``: seconds that a connection is kept unused; less than the server's keep-alive. Half of it for calls
        other than GET, which a busy server could lose as it closes the connection, and which may not be repeated.
        ``on_lost`` is called when the server closes an idle connection."""
        self._idle_s = idle_s
        self._on_lost = on_lost
        self._addresses: dict[str, Address] = {}
        self._idle: dict[Address, list[Connection]] = {}
        self._busy: set[Connection] = set()
        self._loop = asyncio.get_running_loop()
        self._sweep: asyncio.TimerHandle | None = None

    def call(self, method: str, base: str, path: str, headers: Mapping[str, str], body: bytes = b"") -> PendingCall:
        """Return a call, whose deadline is the caller's business. A ``body`` is JSON unless ``headers`` name another
        Content-Type. Raises ValueError for a header or path with a line break."""
        if body and "Content-Type" not in headers:
            headers = {**headers, "Content-Type": "application/json"}
        lines = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
        if lines.count("\n") != len(headers) or lines.count("\r") != len(headers):
            raise ValueError("a header's value has a line break")
        return self.send(base, f"{method} ", path, lines.encode("utf-8", "surrogateescape"), body)

    def send(self, base: str, verb: str, path: str, lines: bytes, body: bytes) -> PendingCall:
        """``call`` with the method and a space as ``verb``, and the header's encoded ``lines``."""
        if (address := self._addresses.get(base)) is None:
            if len(self._addresses) >= _MOST_ADDRESSES:  # workers come and go
                self._addresses.clear()
            address = self._addresses[base] = parse_address(base)
        if "\r" in path or "\n" in path or " " in path:
            raise ValueError("a path has a space or a line break")
        if (trace := tracing.header_lines()) and b"traceparent:" not in lines.lower():
            lines += trace
        head = f"{verb}{address.prefix}{path} HTTP/1.1\r\nHost: {address.authority}\r\n"
        return PendingCall(self, address, b"%b%bContent-Length: %d\r\n\r\n%b" % (head.encode(), lines, len(body), body))

    async def fetch(
        self,
        method: str,
        base: str,
        path: str,
        *,
        timeout_s: float,
        headers: Mapping[str, str] | None = None,
        body: bytes = b"",
        most: int | None = None,
    ) -> HttpReply:
        """Return the whole response within ``timeout_s``. Raises NotConnected, TimeoutError, and ResponseLost, also for
        a body of more than ``most`` bytes."""
        async with asyncio.timeout(timeout_s), self.call(method, base, path, headers or {}, body) as answer:
            return HttpReply(answer.status, answer.headers, await answer.whole(most))

    async def connection(self, address: Address, *, read_only: bool) -> Connection:
        idle = self._idle.get(address)
        longest = self._idle_s if read_only else self._idle_s / 2
        while idle:
            connection = idle.pop()
            if not connection.closed and self._loop.time() - connection.idle_since < longest:
                connection.on_lost = None
                self._busy.add(connection)
                return connection
            connection.abort()
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                _, made = await self._loop.create_connection(
                    Connection, address.host, address.port, ssl=_tls_context() if address.tls else None
                )
        except (OSError, TimeoutError) as error:
            raise NotConnected(f"{address.authority}: {error!r}") from error
        self._busy.add(made)
        return made

    def release(self, address: Address, connection: Connection) -> None:
        self._busy.discard(connection)
        if not connection.reusable:
            connection.abort()
            connection.forget()
            return
        connection.idle_since, connection.on_lost = self._loop.time(), self._on_lost
        self._idle.setdefault(address, []).append(connection)
        if self._sweep is None or self._sweep.when() - connection.idle_since < self._idle_s / 2:
            self._close_old()  # here, so that a process that calls now and then is not woken for it

    def _close_old(self) -> None:
        if self._sweep is not None:
            self._sweep.cancel()
        oldest = self._loop.time() - self._idle_s
        for address, connections in list(self._idle.items()):
            kept = []
            for connection in connections:
                if connection.closed or connection.idle_since < oldest:
                    connection.abort()
                else:
                    kept.append(connection)
            if kept:
                connections[:] = kept
            else:
                del self._idle[address]
        self._sweep = self._loop.call_later(self._idle_s, self._close_old) if self._idle else None

    async def __aenter__(self) -> HttpClient:
        return self

    async def __aexit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        if self._sweep is not None:
            self._sweep.cancel()
        for connections in (*self._idle.values(), [*self._busy]):
            for connection in connections:
                connection.abort()
        self._idle.clear()


# Bodies of lines, and events of engines that write one line of data in each. Any other stream: ``areal.http.events``.


class Lines:
    """Splits the parts of a body into complete lines without their newlines; empty ones are skipped. A line of more
    than 64 MiB is ResponseLost."""

    def __init__(self) -> None:
        self._rest: list[bytes] = []  # of the line that is incomplete
        self._size = 0

    def is_line(self, part: bytes) -> bool:
        """Return whether ``part`` is exactly one line, as nearly every step of a stream is."""
        return not self._rest and part.find(b"\n") == len(part) - 1 > 0

    def feed(self, part: bytes) -> list[bytes]:
        *ends, rest = part.split(b"\n")
        lines = []
        for end in ends:
            lines.append(b"".join((*self._rest, end)) if self._rest else end)
            self._rest, self._size = [], 0
        if rest:
            self._rest.append(rest)
            self._size += len(rest)
        if self._size > _LONGEST_LINE:
            raise ResponseLost(f"a line of the answer has more than {_LONGEST_LINE} bytes")
        return [line for line in lines if line]


def event_payloads(lines: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the data in the lines of a server-sent event stream."""
    for line in lines:
        if line.startswith(b"data:") and (payload := line.removeprefix(b"data:").strip()):
            yield payload
