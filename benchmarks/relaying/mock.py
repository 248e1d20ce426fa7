"""A worker and an engine that cost next to nothing: canned answers from a bare asyncio protocol.

    python benchmarks/relaying/mock.py [HOSTS]

Prints its port, which is the same on each of as many loopback addresses. ``POST /v1/chat/completions`` answers 12 KB
of JSON, or with ``"stream":true`` 64 server-sent events; ``POST /generate`` is the embedded engine's: 64 tokens, the
first in a line of its own and then those of 50 ms a line, sent for all calls at once, or without ``"stream":true`` the
whole answer once they all are sampled. ``POST /pace`` sets the seconds between two events or tokens
(``{"gap_s": 0.01}``); with ``"line_s": 0`` each token has a line, as from a vLLM before 0.32. Anything else is 200, as
for a probe.
"""

from __future__ import annotations

import asyncio
import functools
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

CHUNKS = 64


def _response(body: bytes, kind: bytes = b"application/json") -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Type: %b\r\nContent-Length: %d\r\n\r\n%b" % (kind, len(body), body)


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _answer() -> bytes:
    message = {"role": "assistant", "content": "word " * 2380}
    choices = [{"index": 0, "message": message, "finish_reason": "stop"}]
    return json.dumps({"id": "chatcmpl-1", "object": "chat.completion", "model": "mock", "choices": choices}).encode()


def event(text: str, finish: str | None) -> bytes:
    choices = [{"index": 0, "delta": {"content": text}, "finish_reason": finish}]
    body = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "mock", "choices": choices}
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def _sampled(tokens: int, last: bool) -> dict[str, object]:
    return {
        "index": 0,
        "token_ids": [260 + number for number in range(tokens)],
        "logprobs": [-0.25] * tokens,
        "versions": [3] * tokens,
        "top_logprobs": None,
        "finish_reason": "length" if last else None,
        "stop_token_id": None,
    }


@functools.cache
def lines(each: int) -> list[bytes]:
    """An answer in lines: one token, and then ``each``."""
    counts = [1, *(min(each, CHUNKS - first) for first in range(1, CHUNKS, each))]
    last = len(counts) - 1
    found = [_chunk(json.dumps(_sampled(count, n == last)).encode() + b"\n") for n, count in enumerate(counts)]
    return [*found[:-1], found[-1] + b"0\r\n\r\n"]


PLAIN = _response(_answer())
OK = _response(json.dumps({"status": "ready", "component": "mock", "in_flight": 0, "version": 3}).encode())
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: %b\r\nTransfer-Encoding: chunked\r\n\r\n"
EVENTS = [_chunk(event("word ", "stop" if n == CHUNKS - 1 else None)) for n in range(CHUNKS)]
EVENTS.append(_chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
WHOLE = _response(json.dumps({"choices": [_sampled(CHUNKS, True)], "prompt_tokens": 100}).encode())


@dataclass
class Pace:
    """Seconds between two tokens or events, and between two lines of the embedded engine (its ``FLUSH_S``)."""

    gap_s: float = 0.0
    line_s: float = 0.05

    @property
    def tokens_a_line(self) -> int:
        return max(1, min(CHUNKS, int(self.line_s / self.gap_s) if self.gap_s else CHUNKS))


class Mock(asyncio.Protocol):
    """One connection; requests have a Content-Length, as those of every relay here do."""

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self._buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are none by their class

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while (end := self._buffer.find(b"\r\n\r\n")) >= 0:
            head = self._buffer[:end].lower()
            at = head.find(b"\r\ncontent-length:")
            length = int(head[at + 17 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
            if len(self._buffer) < end + 4 + length:
                return
            body = self._buffer[end + 4 : end + 4 + length]
            self._buffer = self._buffer[end + 4 + length :]
            words = head.split(b" ", 2)
            if len(words) < 3:  # some ask by HTTP/2 first whether it is spoken here
                self._transport.close()
                return
            self._answer(words[1], body)

    def _answer(self, path: bytes, body: bytes) -> None:
        if path.endswith(b"/chat/completions"):
            if b'"stream":true' in body:
                self._start(b"text/event-stream", EVENTS, self._pace.gap_s)
            else:
                self._transport.write(PLAIN)
        elif path == b"/generate":
            if b'"stream":true' in body:
                each = self._pace.tokens_a_line
                self._start(b"application/x-ndjson", lines(each), self._pace.gap_s * each, together=True)
            else:
                asyncio.get_running_loop().call_later(self._pace.gap_s * CHUNKS, self._transport.write, WHOLE)
        else:
            if path == b"/pace":
                wanted = json.loads(body)
                self._pace.gap_s, self._pace.line_s = wanted["gap_s"], wanted.get("line_s", Pace.line_s)
            self._transport.write(OK)

    def _start(self, kind: bytes, chunks: Sequence[bytes], gap_s: float, *, together: bool = False) -> None:
        self._transport.write(HEAD % kind)
        self._next(chunks, 0, gap_s, together)

    def _next(self, chunks: Sequence[bytes], number: int, gap_s: float, together: bool) -> None:
        """``together``: the chunks of all calls are written at the same times, as by an engine's loop."""
        if self._transport.is_closing():
            return
        self._transport.write(chunks[number])
        if number + 1 < len(chunks):
            loop = asyncio.get_running_loop()
            early_s = loop.time() % gap_s if together and gap_s else 0.0
            left_s = gap_s - early_s if early_s < gap_s / 2 else 2 * gap_s - early_s
            loop.call_later(left_s, self._next, chunks, number + 1, gap_s, together)


def host(place: int) -> str:
    """The address of one of many: all of 127.0.0.0/8 is this machine."""
    return f"127.0.{place // 200}.{place % 200 + 1}"


async def main() -> None:
    pace, loop = Pace(), asyncio.get_running_loop()
    server = await loop.create_server(lambda: Mock(pace), host(0), 0, backlog=4096)
    port = server.sockets[0].getsockname()[1]
    more = [host(place) for place in range(1, int(sys.argv[1]) if len(sys.argv) > 1 else 1)]
    others = [await loop.create_server(lambda: Mock(pace), each, port, backlog=128) for each in more]
    print(port, flush=True)
    assert len(others) == len(more)
    await server.serve_forever()


if __name__ == "__main__":
    try:
        import uvloop
    except ImportError:
        asyncio.run(main())
    else:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(main())
