"""The client of tool servers over HTTP connects to the addresses that were checked, and to no other."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

pytest.importorskip("httpx2")

import httpx2

from areal.api.agent import ToolError
from areal.services.agent.worker.tools import open_client

HOST = "tools.example"
TIMES = httpx2.Timeout(10.0)


@asynccontextmanager
async def server(address: str, port: int = 0) -> AsyncIterator[tuple[int, list[bytes]]]:
    """Answers each request with its own address; yields its port, and the heads that it got."""
    heads: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append(await reader.readuntil(b"\r\n\r\n"))
        body = address.encode()
        writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
        writer.close()

    async with await asyncio.start_server(serve, address, port) as started:
        yield started.sockets[0].getsockname()[1], heads


class Names:
    """Resolves ``HOST`` to the next of ``answers`` at each look-up, the last one for ever."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *answers: list[str]) -> None:
        self.answers, self._own = list(answers), socket.getaddrinfo
        monkeypatch.setattr(socket, "getaddrinfo", self.resolve)
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
            monkeypatch.delenv(name, raising=False)

    def resolve(self, host: Any, port: Any, *more: Any, **named: Any) -> Any:
        if host not in (HOST, HOST.encode()):
            return self._own(host, port, *more, **named)
        found = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in found]


async def test_connection_uses_address_checked_before(monkeypatch: pytest.MonkeyPatch) -> None:
    async with server("127.0.0.1") as (port, heads), server("127.0.0.2", port) as (_, elsewhere):
        Names(monkeypatch, ["127.0.0.1"], ["127.0.0.2"])
        async with open_client(f"http://{HOST}:{port}/mcp", TIMES) as http:
            answer = await http.get(f"http://{HOST}:{port}/mcp")
        assert (answer.text, elsewhere) == ("127.0.0.1", [])
        assert f"Host: {HOST}:{port}".lower().encode() in heads[0].lower()


@pytest.mark.parametrize("addresses", [["169.254.169.254"], ["127.0.0.1", "169.254.169.254"]])
async def test_name_resolving_to_metadata_address_is_refused(
    monkeypatch: pytest.MonkeyPatch, addresses: list[str]
) -> None:
    async with server("127.0.0.1") as (port, heads):
        Names(monkeypatch, ["127.0.0.1"], addresses)
        async with open_client(f"http://{HOST}:{port}/mcp", TIMES) as http:
            assert (await http.get(f"http://{HOST}:{port}/mcp")).status_code == 200
            with pytest.raises(ToolError, match="link-local or metadata"):
                await http.get(f"http://{HOST}:{port}/mcp")
        assert len(heads) == 1


async def test_unreachable_address_falls_back_to_next(monkeypatch: pytest.MonkeyPatch) -> None:
    async with server("127.0.0.2") as (port, _):
        Names(monkeypatch, ["127.0.0.1", "127.0.0.2"])
        async with open_client(f"http://{HOST}:{port}/mcp", TIMES) as http:
            assert (await http.post(f"http://{HOST}:{port}/mcp", content=b"x")).text == "127.0.0.2"
