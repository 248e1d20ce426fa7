"""A load generator: so many connections, each with one request after another. Reads its orders as JSON from stdin.

    {"port", "path", "headers", "own_headers", "body", "connections", "requests"}
        ->  {"mean_us", "p50_us", "p99_us", "failed", "seconds"}

Latency is from the request's write to the answer's last byte. ``own_headers``: further headers of each connection.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from typing import Any, cast

from benchmarks.relaying.driving import Make, run


class Client(asyncio.Protocol):
    """Asks until ``tickets`` are gone."""

    def __init__(self, request: bytes, tickets: list[int], seconds: list[float], ended: asyncio.Future[None]) -> None:
        self._request, self._tickets, self._seconds, self._ended = request, tickets, seconds, ended
        self._parts: list[bytes] = []
        self._needed = 0
        self._tail = b""
        self.failed = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are none by their class

    def connection_lost(self, error: Exception | None) -> None:
        if not self._ended.done():
            self.failed += 1
            self._ended.set_result(None)

    def ask(self) -> None:
        if not self._tickets:
            self._ended.set_result(None)
            self._transport.close()
            return
        self._tickets.pop()
        self._parts, self._needed, self._tail = [], 0, b""
        self._since = time.perf_counter()
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        if self._needed == 0:
            self._parts.append(data)
            head, found, rest = b"".join(self._parts).partition(b"\r\n\r\n")
            if not found:
                return
            self._begin(head.lower())
            data = rest
        if self._needed < 0:  # chunked: over when its last chunk has come
            self._tail = (self._tail + data)[-5:]
            if self._tail == b"0\r\n\r\n":
                self._finish()
            return
        self._needed -= len(data)
        if self._needed <= 1:
            self._finish()

    def _begin(self, head: bytes) -> None:
        self.failed += head[9:12] != b"200"
        at = head.find(b"\r\ncontent-length:")
        # One more than the length, so that zero keeps its meaning: no head yet.
        self._needed = -1 if at < 0 else int(head[at + 17 :].split(b"\r\n", 1)[0]) + 1

    def _finish(self) -> None:
        self._seconds.append(time.perf_counter() - self._since)
        self.ask()


def _request(order: dict[str, Any], own: dict[str, str]) -> bytes:
    body: bytes = order["body"].encode()
    headers = {"Host": "127.0.0.1", "Content-Type": "application/json", **order["headers"], **own}
    headers["Content-Length"] = str(len(body))
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return f"POST {order['path']} HTTP/1.1\r\n{lines}\r\n".encode() + body


def _maker(order: dict[str, Any]) -> Make[Client]:
    own = itertools.cycle(order.get("own_headers") or [{}])
    return lambda tickets, seconds, ended: Client(_request(order, next(own)), tickets, seconds, ended)


if __name__ == "__main__":
    run(_maker)
