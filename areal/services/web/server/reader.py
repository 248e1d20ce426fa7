"""Bytes in, requests out: one connection's parser, and what it refuses.

A request is handed on as soon as its head is complete; its body follows into it.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, NoReturn

import httptools

from areal.services.web.errors import ApiError
from areal.services.web.fields import Headers, add_field
from areal.services.web.server.request import Request

if TYPE_CHECKING:
    from areal.services.web.server.connection import HttpConnection


class RequestReader:
    """``incoming``: the request whose body is not complete. ``since`` (loop time): when its head began."""

    def __init__(self, connection: HttpConnection, most_fields: int, most_head_bytes: int) -> None:
        self._connection = connection
        self._most_fields = most_fields
        self._most_head_bytes = most_head_bytes
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpRequestParser(self)
        self._refusal: ApiError | None = None  # why a callback stopped the parser
        self._heads = 0
        self._head_bytes = 0
        self.in_head = False
        self.incoming: Request | None = None
        self.since = 0.0

    def feed(self, data: bytes) -> None:
        """Raises ApiError for what is not to be read on."""
        before = self._heads
        try:
            try:
                self._parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                self._parse_as_no_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserError as error:
            raise self._refusal or ApiError(400, f"this is no valid HTTP: {error}", code="invalid_http") from error
        if self.in_head and self._heads == before:
            self._head_bytes += len(data)
            if self._head_bytes > self._most_head_bytes:
                raise _head_too_large()

    def stop(self, refusal: ApiError) -> NoReturn:
        """End the parser's work from inside one of its callbacks."""
        self._refusal = refusal
        raise httptools.HttpParserError(refusal.message)

    def end(self) -> None:
        """Nothing more is fed. The parser holds us, and we are no rubbish for the collector to find."""
        del self._parser

    def _parse_as_no_upgrade(self, rest: bytes) -> None:
        """Nothing is upgraded here: a request that asks for it is parsed again without its wish, since the parser takes
        what follows its head for another protocol."""
        method = self._parser.get_method()
        if method == b"CONNECT":
            self.stop(ApiError(405, "this is no proxy: CONNECT is not allowed", code="method_not_allowed"))
        fields = [(name, value) for name, value in self._raw.items() if name not in (b"upgrade", b"connection")]
        lines = [b"%b: %b" % field for field in fields] + [b"Connection: close", b"", b""]
        self._parser = httptools.HttpRequestParser(self)
        self._parser.feed_data(b"\r\n".join([b"%b %b HTTP/1.1" % (method, self._target), *lines]) + rest)

    # What the parser finds.

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
        if name.lower() == b"host" and b"host" in self._raw:  # which of them another server went by, nobody knows
            self.stop(ApiError(400, "a request has one Host header", code="invalid_http"))
        add_field(self._raw, name, value)

    def on_headers_complete(self) -> None:
        self.in_head = False
        if not self._parser.should_upgrade():
            request = self._read_head()
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
            self.stop(ApiError(505, f"HTTP/{version} is not spoken here", code="http_version"))
        if b"host" not in raw and version == "1.1":
            self.stop(ApiError(400, "a request needs a Host header", code="invalid_http"))
        if not target.startswith(b"/"):
            target = _origin_form(target)
        method, path = parser.get_method().decode(), target.decode("utf-8", "backslashreplace")
        request = Request(self._connection, method, path, Headers(raw))
        request.is_http_1_0 = version == "1.0"
        request.keep_alive = not request.is_http_1_0 and parser.should_keep_alive()
        if (expected := raw.get(b"expect")) is not None:
            if expected.lower() != b"100-continue":
                self.stop(ApiError(417, "only 100-continue can be expected", code="expectation_failed"))
            request.expects_continue = not request.is_http_1_0
        return request


def _head_too_large() -> ApiError:
    return ApiError(431, "the request's header is too large", code="header_too_large")


def _origin_form(target: bytes) -> bytes:
    """The path of a target that names the whole URL, as callers of a proxy do."""
    try:
        parsed = httptools.parse_url(target)
    except httptools.HttpParserInvalidURLError:
        return target
    return (parsed.path or b"/") + (b"?" + parsed.query if parsed.query else b"")
