"""A client whose service moves: it asks where it is when the port is closed, and goes on there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import orjson
import pytest
from aiohttp import web

from areal.client.command import address_lookup, free_port, run_areal
from areal.client.errors import Unreachable
from areal.client.transport import HttpCall, RetryPolicy, Transport
from areal.errors import ArealError


@asynccontextmanager
async def service() -> AsyncIterator[str]:
    async def answer(request: web.Request) -> web.Response:
        return web.json_response({"path": request.path})

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    port = free_port()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        await runner.cleanup()


def transport(lookup: Callable[[], str] | None, connections: int = 8) -> Transport:
    """Of a service that has left the address."""
    gone, retry = f"http://127.0.0.1:{free_port()}", RetryPolicy(attempts=2, first_s=0.01)
    return Transport(gone, None, timeout_s=10.0, retry=retry, connections=connections, lookup=lookup)


async def test_calls_follow_moved_service_with_one_lookup() -> None:
    async with service() as place:
        asked: list[int] = []
        client = transport(lambda: asked.append(1) or place + "/")  # type: ignore[func-returns-value]
        try:
            paths = [f"/{number}" for number in range(8)]
            answers = await asyncio.gather(*(client.json("GET", path) for path in paths))
            assert [each["path"] for each in answers] == paths
            assert client.base_url == place and len(asked) == 1
        finally:
            await client.close()


async def test_stream_follows_moved_service() -> None:
    async with service() as place:
        client = transport(lambda: place, connections=1)
        try:
            async with client.stream(HttpCall("GET", "/stream")) as response:
                assert orjson.loads(await response.whole()) == {"path": "/stream"}
        finally:
            await client.close()


def _unknown() -> str:
    raise ArealError("no record")


@pytest.mark.parametrize("lookup", [None, lambda: "", _unknown], ids=["not told", "nowhere", "unknown"])
async def test_service_without_address_is_unreachable(lookup: Callable[[], str] | None) -> None:
    client = transport(lookup)
    try:
        with pytest.raises(Unreachable):
            await client.json("GET", "/")
    finally:
        await client.close()


async def test_suspended_service_is_unreachable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AREAL_HOME", str(tmp_path / "home"))
    manifest = tmp_path / "service.yaml"
    manifest.write_text(
        "apiVersion: areal.dev/v1alpha1\nkind: InferenceService\nmetadata: {name: default}\nspec: {suspend: true}\n"
    )
    run_areal("apply", "-f", str(manifest), "--yes", what="a suspended service")
    lookup = address_lookup("InferenceService/default")
    assert lookup is not None and lookup() == ""
    client = transport(lookup)
    try:
        with pytest.raises(Unreachable):
            await client.json("GET", "/v1/models")
    finally:
        await client.close()
