"""The parser of an installation without httptools finds the same responses and faults, wherever their bytes are cut."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any

import httptools
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal.http import fallback


class Heard:
    """What a client goes by. ``parser``: its parser."""

    parser: Any

    def __init__(self) -> None:
        self.heard: list[Any] = []
        self._body = b""

    def on_header(self, name: bytes, value: bytes) -> None:
        self.heard.append((name, value))

    def on_headers_complete(self) -> None:
        self.heard.append(self.parser.get_status_code())

    def on_chunk_header(self) -> None: ...

    def on_chunk_complete(self) -> None: ...

    def on_body(self, data: bytes) -> None:
        assert data  # for a client an empty part is the end of the body
        self._body += data

    def on_message_complete(self) -> None:
        self.heard.append((self._body, self.parser.should_keep_alive()))
        self._body = b""

    @property
    def whole(self) -> list[Any]:
        return [*self.heard, self._body]


def read(kind: Any, parts: list[bytes]) -> list[Any]:
    listener = Heard()
    listener.parser = kind(listener)
    for part in parts:
        listener.parser.feed_data(part)
    return listener.whole


def heard(kind: Any, parts: list[bytes]) -> list[Any] | str:
    try:
        return read(kind, parts)
    except (httptools.HttpParserError, fallback.HttpParserError):
        return "refused"


def chunked(body: bytes, size: int) -> bytes:
    parts = [body[at : at + size] for at in range(0, len(body), size)]
    return b"".join(b"%x;a=b\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


@st.composite
def answers(draw: st.DrawFn) -> bytes:
    status = draw(st.sampled_from([b"200 OK", b"404 Not Found", b"500 ", b"204 No Content"]))
    fields = draw(st.lists(st.sampled_from([b"X-A: b", b"Content-Type:application/json", b"Connection: close"])))
    body = draw(st.binary(max_size=60))
    match draw(st.sampled_from(["length", "chunked", "until close"])):
        case _ if status.startswith(b"204"):
            body = b""
        case "length":
            fields.append(b"Content-Length: %d" % len(body))
        case "chunked":
            fields.append(b"Transfer-Encoding: chunked")
            body = chunked(body, draw(st.integers(1, 70)))
    return b"\r\n".join([b"HTTP/1.1 " + status, *dict.fromkeys(fields), b"", b""]) + body


def cut(answer: bytes, places: list[int]) -> list[bytes]:
    ends = sorted({0, *(min(place, len(answer)) for place in places), len(answer)})
    return [answer[a:b] for a, b in pairwise(ends)]


cuts = st.lists(st.integers(0, 400), max_size=6)


@given(st.lists(answers(), min_size=1, max_size=2), cuts)
def test_response_cut_anywhere_parses_like_httptools(given_answers: list[bytes], places: list[int]) -> None:
    interim = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\nHTTP/1.1 102\r\n\r\n"
    parts = cut(interim + b"\r\n".join(given_answers), places)
    assert heard(fallback.HttpResponseParser, parts) == heard(httptools.HttpResponseParser, parts)


WRONG = (
    *(
        b"\r",
        b"\n",
        b" ",
        b":",
        b";",
        b",",
        b"-",
        b"+",
        b"0",
        b"9",
        b"f",
        b"z",
        b"\t",
        b"\0",
        b"\x7f",
        b"\xff",
        b"\r\n",
    ),
    *(b"Content-Length: 3\r\n", b"Transfer-Encoding: chunked\r\n", b"Connection: close\r\n", b"0\r\n"),
)
edits = st.lists(st.tuples(st.integers(0, 200), st.integers(0, 2), st.sampled_from(WRONG)), min_size=1, max_size=3)


@given(answers(), edits, cuts)
def test_damaged_response_is_refused_like_httptools(
    answer: bytes, changes: list[tuple[int, int, bytes]], places: list[int]
) -> None:
    status, head, rest = answer.partition(b"\r\n")
    for place, size, text in changes:
        rest = rest[: place % (len(rest) + 1)] + text + rest[place % (len(rest) + 1) + size :]
    # httptools judges each byte, this parser each line: the end shows where one is wrong
    parts = [*cut(status + head + rest, places), b"\r\n\r\n\r\n"]
    assert heard(fallback.HttpResponseParser, parts) == heard(httptools.HttpResponseParser, parts)


OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("response", "why"),
    [
        (b"SSH-2.0-OpenSSH_9.2\r\n", "expected HTTP/1.0 or HTTP/1.1, not b'SSH-2.0'"),
        (b"\x15\x03\x01", "expected HTTP/1.0 or HTTP/1.1"),
        (b"HTTP/1.1 two hundred\r\n", "no status line: b'HTTP/1.1 two hundred'"),
        (b"HTTP/1.1 200 OK\n", "the status line does not end by CR LF"),
        (OK + b"Content-Length: 2\n", "a header does not end by CR LF: b'Content-Length: 2"),
        (OK + b"Content-Length: -2\r\n", "the content length is b'-2'"),
        (OK + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n", "more than one header says the length"),
        (OK + b"no colon\r\n", "no header: b'no colon'"),
        (OK + b"X: " + b"y" * 65_536, "a header has more than 65536 bytes"),
        (CHUNKED + b"zz", "the size of a chunk is b'zz'"),
        (CHUNKED + b"-2\r\n", "the size of a chunk is b'-2"),
        (CHUNKED + b"fffffffffffffffff\r\n", "the size of a chunk is b'fffffffffffffffff'"),
        (CHUNKED + b"2\r\nabc", "a chunk has more data than its size"),
        (b"HTTP/1.1 101 Switching Protocols\r\n\r\n", "the server switched the protocol"),
        (OK + b"Connection: close\r\nContent-Length: 0\r\n\r\nHTTP", "data after the last response"),
    ],
)
def test_non_http_response_is_refused_at_once(response: bytes, why: str) -> None:
    with pytest.raises(fallback.HttpParserError, match=re.escape(why)):
        read(fallback.HttpResponseParser, [response])


def test_stream_parts_pass_at_once_after_any_headers() -> None:
    listener = Heard()
    listener.parser = fallback.HttpResponseParser(listener)
    listener.parser.feed_data(OK + b"".join(b"X-%d: y\r\n" % number for number in range(300)))
    listener.parser.feed_data(b"Transfer-Encoding: chunked\r\n\r\n3\r\none\r\n3\r\ntw")
    assert len(listener.heard) == 302 and listener.whole[-1] == b"onetw"
