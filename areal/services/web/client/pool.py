"""Connections by address, the last used first: as many as there are calls, and idle ones close after a while.

An answer that is left before its end takes its connection with it, which is how the other side learns that nobody
listens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

import orjson

from areal.services.web.client.connection import Connection
from areal.services.web.client.failures import NotConnected
from areal.services.web.fields import Headers

CONNECT_TIMEOUT_S = 5.0
POOL_IDLE_S = 30.0  # shorter than any server's keep-alive here
_MOST_ADDRESSES = 65_536
ENGINE_IDLE_S = 3.0  # uvicorn, under vLLM and SGLang, closes after five


@dataclass(frozen=True)
class Address:
    host: str
    port: int
    tls: bool
    authority: str
    prefix: str


def parse_address(url: str) -> Address:
    parts = urlsplit(url)
    tls = parts.scheme == "https"
    port = parts.port or (443 if tls else 80)
    return Address(parts.hostname or "", port, tls, parts.netloc, parts.path.rstrip("/"))


@dataclass(frozen=True)
class Fetched:
    """A whole answer."""

    status: int
    headers: Headers
    body: bytes

    def object(self) -> dict[str, Any]:
        """The JSON object in the body; empty where it holds none."""
        try:
            data = orjson.loads(self.body)
        except orjson.JSONDecodeError:
            return {}
        return data if isinstance(data, dict) else {}


class Answering:
    """One call in progress: ``async with`` gives the connection, its head read; leaving returns or closes it."""

    def __init__(self, pool: HttpClient, address: Address, request: bytes) -> None:
        self._pool = pool
        self._address = address
        self._request = request
        self._connection: Connection | None = None

    async def __aenter__(self) -> Connection:
        connection = self._connection = await self._pool.connection(self._address)
        try:
            await connection.ask(self._request)
        except BaseException:
            connection.abort()
            raise
        return connection

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._connection is not None
        self._pool.put_back(self._address, self._connection)


class HttpClient:
    """Calls to other services; ``async with`` closes what is idle at its end. ``base`` is a URL without the path that
    is asked for; entering a call raises NotConnected or Lost."""

    def __init__(self, *, idle_s: float = POOL_IDLE_S) -> None:
        """``idle_s``: how long a connection may lie unused; less than the other side lets it."""
        self._idle_s = idle_s
        self._addresses: dict[str, Address] = {}
        self._idle: dict[Address, list[Connection]] = {}
        self._loop = asyncio.get_running_loop()
        self._sweep: asyncio.TimerHandle | None = None

    def call(self, method: str, base: str, path: str, headers: Mapping[str, str], body: bytes = b"") -> Answering:
        """The answer to ``method`` with ``body``, its end the caller's business, and so is its deadline. Raises
        ValueError for a header, or a path, with a line break."""
        lines = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
        if lines.count("\n") != len(headers) or lines.count("\r") != len(headers):
            raise ValueError("a header's value has a line break")
        return self.send(base, f"{method} ", path, lines.encode("utf-8", "surrogateescape"), body)

    def send(self, base: str, verb: str, path: str, lines: bytes, body: bytes) -> Answering:
        """``call`` for whoever has the header's lines already."""
        address = self._addresses.get(base) or self._learn(base)
        if "\r" in path or "\n" in path or " " in path:
            raise ValueError("a path has a space or a line break")
        head = f"{verb}{address.prefix}{path} HTTP/1.1\r\nHost: {address.authority}\r\n"
        return Answering(self, address, b"%b%bContent-Length: %d\r\n\r\n%b" % (head.encode(), lines, len(body), body))

    async def fetch(
        self,
        method: str,
        base: str,
        path: str,
        *,
        timeout_s: float,
        headers: Mapping[str, str] | None = None,
        body: bytes = b"",
        most: int | None = None,
    ) -> Fetched:
        """The whole answer within ``timeout_s``. Raises NotConnected, TimeoutError, and Lost, also for a body of more
        than ``most`` bytes."""
        async with asyncio.timeout(timeout_s), self.call(method, base, path, headers or {}, body) as answer:
            return Fetched(answer.status, answer.headers, await answer.whole(most))

    def _learn(self, base: str) -> Address:
        if len(self._addresses) >= _MOST_ADDRESSES:  # workers come and go
            self._addresses.clear()
        address = self._addresses[base] = parse_address(base)
        return address

    async def connection(self, address: Address) -> Connection:
        idle = self._idle.get(address)
        while idle:
            connection = idle.pop()
            if not connection.closed and self._loop.time() - connection.idle_since < self._idle_s:
                return connection
            connection.abort()
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                _, made = await self._loop.create_connection(
                    Connection, address.host, address.port, ssl=True if address.tls else None
                )
        except (OSError, TimeoutError) as error:
            raise NotConnected(f"{address.authority}: {error!r}") from error
        return made

    def put_back(self, address: Address, connection: Connection) -> None:
        if not connection.reusable:
            connection.abort()
            return
        connection.idle_since = self._loop.time()
        self._idle.setdefault(address, []).append(connection)
        if self._sweep is None:
            self._sweep = self._loop.call_later(self._idle_s, self._close_old)

    def _close_old(self) -> None:
        oldest = self._loop.time() - self._idle_s
        for address, connections in list(self._idle.items()):
            kept = []
            for connection in connections:
                if connection.closed or connection.idle_since < oldest:
                    connection.abort()
                else:
                    kept.append(connection)
            if kept:
                connections[:] = kept
            else:
                del self._idle[address]
        self._sweep = self._loop.call_later(self._idle_s, self._close_old) if self._idle else None

    async def __aenter__(self) -> HttpClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        if self._sweep is not None:
            self._sweep.cancel()
        for connections in self._idle.values():
            for connection in connections:
                connection.abort()
        self._idle.clear()
