"""Answers: whole ones and streams, and how each is written.

A whole answer is one write. A stream is chunked, or for an HTTP/1.0 caller ended by the connection. The server adds
the framing, the date and the request's id; the headers given here are what the handler has to say.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from email.utils import formatdate
from http import HTTPStatus
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from areal.services.web.server.request import Request

_STATUS_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n" for status in HTTPStatus}
_WITHOUT_BODY = frozenset({204, 304})


class Flow(Protocol):
    """Where a stream's bytes come from, held back while the caller does not take them."""

    def pause(self) -> None: ...

    def resume(self) -> None: ...


class Response:
    """A whole answer. ``headers`` may be added to until it is sent."""

    __slots__ = ("body", "headers", "status")

    def __init__(
        self,
        status: int = 200,
        body: bytes = b"",
        *,
        content_type: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.status = status
        self.body = body
        self.headers: dict[str, str] = {} if content_type is None else {"Content-Type": content_type}
        if headers:
            self.headers |= headers


class StreamResponse:
    """An answer that is written bit by bit: ``prepare`` sends its head, returning it from the handler ends it.

    ``write`` waits while the caller lags behind. ``feed`` never waits: whoever feeds obeys ``hold_back``.
    Both raise ConnectionResetError once the caller is gone.
    """

    __slots__ = ("_request", "headers", "status")

    def __init__(self, status: int = 200, *, headers: Mapping[str, str] | None = None) -> None:
        self.status = status
        self.headers: dict[str, str] = dict(headers) if headers else {}
        self._request: Request | None = None

    @property
    def prepared(self) -> bool:
        return self._request is not None

    @property
    def is_events(self) -> bool:
        return self.headers.get("Content-Type", "").startswith("text/event-stream")

    async def prepare(self, request: Request) -> None:
        """Send the head. Raises ConnectionResetError when the caller is gone."""
        self.begin(request)

    def begin(self, request: Request, first: bytes = b"") -> None:
        """Send the head, and ``first`` with it. Raises as ``prepare`` does."""
        assert self._request is None, "a stream begins once"
        request.connection.begin_stream(request, self, first)
        self._request = request

    async def write(self, data: bytes) -> None:
        connection = self._begun().connection
        connection.write_part(self._begun(), data)
        if not connection.writable:
            await connection.wait_writable()

    def feed(self, data: bytes) -> None:
        request = self._request or self._begun()
        request.connection.write_part(request, data)

    def framed_feed(self) -> Callable[[bytes], None] | None:
        """``feed`` for bytes that are one whole chunk already, with its size. None where the answer has no chunks."""
        request = self._begun()
        return request.connection.write_framed if request.chunked else None

    def hold_back(self, source: Flow | None) -> None:
        """Pause and resume ``source`` as the caller takes the stream, from now on. None: nobody any more."""
        self._begun().connection.set_source(source)

    def _begun(self) -> Request:
        assert self._request is not None, "a stream is prepared before it is written"
        return self._request


AnyResponse = Response | StreamResponse


class _Clock:
    """The Date header, made once a second."""

    def __init__(self) -> None:
        self._second = -1
        self._line = ""

    def line(self) -> str:
        now = int(time.time())
        if now != self._second:
            self._second = now
            self._line = f"Date: {formatdate(now, usegmt=True)}\r\n"
        return self._line


_clock = _Clock()


def encode_head(status: int, headers: Mapping[str, str], framing: str) -> bytes:
    """The head of an answer; ``framing`` is the server's own lines. Raises ValueError for a header with a line break,
    which would be another header, or another answer."""
    lines = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
    if lines.count("\n") != len(headers) or lines.count("\r") != len(headers):
        raise ValueError("a header has a line break")
    first = _STATUS_LINES.get(status) or f"HTTP/1.1 {status} \r\n"
    return f"{first}{lines}{_clock.line()}{framing}\r\n".encode("utf-8", "surrogateescape")


def has_body(method: str, status: int) -> bool:
    return method != "HEAD" and status not in _WITHOUT_BODY


def id_lines(names: Iterable[str], headers: Mapping[str, str], request_id: str) -> str:
    """The request's id under each name that the handler did not set itself."""
    return "".join([f"{name}: {request_id}\r\n" for name in names if name not in headers])
