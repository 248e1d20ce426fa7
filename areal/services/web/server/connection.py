"""One caller's connection: requests are parsed as they come, and answered one at a time in their order.

The handler starts when a request's head is there, in a task of its own; usually its body has come with it. While one
is answered, later ones wait parsed, and no more is read. A caller that leaves cancels its handler. A caller that lags
behind holds its stream back, and one that says nothing, or next to nothing, is told so and let go: ``sweep``.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import deque
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, cast

from areal.services.web.error_forms import OPENAI
from areal.services.web.errors import ApiError
from areal.services.web.ids import unique_id
from areal.services.web.server.reader import RequestReader
from areal.services.web.server.request import Request
from areal.services.web.server.response import (
    AnyResponse,
    Flow,
    Response,
    StreamResponse,
    encode_head,
    has_body,
    id_lines,
)

if TYPE_CHECKING:
    from areal.services.web.server.listener import HttpServer

Application = Callable[[Request], Awaitable[AnyResponse]]
"""Answers a request. Raises nothing but CancelledError and ConnectionResetError."""

_log = logging.getLogger(__name__)
_CLOSE = "Connection: close\r\n"
_TWO_WRITES = 64 * 1024  # from here on a body is not copied behind its head


class HttpConnection(asyncio.Protocol):
    """``writable``: the caller keeps up."""

    def __init__(self, server: HttpServer) -> None:
        self._server = server
        self._limits = server.limits
        self._loop = server.loop
        self._reader = RequestReader(self, server.limits.header_count, server.limits.header_bytes)
        self._idle_since = self._loop.time()
        self._current: Request | None = None
        self._task: asyncio.Task[None] | None = None
        self._waiting: deque[Request | ApiError] = deque()
        self._held = False  # we do not read
        self._deaf = False  # what still comes is thrown away
        self._closing = False  # nothing more is said
        self._lost = False
        self._source: Flow | None = None
        self._drained: asyncio.Future[None] | None = None
        self._lagging: tuple[float, int] = (0.0, 0)  # since when so many bytes wait for the caller
        self.last_part = b""  # of a stream, as it was written last
        self.writable = True

    # What the loop tells.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are none by their class
        self._server.connections.add(self)
        sock = transport.get_extra_info("socket")
        if sock is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    def data_received(self, data: bytes) -> None:
        if self._deaf:
            return
        try:
            self._reader.feed(data)
        except ApiError as error:
            self._fail(error)
        if self._waiting or self._reader.incoming is not None:
            self._mind_reading()

    def eof_received(self) -> None:
        """Whoever stops sending has left."""

    def connection_lost(self, error: Exception | None) -> None:
        self._lost = True
        self._server.forget(self)
        self._waiting.clear()
        self._reader.end()
        if self._task is not None:
            self._task.cancel()
        self.resume_writing()

    def pause_writing(self) -> None:
        self.writable = False
        self._lagging = (self._loop.time(), self._transport.get_write_buffer_size())
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

    # One request after the other.

    def begun(self, request: Request) -> None:
        """The head of one more request is there."""
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
        except Exception:  # noqa: BLE001 - the process boundary: an answer that cannot be written is a lost one
            _log.exception("%s %s could not be answered [%s]", request.method, request.path, request.id)
            self.abort()

    def _finish(self, request: Request, response: AnyResponse) -> None:
        """End the answer, and go on with what comes after it."""
        if isinstance(response, Response):
            if not request.answered:
                self.send(request, response)
        else:
            if not response.prepared:
                response.begin(request)
            if request.chunked and not self._transport.is_closing():
                self._transport.write(b"0\r\n\r\n")
        self._current = self._task = self._source = None
        self._idle_since = self._loop.time()
        if request.closes or self._server.draining:
            self._close(linger=not request.complete)
        elif self._waiting:
            self._start_next()

    def _start_next(self) -> None:
        if not self.writable or self._lost:
            return
        following = self._waiting.popleft()
        if isinstance(following, ApiError):
            self._say(following)
        else:
            self._start(following)
            self._mind_reading()

    def _say(self, error: ApiError) -> None:
        """The last answer of a connection that cannot be understood any more."""
        response = OPENAI.response(error, unique_id("req_"))
        head = encode_head(response.status, response.headers, f"Content-Length: {len(response.body)}\r\n{_CLOSE}")
        self._transport.write(head + response.body)
        self._close(linger=True)

    def _mind_reading(self) -> None:
        """Read on only while there is room for what comes."""
        incoming = self._reader.incoming
        hold = bool(self._waiting) or (incoming is not None and incoming.backlog > self._limits.buffered_bytes)
        if hold == self._held or self._lost or self._closing:
            return
        self._held = hold
        if hold:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    def _fail(self, error: ApiError) -> None:
        """What comes is not to be read on: say so, once everything before it is answered."""
        self._deaf = True
        if self._reader.incoming is not None:
            self._reader.incoming.refuse(error)
        elif self._current is not None:
            self._waiting.append(error)
        else:
            self._say(error)

    # What the handlers do.

    def want_body(self, request: Request) -> None:
        """Somebody waits for the rest of the body."""
        if request.expects_continue:
            request.expects_continue = False
            if request.size == 0:
                self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self._mind_reading()

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

    def begin_stream(self, request: Request, response: StreamResponse, first: bytes = b"") -> None:
        """``first``: what can be said at once, in one write with the head."""
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
        ids = id_lines(request.id_headers, response.headers, request.id)
        return f"{ids}{length}{_CLOSE}" if request.closes else ids + length

    def write_part(self, request: Request, data: bytes) -> None:
        if self._lost or self._transport.is_closing():
            raise ConnectionResetError("the caller is gone")
        self.last_part = data
        self._transport.write(_part(request, data))

    def write_framed(self, chunk: bytes) -> None:
        """``write_part`` of what is a chunk already."""
        if self._lost:
            raise ConnectionResetError("the caller is gone")
        self.last_part = chunk
        self._transport.write(chunk)

    async def wait_writable(self) -> None:
        """Return once the caller has caught up. Raises ConnectionResetError when it is gone."""
        self._check_not_lost()
        if self.writable:
            return
        self._drained = self._loop.create_future()
        try:
            await self._drained
        finally:
            self._drained = None
        self._check_not_lost()

    def set_source(self, source: Flow | None) -> None:
        self._source = source
        if source is not None and not self.writable:
            source.pause()

    def _check_not_lost(self) -> None:
        if self._lost or self._transport.is_closing():
            raise ConnectionResetError("the caller is gone")

    def abort(self) -> None:
        """Break the connection: what was being answered cannot be ended well."""
        self._transport.abort()

    # The end.

    def _close(self, *, linger: bool) -> None:
        """``linger``: the caller still sends, and would lose our answer if we hung up on it."""
        if self._closing or self._lost:
            return
        self._deaf = self._closing = True
        self._lagging = (self._loop.time(), self._transport.get_write_buffer_size())
        if not linger:
            self._transport.close()
            return
        if self._held:
            self._transport.resume_reading()
        self._transport.write_eof()

    def close_if_idle(self) -> None:
        if self._current is None:
            self._close(linger=False)

    def cancel(self) -> asyncio.Task[None] | None:
        """Break off what is under way: the handler's task, which ends now."""
        self._transport.abort()
        if self._task is not None:
            self._task.cancel()
        return self._task

    def sweep(self, now: float) -> None:
        """Let go of a caller that keeps us waiting."""
        limits = self._limits
        if self._closing:
            self._sweep_lagging(now, limits.linger_s)
        elif not self.writable:
            self._sweep_lagging(now, limits.stalled_s)
        elif self._reader.incoming is not None:
            self._sweep_body(self._reader.incoming, now)
        elif self._current is not None:
            return
        elif self._reader.in_head:
            if now > self._reader.since + limits.header_s:
                self._fail(ApiError(408, "the request's header did not come", code="request_timeout"))
        elif now > self._idle_since + limits.keep_alive_s:
            self._close(linger=False)

    def _sweep_body(self, request: Request, now: float) -> None:
        if self._held or self._deaf:
            return
        if now > self._reader.since + self._limits.body_grace_s + request.size / self._limits.body_bytes_per_s:
            self._fail(ApiError(408, "the request's body did not come", code="request_timeout"))

    def _sweep_lagging(self, now: float, patience_s: float) -> None:
        """Whoever takes some of its answer may go on, however slowly."""
        since, left = self._lagging
        size = self._transport.get_write_buffer_size()
        if size < left:
            self._lagging = (now, size)
        elif now > since + patience_s:
            self._transport.abort()


def _part(request: Request, data: bytes) -> bytes:
    """How a part of a stream's body is written."""
    if request.chunked and data:
        return b"%x\r\n%b\r\n" % (len(data), data)
    return data if request.method != "HEAD" else b""
