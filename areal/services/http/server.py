"""The HTTP/1.1 server: requests of a connection are parsed as they arrive and answered one at a time, in order.

The handler starts in a task of its own when a request's head has arrived, usually with its body. Later requests wait in
parsed form, and reading pauses. A caller that disconnects cancels its handler. A slow reader pauses the source of its
stream; a caller that sends or reads nothing for too long is answered 408 or disconnected (``sweep``).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections import deque
from collections.abc import Awaitable, Callable
from enum import IntEnum
from typing import NoReturn, cast

import httptools

from areal.http.headers import Headers, is_single, unique_id
from areal.services.http.errors import OPENAI, ApiError
from areal.services.http.messages import (
    AnyResponse,
    BodyBudget,
    FlowControl,
    Request,
    Response,
    ServerLimits,
    StreamingResponse,
    Upgraded,
    encode_head,
    error_response,
    has_body,
    id_lines,
)
from areal.services.http.tasks import until_beat


class RequestReader:
    """One connection's parser. It passes a request on when its head is complete, and adds the body as it arrives.

    ``incoming``: the request whose body is incomplete. ``since``: the loop time at which its head began."""

    def __init__(self, connection: HttpConnection, most_fields: int, most_head_bytes: int) -> None:
        self._connection = connection
        self._most_fields = most_fields
        self._most_head_bytes = most_head_bytes
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpRequestParser(self)
        self._refusal: ApiError | None = None  # why a callback stopped the parser
        self._upgrade = b""  # the protocol that the request asks for
        self._heads = 0
        self._head_bytes = 0
        self.in_head = False
        self.incoming: Request | None = None
        self.since = 0.0

    def feed(self, data: bytes) -> None:
        """Parse ``data``. Raises ApiError if the input cannot be parsed further."""
        before = self._heads
        try:
            try:
                self._parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                self._parse_without_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserError as error:
            raise self._refusal or ApiError(400, f"this is not valid HTTP: {error}", code="invalid_http") from error
        if self.in_head and self._heads == before:
            self._head_bytes += len(data)
            if self._head_bytes > self._most_head_bytes:
                raise _head_too_large()

    def stop(self, refusal: ApiError) -> NoReturn:
        """Stop the parser from inside one of its callbacks."""
        self._refusal = refusal
        raise httptools.HttpParserError(refusal.message)

    def end(self) -> None:
        """Break the reference cycles, which would otherwise last until the next garbage collection."""
        del self._parser, self._connection
        self.incoming = self._refusal = None

    def _parse_without_upgrade(self, rest: bytes) -> None:
        """Parse an upgrade request again without its Upgrade header, since the parser takes the bytes after its head
        for another protocol. The handler may still grant the upgrade."""
        if (method := self._parser.get_method()) == b"CONNECT":
            self.stop(ApiError(405, "this server is not a proxy: CONNECT is not allowed", code="method_not_allowed"))
        self._upgrade = self._raw.get(b"upgrade", b"")
        fields = [(name, value) for name, value in self._raw.items() if name not in (b"upgrade", b"connection")]
        lines = [b"%b: %b" % field for field in fields] + [b"Connection: close", b"", b""]
        begin = b"%b %b HTTP/%b" % (method, self._target, self._parser.get_http_version().encode())
        self._parser = httptools.HttpRequestParser(self)
        self._parser.feed_data(b"\r\n".join([begin, *lines]) + rest)

    # Called by the parser.

    def on_message_begin(self) -> None:
        self._heads += 1
        self.in_head = True
        self.since = self._loop.time()
        self._head_bytes = self._fields = 0
        self._target = b""
        self._raw: dict[bytes, bytes] = {}

    def on_url(self, part: bytes) -> None:
        self._target += part
        self._head_bytes += len(part)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._fields += 1
        self._head_bytes += len(name) + len(value)
        if self._fields > self._most_fields or self._head_bytes > self._most_head_bytes:
            self.stop(_head_too_large())
        before = self._raw.get(lower := name.lower())
        if before is not None and is_single(lower):
            self.stop(ApiError(400, f"a request has one {name.decode()} header", code="invalid_http"))
        self._raw[lower] = value if before is None else before + b", " + value

    def on_headers_complete(self) -> None:
        self.in_head = False
        if not self._parser.should_upgrade():
            request = self._read_head()
            self._raw = {}  # of a chunked body's trailers, which are no headers
            self._connection.begun(request)
            self.incoming = request

    def on_body(self, data: bytes) -> None:
        assert self.incoming is not None
        self.incoming.received(data)

    def on_message_complete(self) -> None:
        if self.incoming is not None:
            self.incoming.completed()
            self.incoming = None

    def _read_head(self) -> Request:
        raw, target, parser = self._raw, self._target, self._parser
        version = parser.get_http_version()
        if version not in ("1.1", "1.0"):
            self.stop(ApiError(505, f"HTTP/{version} is not supported", code="http_version"))
        if b"host" not in raw and version == "1.1":
            self.stop(ApiError(400, "a request needs a Host header", code="invalid_http"))
        if raw.get(b"transfer-encoding", b"chunked").strip().lower() != b"chunked":
            self.stop(ApiError(400, "Transfer-Encoding supports only chunked", code="invalid_http"))
        if b"transfer-encoding" in raw and version == "1.0":
            self.stop(ApiError(400, "HTTP/1.0 has no Transfer-Encoding", code="invalid_http"))
        if not target.startswith(b"/"):
            target = _origin_form(target)
        method, path = parser.get_method().decode(), target.decode("utf-8", "backslashreplace")
        request = Request(self._connection, method, path, Headers(raw))
        request.upgrade, self._upgrade = self._upgrade, b""
        request.is_http_1_0 = version == "1.0"
        request.keep_alive = not request.is_http_1_0 and parser.should_keep_alive()
        if raw.get(b"expect", b"100-continue").lower() != b"100-continue":
            self.stop(ApiError(417, "Expect supports only 100-continue", code="expectation_failed"))
        request.expects_continue = b"expect" in raw and not request.is_http_1_0
        return request


def _head_too_large() -> ApiError:
    return ApiError(431, "the request's header is too large", code="header_too_large")


def _origin_form(target: bytes) -> bytes:
    """Return the path of a target that is a whole URL, as callers of a proxy send it."""
    try:
        parsed = httptools.parse_url(target)
    except httptools.HttpParserInvalidURLError:
        return target
    return (parsed.path or b"/") + (b"?" + parsed.query if parsed.query else b"")


Application = Callable[[Request], Awaitable[AnyResponse]]
"""Answers a request. Raises nothing but CancelledError and ConnectionResetError."""

_log = logging.getLogger(__name__)
_CLOSE = "Connection: close\r\n"
_ABORTED, _LEFT = 7, (7, 8)  # TCP_CLOSE, TCP_CLOSE_WAIT of <netinet/tcp.h>
_TWO_WRITES = 64 * 1024  # the body size from which head and body are two writes, which saves a copy


class ConnectionPhase(IntEnum):
    """The phases of a connection, in order; some may be skipped."""

    OPEN = 0  # input is parsed
    REFUSING = 1  # input is discarded, being malformed or too late; requests parsed before are still answered
    CLOSING = 2  # the last answer is written, or the caller was idle for too long
    LOST = 3  # the transport has closed


_OPEN, _REFUSING, _CLOSING, _LOST = ConnectionPhase


class HttpConnection(asyncio.Protocol):
    """One connection. ``writable``: the caller keeps up with what is written."""

    def __init__(self, server: HttpServer) -> None:
        self._server = server
        self.budget = server.budget
        self._limits = server.limits
        self._loop = server.loop
        self._reader = RequestReader(self, server.limits.header_count, server.limits.header_bytes)
        self._idle_since = self._loop.time()
        self._current: Request | None = None
        self._task: asyncio.Task[None] | None = None
        self._waiting: deque[Request | ApiError] = deque()
        self._phase = _OPEN
        self._read_paused = False
        self._source: FlowControl | None = None
        self._drained: asyncio.Future[None] | None = None
        self._upgraded: Upgraded | None = None
        self._discarded = 0  # bytes
        self._unread: tuple[float, int] = (0.0, 0)  # bytes that wait for the caller, and the loop time since when
        self.last_part = b""  # the newest bytes of a stream
        self.writable = True

    # Called by the event loop.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transports do not subclass it
        self._server.add(self)
        sock = transport.get_extra_info("socket")
        if sock is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    def data_received(self, data: bytes) -> None:
        if self._phase is not _OPEN:
            self._discarded += len(data)
            if self._discarded > self._limits.linger_bytes:
                self._transport.abort()
            return
        if self._upgraded is not None:
            self._upgraded.received(data)
            return
        try:
            self._reader.feed(data)
        except ApiError as error:
            self._fail(error)
        if self._waiting or self._reader.incoming is not None:
            self._update_read_pause()

    def eof_received(self) -> None:
        """Return None, so that the transport closes: a caller that stops sending has disconnected."""

    def connection_lost(self, error: Exception | None) -> None:
        """Free what the connection holds and break its reference cycles: the garbage collector runs rarely."""
        self._phase = _LOST
        self._server.remove(self)
        self._reader.end()
        for request in (self._current, *self._waiting):
            if isinstance(request, Request):
                request.release()
        self._waiting.clear()
        if self._task is not None:
            self._task.cancel()
        if self._upgraded is not None:
            self._upgraded.lost()
        self._current = self._task = self._upgraded = None
        self.resume_writing()
        self._source, self.last_part = None, b""

    def pause_writing(self) -> None:
        self.writable = False
        self._unread = (self._loop.time(), self._transport.get_write_buffer_size())
        if self._source is not None:
            self._source.pause()

    def resume_writing(self) -> None:
        self.writable = True
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)
        if self._source is not None:
            self._source.resume()
        if self._current is None and self._waiting:
            self._start_next()

    # Requests, one after the other.

    def begun(self, request: Request) -> None:
        """Start or queue a request whose head has arrived."""
        if self._current is None:
            self._start(request)
            return
        if len(self._waiting) >= self._limits.pipelined:
            message = "too many requests at once on one connection"
            self._reader.stop(ApiError(429, message, code="too_many_requests"))
        self._waiting.append(request)

    def _start(self, request: Request) -> None:
        self._current = request
        self._task = self._loop.create_task(self._serve(request), name="http-request")

    async def _serve(self, request: Request) -> None:
        try:
            self._finish(request, await self._server.application(request))
        except ConnectionResetError:
            self.abort()
        except Exception:  # noqa: BLE001 - the process boundary: the answer cannot be written
            _log.exception("%s %s could not be answered [%s]", request.method, request.path, request.id)
            self.abort()
        finally:
            request.release()

    def _finish(self, request: Request, response: AnyResponse) -> None:
        """End the answer and start the next request."""
        if isinstance(response, Response):
            if not request.answered:
                self.send(request, response)
        else:
            if not response.prepared:
                response.begin(request)
            if not self._transport.is_closing():
                self._transport.write(_part(request, response.end) + (b"0\r\n\r\n" if request.chunked else b""))
        self._current = self._task = self._source = None
        self._idle_since = self._loop.time()
        if request.closes or self._server.draining:
            self._close(linger=self._upgraded.lingers if self._upgraded is not None else not request.complete)
        elif self._waiting:
            self._start_next()

    def _start_next(self) -> None:
        if not self.writable or self._phase is _LOST:
            return
        following = self._waiting.popleft()
        if isinstance(following, ApiError):
            self._refuse(following)
        else:
            self._start(following)
            self._update_read_pause()

    def _refuse(self, error: ApiError) -> None:
        """Send the last answer of a connection whose input cannot be parsed further."""
        response = error_response(error, OPENAI, unique_id("req_"))
        head = encode_head(response.status, response.headers, f"Content-Length: {len(response.body)}\r\n{_CLOSE}")
        self._transport.write(head + response.body)
        self._close(linger=True)

    def _update_read_pause(self) -> None:
        """Pause reading while requests wait, or a body without a reader fills its buffer."""
        incoming = self._reader.incoming
        self.hold_input(
            bool(self._waiting) or (incoming is not None and incoming.backlog > self._limits.buffered_bytes)
        )

    def _fail(self, error: ApiError) -> None:
        """Refuse further input, once everything before it is answered."""
        self._phase = max(self._phase, _REFUSING)
        self.hold_input(True)
        if self._reader.incoming is not None:
            self._reader.incoming.refuse(error)
        elif self._current is not None:
            self._waiting.append(error)
        else:
            self._refuse(error)

    # Called for the handlers.

    def want_body(self, request: Request) -> None:
        """Resume reading: a handler waits for the rest of the body."""
        if request.expects_continue:
            request.expects_continue = False
            if request.size == 0:
                self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self._update_read_pause()

    def send(self, request: Request, response: Response) -> None:
        self._check_begins(request)
        length = "" if response.status == 204 else f"Content-Length: {len(response.body)}\r\n"
        head = encode_head(response.status, response.headers, self._framing(request, response, length))
        request.answered = True
        if not has_body(request.method, response.status):
            self._transport.write(head)
        elif len(response.body) < _TWO_WRITES:
            self._transport.write(head + response.body)
        else:
            self._transport.writelines((head, response.body))

    def begin_stream(self, request: Request, response: StreamingResponse, first: bytes = b"") -> None:
        """Send the head and ``first`` in one write."""
        self._check_begins(request)
        request.chunked = not request.is_http_1_0 and request.method != "HEAD"
        framing = self._framing(request, response, "" if request.is_http_1_0 else "Transfer-Encoding: chunked\r\n")
        head = encode_head(response.status, response.headers, framing)
        request.stream = response
        self.last_part = first
        self._transport.write(head + _part(request, first))

    def _check_begins(self, request: Request) -> None:
        self._check_not_lost()
        if request is not self._current or request.answered or request.stream is not None:
            raise RuntimeError("a request is answered once")

    def _framing(self, request: Request, response: AnyResponse, length: str) -> str:
        request.closes = not (request.keep_alive and request.complete) or self._server.draining
        ids = id_lines(request.id_headers, response.headers, request.id, request.ignored)
        return f"{ids}{length}{_CLOSE}" if request.closes else ids + length

    def upgrade(self, request: Request, head: bytes, reader: Upgraded) -> None:
        """Answer with ``head``. From now on ``reader`` gets the input, until the handler returns."""
        self._check_begins(request)
        request.answered = request.closes = True
        self._upgraded = reader
        self._transport.write(head)

    def write_raw(self, data: bytes) -> None:
        """Write bytes to an upgraded connection."""
        self._check_not_lost()
        self._transport.write(data)

    def hold_input(self, hold: bool) -> None:
        """Pause or resume reading."""
        if hold != self._read_paused and self._phase < _CLOSING:
            self._read_paused = hold
            if hold:
                self._transport.pause_reading()
            else:
                self._transport.resume_reading()

    def write_part(self, request: Request, data: bytes) -> None:
        self._check_not_lost()
        self.last_part = data
        self._transport.write(_part(request, data))

    def write_chunk(self, chunk: bytes) -> None:
        """Write bytes that are a whole chunk, including its size line."""
        if self._phase is _LOST:
            raise ConnectionResetError("the caller is gone")
        self.last_part = chunk
        self._transport.write(chunk)

    async def wait_writable(self) -> None:
        """Wait until the caller has caught up. Raises ConnectionResetError if it is gone."""
        self._check_not_lost()
        if self.writable:
            return
        self._drained = self._loop.create_future()
        try:
            await self._drained
        finally:
            self._drained = None
        self._check_not_lost()

    def set_source(self, source: FlowControl | None) -> None:
        self._source = source
        if source is not None and not self.writable:
            source.pause()

    def _check_not_lost(self) -> None:
        if self._phase is _LOST or self._transport.is_closing():
            raise ConnectionResetError("the caller is gone")

    def abort(self) -> None:
        """Abort the connection: the answer cannot be completed."""
        self._transport.abort()

    # The end.

    def _close(self, *, linger: bool) -> None:
        """Close the connection. ``linger``: the caller is still sending, and might lose the answer if it were closed at
        once."""
        if self._phase >= _CLOSING:
            return
        self._phase = _CLOSING
        self._unread = (self._loop.time(), self._transport.get_write_buffer_size())
        if not linger:
            self._transport.close()
            return
        if self._read_paused:
            self._read_paused = False
            self._transport.resume_reading()
        self._transport.write_eof()

    def close_if_idle(self) -> None:
        if self._upgraded is not None:
            self._upgraded.go_away()
        elif self._current is None:
            self._close(linger=False)

    def cancel(self) -> asyncio.Task[None] | None:
        """Abort the connection and cancel its handler. Return the handler's task."""
        self._transport.abort()
        if self._task is not None:
            self._task.cancel()
        return self._task

    def sweep(self, now: float) -> None:
        """Disconnect a caller that has kept the server waiting for too long."""
        limits = self._limits
        if self._read_paused and self.has_left():
            self._transport.abort()
        elif self._phase is _CLOSING:
            self._sweep_slow(now, limits.linger_s)
        elif not self.writable:
            self._sweep_slow(now, limits.stalled_s)
        elif self._upgraded is not None:
            if self._upgraded.is_gone(now):
                self._transport.abort()
        elif (incoming := self._reader.incoming) is not None:
            patience_s = limits.body_grace_s + incoming.size / limits.body_bytes_per_s
            if not self._read_paused and self._phase is _OPEN and now > self._reader.since + patience_s:
                self._fail(ApiError(408, "the request's body did not arrive in time", code="request_timeout"))
        elif self._current is not None:
            return
        elif self._reader.in_head:
            if now > self._reader.since + limits.header_s:
                self._fail(ApiError(408, "the request's header did not arrive in time", code="request_timeout"))
        elif now > self._idle_since + limits.keep_alive_s:
            self._close(linger=False)

    def has_left(self, *, aborted: bool = False) -> bool:
        """Return whether the caller has closed its side, or ``aborted``. The loop notices neither while paused."""
        sock, states = self._transport.get_extra_info("socket"), (_ABORTED,) if aborted else _LEFT
        return sock is not None and sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] in states

    def _sweep_slow(self, now: float, patience_s: float) -> None:
        """Disconnect a caller that has read nothing for ``patience_s``. Reading slowly is allowed."""
        since, left = self._unread
        if (size := self._transport.get_write_buffer_size()) < left:
            self._unread = (now, size)
        elif now > since + patience_s:
            self._transport.abort()


def _part(request: Request, data: bytes) -> bytes:
    """Return a part of a stream's body as bytes on the wire."""
    if request.chunked and data:
        return b"%x\r\n%b\r\n" % (len(data), data)
    return data if request.method != "HEAD" else b""


_BACKLOG = 4096
_JUST_ACCEPTED_S = 0.25


class HttpServer:
    """The HTTP server, to be created inside a running loop. Call ``listen``, then ``close``, which lets running
    requests finish, or ``cancel``."""

    def __init__(self, application: Application, limits: ServerLimits | None = None) -> None:
        self.application = application
        self.limits = limits or ServerLimits()
        self.budget = BodyBudget(self.limits.bodies_bytes)
        self.loop = asyncio.get_running_loop()
        self.connections: set[HttpConnection] = set()
        self.draining = False
        self._listener: asyncio.AbstractServer | None = None
        self._listening: socket.socket | None = None
        self._empty = asyncio.Event()
        self._sweeps: asyncio.TimerHandle | None = None

    async def listen(self, sock: socket.socket) -> None:
        self._listening = sock
        self._listener = await self.loop.create_server(lambda: HttpConnection(self), sock=sock, backlog=_BACKLOG)

    def add(self, connection: HttpConnection) -> None:
        self.connections.add(connection)
        if self._sweeps is None:
            self._sweeps = self.loop.call_later(until_beat(self.limits.sweep_s), self._sweep)

    def _sweep(self) -> None:
        """Check all connections; ten thousand idle ones take a millisecond."""
        now, self._sweeps = self.loop.time(), None
        for connection in list(self.connections):
            connection.sweep(now)
        if self.connections:
            self._sweeps = self.loop.call_later(until_beat(self.limits.sweep_s), self._sweep)

    def remove(self, connection: HttpConnection) -> None:
        self.connections.discard(connection)
        if self.draining and not self.connections:
            self._empty.set()

    async def close(self) -> None:
        """Stop listening, give just accepted connections a moment to send, and wait until all requests are answered.
        From now on every answer is the last of its connection."""
        # Accept the connections that the kernel has already accepted: closing the listener would reset them.
        waiting: list[socket.socket] = []
        with contextlib.suppress(OSError):
            while self._listening is not None:
                waiting.append(self._listening.accept()[0])
        if self._listener is not None:
            self._listener.close()
        self.draining = True
        for sock in waiting:
            await self.loop.connect_accepted_socket(lambda: HttpConnection(self), sock)
        await asyncio.sleep(_JUST_ACCEPTED_S)
        for connection in list(self.connections):
            connection.close_if_idle()
        if self.connections:
            await self._empty.wait()

    async def cancel(self) -> None:
        """Abort all connections and wait until their handlers have ended."""
        if self._listener is not None:
            self._listener.close()
        tasks = [task for connection in list(self.connections) if (task := connection.cancel()) is not None]
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._sweeps is not None:
            self._sweeps.cancel()
