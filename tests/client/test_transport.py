"""Calls of a transport: their address, their number, and their end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from areal.client.errors import CallerError, ConnectionLost, DeadlineExceeded, Unreachable
from areal.client.transport import HttpCall, RetryPolicy, Transport


class Peak:
    """A service whose calls wait until they are let through."""

    def __init__(self) -> None:
        self.running = self.most = 0
        self.arrived, self.open = asyncio.Event(), asyncio.Event()

    async def answer(self, request: web.Request) -> web.Response:
        self.running += 1
        self.most = max(self.most, self.running)
        self.arrived.set()
        await self.open.wait()
        self.running -= 1
        return web.json_response({"path": request.path})

    @asynccontextmanager
    async def client(self, connections: int, timeout_s: float = 30.0) -> AsyncIterator[Transport]:
        app = web.Application()
        app.router.add_get("/{path:.*}", self.answer)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0]
        client = Transport(f"http://{host}:{port}", None, timeout_s=timeout_s, connections=connections)
        try:
            yield client
        finally:
            self.open.set()
            await client.close()
            await runner.cleanup()


@pytest.mark.parametrize("url", ["localhost:80", "http://", "ftp://h:1", "http://user:key@h:1", "http://h:99999", ""])
def test_invalid_base_url_is_refused_at_once(url: str) -> None:
    with pytest.raises(CallerError, match="base_url"):
        Transport(url, None, timeout_s=1.0)


async def test_calls_beyond_connection_limit_wait() -> None:
    service = Peak()
    async with service.client(connections=2) as client:
        calls = asyncio.gather(*(client.json("GET", f"/{number}") for number in range(6)))
        await service.arrived.wait()
        service.open.set()
        assert [each["path"] for each in await calls] == [f"/{number}" for number in range(6)]
        assert service.most <= 2


async def test_call_waiting_for_connection_keeps_deadline() -> None:
    service = Peak()
    async with service.client(connections=1) as client, asyncio.TaskGroup() as tasks:
        first = tasks.create_task(client.json("GET", "/first"))
        await service.arrived.wait()
        with pytest.raises(DeadlineExceeded):
            await client.json("GET", "/second", timeout_s=0.05)
        service.open.set()
        assert (await first)["path"] == "/first"


async def test_running_call_fails_when_its_client_is_closed() -> None:
    service = Peak()
    async with service.client(connections=1) as client:
        running = asyncio.ensure_future(client.call(HttpCall("GET", "/")))
        await service.arrived.wait()
        await client.close()
        with pytest.raises(ConnectionLost):
            await running
        with pytest.raises(RuntimeError, match="closed"):
            await client.call(HttpCall("GET", "/"))


async def test_header_with_a_line_break_is_the_callers_error() -> None:
    client = Transport("http://127.0.0.1:9", "key\r\nX-Admin: 1", timeout_s=1.0, retry=RetryPolicy(attempts=1))
    with pytest.raises(CallerError, match="line break"):
        await client.json("GET", "/")


async def test_server_without_tls_reports_tls_failure() -> None:
    service = Peak()
    async with service.client(connections=1) as plain:
        url = plain.base_url.replace("http://", "https://")
        client = Transport(url, None, timeout_s=10.0, retry=RetryPolicy(attempts=1))
        with pytest.raises(Unreachable, match="TLS failed"):
            await client.json("GET", "/")
