"""vLLM's server asks for the service's key where others reach it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from areal.services.inference.engines.vllm_plugin.areal_vllm import RequireKey

KEY = "0123456789abcdef"


def answer(path: str, header: str | None, kind: str = "http") -> list[dict[str, Any]]:
    sent: list[dict[str, Any]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200})

    async def receive() -> dict[str, Any]:
        return {}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    headers = [(b"authorization", header.encode())] if header is not None else []
    asyncio.run(RequireKey(app)({"type": kind, "path": path, "headers": headers}, receive, send))
    return sent


@pytest.mark.parametrize(
    ("path", "header", "status"),
    [
        ("/health", None, 200),
        ("/v1/completions", f"Bearer {KEY}", 200),
        ("/v1/completions", None, 401),
        ("/collective_rpc", "Bearer other", 401),
        ("/metrics", KEY, 401),
        ("/health/../collective_rpc", None, 401),
    ],
)
def test_every_route_but_health_requires_key(
    monkeypatch: pytest.MonkeyPatch, path: str, header: str | None, status: int
) -> None:
    monkeypatch.setenv("AREAL_ENGINE_KEY", KEY)
    assert answer(path, header)[0]["status"] == status


def test_websocket_without_the_key_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AREAL_ENGINE_KEY", KEY)
    assert answer("/v1/realtime", None, "websocket") == [{"type": "websocket.close", "code": 1008}]
