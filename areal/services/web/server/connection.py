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
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import httptools

from areal.services.web.error_forms import OPENAI
from areal.services.web.errors import ApiError
from areal.services.web.fields import Headers, add_field
from areal.services.web.ids import unique_id
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


@dataclass(frozen=True)
class ServerLimits:
    """Seconds and bytes that one connection may take.

    A body may take ``body_grace_s``, and longer as long as it has come at ``body_bytes_per_s``. ``buffered_bytes`` are
    taken of a body that nobody reads yet.
    """

    keep_alive_s: float = 120.0  # longer than POOL_IDLE_S of our clients
    header_s: float = 15.0
    header_bytes: int = 64 * 1024
    header_count: int = 128
    body_grace_s: float = 30.0
    body_bytes_per_s: float = 1024.0
    buffered_bytes: int = 256 * 1024
    pipelined: int = 64
    linger_s: float = 10.0  # for a caller to stop sending what is refused, and to take its last answer
    stalled_s: float = 900.0  # for a caller to take anything at all of an answer that waits
    sweep_s: float = 1.0


class HttpConnection(asyncio.Protocol):
    """``writable``: the caller keeps up."""

    def __init__(self, server: HttpServer) -> None:
        self._server = server
        self._limits = server.limits
        self._most_fields, self._most_head_bytes = server.limits.header_count, server.limits.header_bytes
        self._loop = server.loop
        self._parser = httptools.HttpRequestParser(self)
        self._refusal: ApiError | None = None  # why a callback stopped the parser
        self._in_head = False
        self._messages = 0
        self._head_bytes = 0
        self._since = self._loop.time()  # the head began, or the connection fell idle
        self._incoming: Request | None = None  # its body is not complete
        self._current: Request | None = None
        self._task: asyncio.Task[None] | None = None
        self._waiting: deque[Request | ApiError] = deque()
        self._held = False  # we do not read
        self._deaf = False  # what still comes is thrown away
        self._gone_at: float | None = None  # closed by us; then the caller has until then
        self._lost = False
        self._source: Flow | None = None
        self._drained: asyncio.Future[None] | None = None
        self._stalled: tuple[float, int] = (0.0, 0)
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
        before = self._messages
        try:
            try:
                self._parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                self._parse_as_no_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserError as error:
            self._fail(self._refusal or ApiError(400, f"this is no valid HTTP: {error}", code="invalid_http"))
            return
        if self._in_head and self._messages == before:
            self._head_bytes += len(data)
            if self._head_bytes > self._limits.header_bytes:
                self._fail(_head_too_large())

    def eof_received(self) -> None:
        """Whoever stops sending has left."""

    def connection_lost(self, error: Exception | None) -> None:
        self._lost = True
        self._server.forget(self)
        self._waiting.clear()
        del self._parser  # it holds us, and we are no rubbish for the collector to find
        if self._task is not None:
            self._task.cancel()
        self.resume_writing()

    def pause_writing(self) -> None:
        self.writable = False
        self._stalled = (self._loop.time(), self._transport.get_write_buffer_size())
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

    # What the parser finds.

    def on_message_begin(self) -> None:
        self._messages += 1
        self._in_head = True
        self._head_bytes = 0
        self._since = self._loop.time()
        self._target = b""
        self._raw: dict[bytes, bytes] = {}
        self._fields = 0
        if len(self._waiting) >= self._limits.pipelined:
            self._stop(ApiError(429, "too many requests at once on one connection", code="too_many_requests"))

    def on_url(self, part: bytes) -> None:
        self._target += part
        self._head_bytes += len(part)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._fields += 1
        self._head_bytes += len(name) + len(value)
        if self._fields > self._most_fields or self._head_bytes > self._most_head_bytes:
            self._stop(_head_too_large())
        add_field(self._raw, name, value)

    def on_headers_complete(self) -> None:
        self._in_head = False
        if self._parser.should_upgrade():
            return
        request = self._read_head()
        self._incoming = request
        if self._current is None:
            self._start(request)
        else:
            self._waiting.append(request)
            self._mind_reading()

    def on_body(self, data: bytes) -> None:
        request = self._incoming
        assert request is not None
        request.received(data)
        if request.backlog > self._limits.buffered_bytes:
            self._mind_reading()

    def on_message_complete(self) -> None:
        if self._incoming is not None:
            self._incoming.completed()
            self._incoming = None

    def _read_head(self) -> Request:
        raw, target, parser = self._raw, self._target, self._parser
        version = parser.get_http_version()
        if version not in ("1.1", "1.0"):
            self._stop(ApiError(505, f"HTTP/{version} is not spoken here", code="http_version"))
        if b"host" not in raw and version == "1.1":
            self._stop(ApiError(400, "a request needs a Host header", code="invalid_http"))
        if not target.startswith(b"/"):
            target = _origin_form(target)
        request = Request(self, parser.get_method().decode(), target.decode("utf-8", "backslashreplace"), Headers(raw))
        request.is_http_1_0 = version == "1.0"
        request.keep_alive = parser.should_keep_alive()
        if (expected := raw.get(b"expect")) is not None:
            if expected.lower() != b"100-continue":
                self._stop(ApiError(417, "only 100-continue can be expected", code="expectation_failed"))
            request.expects_continue = not request.is_http_1_0
        return request

    def _stop(self, refusal: ApiError) -> None:
        """End the parser's work from inside one of its callbacks."""
        self._refusal = refusal
        raise httptools.HttpParserError(refusal.message)

    def _parse_as_no_upgrade(self, rest: bytes) -> None:
        """Nothing is upgraded here: a request that asks for it is parsed again without its wish, since the parser takes
        what follows its head for another protocol."""
        method = self._parser.get_method()
        if method == b"CONNECT":
            self._stop(ApiError(405, "this is no proxy: CONNECT is not allowed", code="method_not_allowed"))
        fields = [(name, value) for name, value in self._raw.items() if name not in (b"upgrade", b"connection")]
        lines = [b"%b: %b" % field for field in fields] + [b"Connection: close", b"", b""]
        self._parser = httptools.HttpRequestParser(self)
        self._parser.feed_data(b"\r\n".join([b"%b %b HTTP/1.1" % (method, self._target), *lines]) + rest)

    def _fail(self, error: ApiError) -> None:
        """What comes is not to be read on: say so, once everything before it is answered."""
        self._deaf = True
        if self._incoming is not None:
            self._incoming.refuse(error)
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
        framing = self._framing(request, response, f"Content-Length: {len(response.body)}\r\n")
        head = encode_head(response.status, response.headers, framing)
        request.answered = True
        if not has_body(request.method, response.status):
            self._transport.write(head)
        elif len(response.body) < _TWO_WRITES:
            self._transport.write(head + response.body)
        else:
            self._transport.writelines((head, response.body))

    def begin_stream(self, request: Request, response: StreamResponse) -> None:
        self._check_begins(request)
        if request.is_http_1_0:
            request.keep_alive = False
        request.chunked = not request.is_http_1_0 and request.method != "HEAD"
        framing = self._framing(request, response, "" if request.is_http_1_0 else "Transfer-Encoding: chunked\r\n")
        head = encode_head(response.status, response.headers, framing)
        request.stream = response
        self._transport.write(head)

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
        if request.chunked and data:
            self._transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        elif request.method != "HEAD":
            self._transport.write(data)

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

    # One request after the other.

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
        self._since = self._loop.time()
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
        incoming = self._incoming
        hold = bool(self._waiting) or (incoming is not None and incoming.backlog > self._limits.buffered_bytes)
        if hold == self._held or self._lost or self._gone_at is not None:
            return
        self._held = hold
        if hold:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    # The end.

    def _close(self, *, linger: bool) -> None:
        """``linger``: the caller still sends, and would lose our answer if we hung up on it."""
        if self._gone_at is not None or self._lost:
            return
        self._deaf = True
        self._gone_at = self._loop.time() + self._limits.linger_s
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
        if self._gone_at is not None:
            if now > self._gone_at:
                self._transport.abort()
        elif not self.writable:
            self._sweep_stalled(now)
        elif self._incoming is not None:
            self._sweep_body(self._incoming, now)
        elif self._current is not None:
            return
        elif self._in_head:
            if now > self._since + limits.header_s:
                self._fail(ApiError(408, "the request's header did not come", code="request_timeout"))
        elif now > self._since + limits.keep_alive_s:
            self._close(linger=False)

    def _sweep_body(self, request: Request, now: float) -> None:
        if self._held or self._deaf:
            return
        if now > self._since + self._limits.body_grace_s + request.size / self._limits.body_bytes_per_s:
            self._fail(ApiError(408, "the request's body did not come", code="request_timeout"))

    def _sweep_stalled(self, now: float) -> None:
        since, left = self._stalled
        size = self._transport.get_write_buffer_size()
        if size < left:
            self._stalled = (now, size)
        elif now > since + self._limits.stalled_s:
            self._transport.abort()


def _head_too_large() -> ApiError:
    return ApiError(431, "the request's header is too large", code="header_too_large")


def _origin_form(target: bytes) -> bytes:
    """The path of a target that names the whole URL, as callers of a proxy do."""
    try:
        parsed = httptools.parse_url(target)
    except httptools.HttpParserInvalidURLError:
        return target
    return (parsed.path or b"/") + (b"?" + parsed.query if parsed.query else b"")
