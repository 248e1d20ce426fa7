"""The parser of an installation without httptools finds the same responses, wherever their bytes are cut."""

from __future__ import annotations

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


def heard(kind: Any, parts: list[bytes]) -> list[Any]:
    listener = Heard()
    listener.parser = kind(listener)
    for part in parts:
        listener.parser.feed_data(part)
    return listener.whole


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


@given(answers(), st.lists(st.integers(0, 400), max_size=6))
def test_response_cut_anywhere_is_read_as_by_httptools(answer: bytes, cuts: list[int]) -> None:
    places = sorted({0, *(min(cut, len(answer)) for cut in cuts), len(answer)})
    parts = [answer[a:b] for a, b in pairwise(places)]
    assert heard(fallback.HttpResponseParser, parts) == heard(httptools.HttpResponseParser, parts)


@given(st.lists(st.integers(0, 150), max_size=4))
def test_interim_responses_cut_anywhere_are_passed_over(cuts: list[int]) -> None:
    final = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
    answer = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\nHTTP/1.1 102\r\n\r\n" + final
    places = sorted({0, *(min(cut, len(answer)) for cut in cuts), len(answer)})
    parts = [answer[a:b] for a, b in pairwise(places)]
    assert heard(fallback.HttpResponseParser, parts) == heard(httptools.HttpResponseParser, [final])


@pytest.mark.parametrize("response", [b"SSH-2.0-OpenSSH_9.2\r\n\r\n", b"HTTP/1.1 two hundred\r\n\r\n"])
def test_response_that_is_not_http_is_refused(response: bytes) -> None:
    with pytest.raises(fallback.HttpParserError):
        heard(fallback.HttpResponseParser, [response])
