"""A parser of HTTP/1.1 responses, with the callbacks of ``httptools.HttpResponseParser``, where that is not installed.

https://www.rfc-editor.org/rfc/rfc9112
"""

from __future__ import annotations

import re
import sys
from collections.abc import Generator
from typing import Any

_STATUS = re.compile(rb"HTTP/1\.([01]) ([1-9]\d\d)(?: .*)?")
_FIELD = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*(.*?)[ \t]*")
_SIZE = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(?:;.*)?")
_MOST_HEAD_BYTES = 128 * 1024
_NO_BODY = (204, 304)


class HttpParserError(Exception):
    pass


class HttpResponseParser:
    """Calls the ``on_`` methods of ``protocol``."""

    def __init__(self, protocol: Any) -> None:
        self._protocol = protocol
        self._data = b""
        self._status = 0
        self._keep_alive = False
        self._parsing = self._responses()
        next(self._parsing)

    def get_status_code(self) -> int:
        return self._status

    def should_keep_alive(self) -> bool:
        return self._keep_alive

    def feed_data(self, data: bytes) -> None:
        """Raises HttpParserError, and the errors of ``protocol``."""
        self._data += data
        next(self._parsing)

    def _responses(self) -> Generator[None]:
        protocol = self._protocol
        while True:
            line, *lines = (yield from self._until(b"\r\n\r\n")).split(b"\r\n")
            status = _STATUS.fullmatch(line)
            fields = [field for each in lines if (field := _FIELD.fullmatch(each))]
            if status is None or len(fields) < len(lines):
                raise HttpParserError("the head is not of HTTP/1.1")
            self._status = int(status[2])
            values: dict[bytes, bytes] = {}
            for field in fields:
                values[field[1].lower()] = field[2].lower()
                protocol.on_header(field[1], field[2])
            protocol.on_headers_complete()
            length = values.get(b"content-length")
            self._keep_alive = status[1] == b"1" and values.get(b"connection") != b"close"
            if b"transfer-encoding" in values:
                yield from self._chunks()
            elif self._status >= 200 and self._status not in _NO_BODY:
                if length is not None and not length.isdigit():
                    raise HttpParserError("Content-Length is not a number")
                yield from self._body(sys.maxsize if length is None else int(length))  # to the connection's end
            protocol.on_message_complete()

    def _chunks(self) -> Generator[None]:
        while True:
            if (size := _SIZE.fullmatch((yield from self._until(b"\r\n")))) is None:
                raise HttpParserError("a chunk has no size")
            self._protocol.on_chunk_header()
            if not int(size[1], 16):
                break
            yield from self._body(int(size[1], 16))
            if (yield from self._until(b"\r\n")):
                raise HttpParserError("a chunk is longer than its size")
            self._protocol.on_chunk_complete()
        while (yield from self._until(b"\r\n")):
            pass  # fields of the trailer, which no caller reads
        self._protocol.on_chunk_complete()

    def _body(self, size: int) -> Generator[None]:
        while size:
            if part := self._data[:size]:
                self._data = self._data[size:]
                size -= len(part)
                self._protocol.on_body(part)
            else:
                yield

    def _until(self, end: bytes) -> Generator[None, None, bytes]:
        while end not in self._data:
            if len(self._data) > _MOST_HEAD_BYTES:
                raise HttpParserError(f"a head or line of more than {_MOST_HEAD_BYTES} bytes")
            yield
        found, _, self._data = self._data.partition(end)
        return found
