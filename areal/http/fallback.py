"""JSON, and a parser of responses, by the standard library: for an installation without orjson and httptools. It parses
whole responses, so the parts of a stream come together, at its end."""

from __future__ import annotations

import io
import json
import re
from http.client import HTTPException, HTTPResponse, IncompleteRead
from typing import Any

from areal.files import parse_json as loads

__all__ = ["HttpParserError", "HttpResponseParser", "dumps", "loads"]


def dumps(value: Any, /) -> bytes:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


_INTERIM = re.compile(rb"HTTP/1\.[01] 1\d\d\b.*?\r\n\r\n", re.DOTALL)


class HttpParserError(Exception):
    pass


class HttpResponseParser:
    """Calls the ``on_`` methods of ``protocol``."""

    def __init__(self, protocol: Any) -> None:
        self._protocol = protocol
        self._data = b""
        self._response: Any = None
        self._until_close = False

    def makefile(self, mode: str) -> io.BytesIO:
        """What HTTPResponse asks of a socket."""
        return io.BytesIO(self._data)

    def get_status_code(self) -> int:
        return int(self._response.status)

    def should_keep_alive(self) -> bool:
        return not self._response.will_close

    def feed_data(self, data: bytes) -> None:
        """Raises HttpParserError, and the errors of ``protocol``."""
        if self._until_close:
            self._protocol.on_body(data)
            return
        self._data += data
        while interim := _INTERIM.match(self._data):
            self._data = self._data[interim.end() :]
        if b"\r\n\r\n" not in self._data:
            return
        response = self._response = HTTPResponse(self)  # type: ignore[arg-type]
        try:
            response.begin()
            self._until_close = response.length is None and not response.chunked
            body = response.read()
            if response.chunked and not self._data.endswith(b"\r\n\r\n"):  # an end is taken for that of the trailer
                return
        except IncompleteRead:
            return
        except (HTTPException, ValueError) as error:
            raise HttpParserError(f"not HTTP/1.1: {error!r}") from error
        for name, value in response.getheaders():
            self._protocol.on_header(name.encode("latin-1"), value.encode("latin-1"))
        self._protocol.on_headers_complete()
        if body:
            self._protocol.on_body(body)
        if not self._until_close:
            self._protocol.on_message_complete()
