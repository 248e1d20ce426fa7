"""JSON, and a parser of responses, by the standard library: for an installation without orjson and httptools.

The parser is as strict as httptools, and calls the same methods of its protocol.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from areal.files import parse_json as loads

__all__ = ["HttpParserError", "HttpResponseParser", "dumps", "loads"]
_MOST_LINE = 64 * 1024
_MOST_BYTES = 2**64
_NO_BODY = (204, 304)
_SWITCHED = 101


def dumps(value: Any, /) -> bytes:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


_PROTOCOL = b"HTTP/1."
_STATUS = re.compile(rb"HTTP/1\.([01]) ([1-9]\d\d)(?: [\t\x20-\x7e\x80-\xff]*)?")
_TOKEN = rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+"
_FIELD = re.compile(rb"(%b):[ \t]*([\t\x20-\x7e\x80-\xff]*)" % _TOKEN)
_LENGTH = re.compile(rb"(\d+)[ \t]*")
_CHUNK = re.compile(rb'([0-9A-Fa-f]+)(?:;%b(?:=(?:%b|"[\t\x20\x21\x23-\x7e\x80-\xff]*"))?)*' % (_TOKEN, _TOKEN))
_CHUNK_BEGIN = re.compile(rb"[0-9A-Fa-f]*(?:[;\r]|\Z)")


class HttpParserError(Exception):
    pass


class HttpResponseParser:
    """Calls the ``on_`` methods of ``protocol`` with the parts of a response (RFC 9112) as they arrive."""

    def __init__(self, protocol: Any) -> None:
        self._protocol = protocol
        self._data = b""
        self._at = 0  # what is before it has been read
        self._next: Callable[[], bool] = self._read_status
        self._status = self._minor = self._left = 0
        self._begin()

    def _begin(self) -> None:
        self._options: set[bytes] = set()  # of the header Connection
        self._length: int | None = None
        self._chunked: bool | None = None  # by the last transfer encoding

    def get_status_code(self) -> int:
        return self._status

    def should_keep_alive(self) -> bool:
        return b"close" not in self._options if self._minor else b"keep-alive" in self._options

    def feed_data(self, data: bytes) -> None:
        """Raise HttpParserError, and the errors of ``protocol``."""
        self._data = self._data[self._at :] + data
        self._at = 0
        while self._at < len(self._data) and self._next():
            pass

    # What may come next. Each returns False where the rest of it has not arrived.

    def _read_status(self) -> bool:
        if self._pass_empty_line():
            return True
        begin = self._data[self._at : self._at + len(_PROTOCOL)]
        if not _PROTOCOL.startswith(begin):
            raise HttpParserError(f"expected HTTP/1.0 or HTTP/1.1, not {bytes(begin)!r}")
        line = self._line("the status line")
        if line is None:
            return False
        if (found := _STATUS.fullmatch(line)) is None:
            raise HttpParserError(f"no status line: {line[:80]!r}")
        self._minor, self._status = int(found[1]), int(found[2])
        self._begin()
        self._next = self._read_header
        return True

    def _read_header(self) -> bool:
        line = self._line("a header")
        if line is None:
            return False
        if line:
            self._read_field(line)
            return True
        self._protocol.on_headers_complete()
        if self._status < 200 or self._status in _NO_BODY or (self._length == 0 and self._chunked is None):
            self._complete()
        elif self._chunked:
            self._next = self._read_chunk_size
        else:
            self._next = self._read_body if self._length is not None else self._read_until_close
        return True

    def _read_field(self, line: bytes) -> None:
        if (found := _FIELD.fullmatch(line)) is None:
            raise HttpParserError(f"no header: {line[:80]!r}")
        self._frame(found[1].lower(), found[2])
        self._protocol.on_header(found[1], found[2])

    def _frame(self, name: bytes, value: bytes) -> None:
        """Record what a header says about the connection or the length of the body."""
        if name in (b"connection", b"proxy-connection"):
            self._options.update(option.strip(b" \t").lower() for option in value.split(b","))
        elif name in (b"content-length", b"transfer-encoding"):
            if self._length is not None or (name == b"content-length" and self._chunked is not None):
                raise HttpParserError("more than one header says the length of the body")
            if name == b"transfer-encoding":
                if not value.strip():
                    raise HttpParserError("the transfer encoding is empty")
                self._chunked = value.rpartition(b",")[2].strip(b" \t").lower() == b"chunked"
                return
            if (found := _LENGTH.fullmatch(value)) is None or (length := int(found[1])) >= _MOST_BYTES:
                raise HttpParserError(f"the content length is {value[:80]!r}")
            self._length = length

    def _read_body(self) -> bool:
        assert self._length is not None
        self._length -= len(self._pass(self._length))
        if self._length:
            return False
        self._complete()
        return True

    def _read_until_close(self) -> bool:
        self._pass(len(self._data))
        return False

    def _read_chunk_size(self) -> bool:
        if _CHUNK_BEGIN.match(self._data, self._at) is None:
            raise HttpParserError(f"the size of a chunk is {self._data[self._at : self._at + 80]!r}")
        line = self._line("the size of a chunk")
        if line is None:
            return False
        found = _CHUNK.fullmatch(line)
        if found is None or (size := int(found[1], 16)) >= _MOST_BYTES:
            raise HttpParserError(f"the size of a chunk is {line[:80]!r}")
        self._left = size
        self._protocol.on_chunk_header()
        self._next = self._read_chunk if size else self._read_trailer
        return True

    def _read_chunk(self) -> bool:
        if self._left:
            self._left -= len(self._pass(self._left))
            return not self._left
        end = self._data[self._at : self._at + 2]
        if not b"\r\n".startswith(end):
            raise HttpParserError(f"a chunk has more data than its size: {end!r}")
        if len(end) < 2:
            return False
        self._at += 2
        self._protocol.on_chunk_complete()
        self._next = self._read_chunk_size
        return True

    def _read_trailer(self) -> bool:
        line = self._line("a trailer")
        if line is None:
            return False
        if line:
            self._read_field(line)
            return True
        self._protocol.on_chunk_complete()
        self._complete()
        return True

    def _pass_empty_line(self) -> bool:
        """Return whether the next byte was part of one, of which there may be some between responses."""
        self._at += (found := self._data[self._at] in b"\r\n")
        return found

    def _refuse(self) -> bool:
        if self._pass_empty_line():
            return True
        raise HttpParserError("data after the last response of the connection")

    def _complete(self) -> None:
        self._protocol.on_message_complete()
        if self._status == _SWITCHED:
            raise HttpParserError("the server switched the protocol")
        self._next = self._read_status if self.should_keep_alive() else self._refuse

    def _line(self, what: str) -> bytes | None:
        """Return the next line without its end; None if it is incomplete."""
        end = self._data.find(b"\n", self._at)
        if (end if end >= 0 else len(self._data)) - self._at > _MOST_LINE:
            raise HttpParserError(f"{what} has more than {_MOST_LINE} bytes")
        line_end = self._data.find(b"\r", self._at, end if end >= 0 else len(self._data) - 1)
        if line_end != end - 1 and (end >= 0 or line_end >= 0):
            raise HttpParserError(f"{what} does not end by CR LF: {self._data[self._at :][:80]!r}")
        if end < 0:
            return None
        line, self._at = self._data[self._at : end - 1], end + 1
        return line

    def _pass(self, most: int) -> bytes:
        """Pass up to ``most`` bytes of the body on."""
        part = self._data[self._at : self._at + most]
        self._at += len(part)
        self._protocol.on_body(part)
        return part
