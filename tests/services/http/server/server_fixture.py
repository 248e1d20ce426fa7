"""A server under test, and a caller that sends the bytes that a test gives it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import cast

from areal.services.http.errors import OPENAI, ApiError
from areal.services.http.messages import AnyResponse, Request, Response, ServerLimits, error_response
from areal.services.http.server import Application, HttpServer

QUICK = ServerLimits(
    keep_alive_s=0.2, header_s=0.2, body_grace_s=0.2, body_bytes_per_s=1e6, linger_s=0.3, stalled_s=0.3, sweep_s=0.02
)


@dataclass
class RawAnswer:
    status: int
    headers: dict[str, str]
    body: bytes


class Caller:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def say(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def answer(self, *, of: str = "GET") -> RawAnswer:
        """The next answer; ``of``: the method it answers."""
        async with asyncio.timeout(20):
            status, headers = await self.head()
            body = b"" if of == "HEAD" or status in (100, 204, 304) else await self._body(headers)
        return RawAnswer(status, headers, body)

    async def head(self) -> tuple[int, dict[str, str]]:
        first, *lines = (await self.reader.readuntil(b"\r\n\r\n"))[:-4].decode("latin-1").split("\r\n")
        headers = dict(line.split(": ", 1) for line in lines)
        return int(first.split(" ")[1]), {name.lower(): value for name, value in headers.items()}

    async def _body(self, headers: dict[str, str]) -> bytes:
        if headers.get("transfer-encoding") == "chunked":
            return b"".join([part async for part in self.chunks()])
        if "content-length" in headers:
            return await self.reader.readexactly(int(headers["content-length"]))
        return await self.reader.read()

    async def chunks(self) -> AsyncIterator[bytes]:
        while size := int(await self.reader.readline(), 16):
            yield (await self.reader.readexactly(size + 2))[:-2]
        assert await self.reader.readexactly(2) == b"\r\n"

    async def ended(self) -> bool:
        """Whether the server closes without another word."""
        async with asyncio.timeout(20):
            try:
                return await self.reader.read(1) == b""
            except ConnectionResetError:
                return True

    def lag(self) -> None:
        """Take nothing more."""
        cast(asyncio.Transport, self.writer.transport).pause_reading()

    def catch_up(self) -> None:
        cast(asyncio.Transport, self.writer.transport).resume_reading()

    def leave(self) -> None:
        self.writer.transport.abort()


@dataclass
class ServerFixture:
    server: HttpServer
    port: int

    @asynccontextmanager
    async def caller(self) -> AsyncIterator[Caller]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=2**26)
        try:
            yield Caller(reader, writer)
        finally:
            writer.transport.abort()

    def sweep_idle(self, after_s: float) -> None:
        """Sweep each connection as if it had been idle for so long."""
        for connection in list(self.server.connections):
            connection.sweep(connection._idle_since + after_s)

    async def emptied(self) -> None:
        """Return once the server has no connection."""
        async with asyncio.timeout(20):
            while self.server.connections:  # noqa: ASYNC110 - the server has no event for each that goes
                await asyncio.sleep(0.01)

    async def ask(self, data: bytes, *, of: str = "GET") -> RawAnswer:
        async with self.caller() as caller:
            await caller.say(data)
            return await caller.answer(of=of)


@asynccontextmanager
async def serving(application: Application, limits: ServerLimits | None = None) -> AsyncIterator[ServerFixture]:
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    sock.setblocking(False)
    server = HttpServer(application, limits)
    await server.listen(sock)
    try:
        yield ServerFixture(server, sock.getsockname()[1])
    finally:
        await server.cancel()


async def echo(request: Request) -> AnyResponse:
    """Says what it heard; a body of more than a megabyte is too large."""
    try:
        body = await request.read(2**20)
    except ApiError as error:
        return error_response(error, OPENAI, request.id)
    return Response(200, body, headers={"x-method": request.method, "x-path": request.path, "x-size": str(len(body))})


def get(path: str = "/", *fields: str) -> bytes:
    return "\r\n".join([f"GET {path} HTTP/1.1", "Host: here", *fields, "", ""]).encode("utf-8", "surrogateescape")


def post(body: bytes, *fields: str, path: str = "/") -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: here", f"Content-Length: {len(body)}", *fields, "", ""]
    return "\r\n".join(lines).encode() + body
