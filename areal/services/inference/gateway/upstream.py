"""The relay's way to the workers: pooled connections of its own, one POST at a time on each.

A worker's answer is parsed just far enough to pass it on, so a call costs a fraction of what a general client takes.
An answer that is left before its end takes its connection with it, which is how a worker learns that nobody listens.
A reader that lags behind stops the connection from reading, so that a slow caller holds back its worker.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from types import TracebackType
from typing import cast
from urllib.parse import urlsplit

import httptools

from areal.services.web.outgoing import CONNECT_TIMEOUT_S, POOL_IDLE_S

_HIGH_WATER = 256 * 1024
_MOST_HEADER_BYTES = 64 * 1024


class NotConnected(Exception):
    """No connection came about: the worker has not seen the call."""


class Lost(Exception):
    """The connection ended, or spoke no HTTP, before the answer's end."""


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


class Connection(asyncio.Protocol):
    """``status`` and ``headers`` (lower-case names) stand once ``ask`` returns; then ``part`` until it is empty."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None
        self._error: Exception | None = None
        self._paused = False
        self.closed = False
        self.idle_since = 0.0
        self._fresh()

    def _fresh(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._parts: deque[bytes] = deque()
        self._held = 0
        self._header_bytes = 0
        self._begun = False
        self._ended = True  # nothing is asked yet
        self._keep = False
        self.status = 0
        self.headers: dict[str, str] = {}

    # What the caller does.

    async def ask(self, request: bytes) -> None:
        """Send ``request`` and wait for the answer's head. Raises Lost."""
        self._fresh()
        self._ended = False
        self._transport.write(request)
        while not self._begun:
            await self._wait()

    async def part(self) -> bytes:
        """The next bytes of the answer's body; empty at its end. Raises Lost."""
        while not self._parts:
            if self._ended:
                return b""
            await self._wait()
        data = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        self._parts.clear()
        self._held = 0
        if self._paused and not self.closed:
            self._paused = False
            self._transport.resume_reading()
        return data

    async def whole(self) -> bytes:
        """The body from here to its end. Raises Lost."""
        parts = []
        while part := await self.part():
            parts.append(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    @property
    def reusable(self) -> bool:
        return self._ended and self._keep and not self.closed and not self._paused

    def abort(self) -> None:
        self.closed = True
        self._transport.abort()

    async def _wait(self) -> None:
        if self._error is not None:
            raise self._error
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # What the loop tells.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self._ended:  # nobody asked
            self.abort()
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(f"the worker speaks no HTTP: {error}")
            return
        if self._held > _HIGH_WATER and not self._paused and not self._ended:
            self._paused = True
            self._transport.pause_reading()
        self._wake()

    def connection_lost(self, error: Exception | None) -> None:
        self.closed = True
        if not self._ended:
            if error is None and self._begun and self._until_close():
                self._ended = True
            else:
                self._error = Lost(f"the worker's connection ended: {error!r}")
        self._wake()

    def _until_close(self) -> bool:
        """Whether the answer's end is the connection's."""
        return "content-length" not in self.headers and "transfer-encoding" not in self.headers

    def _fail(self, reason: str) -> None:
        self._error = Lost(reason)
        self.abort()
        self._wake()

    # What the parser finds.

    def on_header(self, name: bytes, value: bytes) -> None:
        self._header_bytes += len(name) + len(value)
        if self._header_bytes > _MOST_HEADER_BYTES:
            raise httptools.HttpParserError("the answer's header is too large")
        self.headers[name.decode("latin-1").lower()] = value.decode("utf-8", "surrogateescape")

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status >= 200:
            self.status = status
            self._begun = True

    def on_body(self, data: bytes) -> None:
        self._parts.append(data)
        self._held += len(data)

    def on_message_complete(self) -> None:
        if not self._begun:  # an interim answer, such as 100
            self.headers.clear()
            return
        self._ended = True
        self._keep = self._parser.should_keep_alive()


class Answering:
    """One call in progress: ``async with`` gives the connection, its head read; leaving returns or closes it."""

    def __init__(self, pool: WorkerPool, address: Address, request: bytes) -> None:
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


class WorkerPool:
    """Connections by worker, the last used first. As many as there are calls; idle ones close after a while."""

    def __init__(self) -> None:
        self._addresses: dict[str, Address] = {}
        self._idle: dict[Address, list[Connection]] = {}
        self._sweep: asyncio.TimerHandle | None = None

    def post(self, worker: str, path: str, headers: dict[str, str], body: bytes) -> Answering:
        """The answer to a POST of ``body`` to ``path`` at the URL ``worker``; entering it raises NotConnected, Lost."""
        address = self._addresses.get(worker) or self._learn(worker)
        if any("\r" in value or "\n" in value for value in headers.values()):
            raise ValueError("a header's value has a line break")  # the server's parser lets none pass
        lines = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
        head = (
            f"POST {address.prefix}{path} HTTP/1.1\r\nHost: {address.authority}\r\nAccept: */*\r\n"
            f"Accept-Encoding: identity\r\n{lines}Content-Length: {len(body)}\r\n\r\n"
        )
        return Answering(self, address, head.encode("utf-8", "surrogateescape") + body)

    def _learn(self, worker: str) -> Address:
        if len(self._addresses) > 1024:  # workers come and go
            self._addresses.clear()
        address = self._addresses[worker] = parse_address(worker)
        return address

    async def connection(self, address: Address) -> Connection:
        idle = self._idle.get(address)
        while idle:
            connection = idle.pop()
            if not connection.closed:
                return connection
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                _, made = await asyncio.get_running_loop().create_connection(
                    Connection, address.host, address.port, ssl=True if address.tls else None
                )
        except (OSError, TimeoutError) as error:
            raise NotConnected(f"{address.authority}: {error!r}") from error
        return made

    def put_back(self, address: Address, connection: Connection) -> None:
        if not connection.reusable:
            connection.abort()
            return
        loop = asyncio.get_running_loop()
        connection.idle_since = loop.time()
        self._idle.setdefault(address, []).append(connection)
        if self._sweep is None:
            self._sweep = loop.call_later(POOL_IDLE_S / 2, self._close_old)

    def _close_old(self) -> None:
        loop = asyncio.get_running_loop()
        oldest = loop.time() - POOL_IDLE_S / 2
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
        self._sweep = loop.call_later(POOL_IDLE_S / 2, self._close_old) if self._idle else None

    def close(self) -> None:
        if self._sweep is not None:
            self._sweep.cancel()
        for connections in self._idle.values():
            for connection in connections:
                connection.abort()
        self._idle.clear()
