"""One request: its head at once, its body when asked for, and never more of it in memory than was asked for."""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl

from areal.services.web.errors import ApiError
from areal.services.web.fields import Headers
from areal.services.web.headers import REQUEST_ID
from areal.services.web.ids import unique_id

if TYPE_CHECKING:
    from areal.services.web.server.connection import HttpConnection
    from areal.services.web.server.response import Response, StreamResponse

_GIVEN_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
_REQUEST_ID = REQUEST_ID.encode()


class Request:
    """``target`` and ``path`` are as they came, percent signs and all; ``match_info`` has the decoded parts that the
    route names."""

    __slots__ = (
        "_limit",
        "_parts",
        "_refusal",
        "_waiter",
        "answered",
        "by_admin",
        "chunked",
        "closes",
        "complete",
        "connection",
        "expects_continue",
        "headers",
        "id",
        "id_headers",
        "is_http_1_0",
        "keep_alive",
        "match_info",
        "method",
        "path",
        "query_string",
        "size",
        "stream",
        "target",
    )

    def __init__(self, connection: HttpConnection, method: str, target: str, headers: Headers) -> None:
        self.connection = connection
        self.method = method
        self.target = target
        self.path, _, self.query_string = target.partition("?")
        self.headers = headers
        self.match_info: dict[str, str] = {}
        given = headers.raw.get(_REQUEST_ID)
        self.id = given.decode() if given is not None and _GIVEN_ID.fullmatch(given) else unique_id("req_")
        self.id_headers: tuple[str, ...] = (REQUEST_ID,)
        self.by_admin = False  # the admin key was seen
        self.is_http_1_0 = False
        self.keep_alive = True
        self.expects_continue = False
        self.complete = False  # the whole body is here
        self.closes = False  # the answer's head said so
        self.chunked = False  # so is the answer
        self.answered = False  # its last byte is written
        self.stream: StreamResponse | None = None  # the answer, where it is a stream that began
        self._parts: list[bytes] = []
        self.size = 0  # of the body, as far as it has come
        self._limit: int | None = None  # of the body, once somebody reads it
        self._waiter: asyncio.Future[None] | None = None
        self._refusal: ApiError | None = None

    @property
    def query(self) -> dict[str, str]:
        """The query's fields; of those that come twice, the first."""
        return dict(reversed(parse_qsl(self.query_string, keep_blank_values=True)))

    @property
    def content_length(self) -> int | None:
        text = self.headers.raw.get(b"content-length")
        return None if text is None else int(text)

    async def read(self, limit: int) -> bytes:
        """The whole body, at most ``limit`` bytes. Raises 413 as soon as that is known to be passed, 408 when the rest
        does not come."""
        if (self.content_length or 0) > limit or self.size > limit:
            raise _too_large(limit)
        self._limit = limit
        if not self.complete:
            self.connection.want_body(self)
            await self._wait()
        if len(self._parts) != 1:
            self._parts = [b"".join(self._parts)]
        return self._parts[0]

    async def _wait(self) -> None:
        if self._refusal is None:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        if self._refusal is not None:
            raise self._refusal

    async def answer(self, response: Response) -> None:
        """Send ``response`` now; the handler may go on. Raises ConnectionResetError when the caller is gone."""
        self.connection.send(self, response)
        await self.connection.wait_writable()

    # What the connection tells.

    def received(self, data: bytes) -> None:
        self.size += len(data)
        if self._limit is not None and self.size > self._limit:
            self._parts.clear()
            self.refuse(_too_large(self._limit))
        elif self._refusal is None:
            self._parts.append(data)

    @property
    def backlog(self) -> int:
        """Bytes of the body that nobody has asked for."""
        return self.size if self._limit is None else 0

    def completed(self) -> None:
        self.complete = True
        self._wake()

    def refuse(self, error: ApiError) -> None:
        """Whoever reads the body, now or later, is told this."""
        self._refusal = error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"the request body is larger than {limit} bytes", code="body_too_large")
