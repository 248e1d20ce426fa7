"""A session that is started and closed at once."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
import pytest

from areal.http.client import HttpReply
from areal.http.headers import Headers
from areal.services.agent.gateway.sessions import AgentSessions
from areal.services.http.errors import ApiError
from areal.services.inference.gateway.routing import LiveTable
from areal.wire.agents import StartAgentSession
from areal.wire.routing import GatewayLimits

TAG = "aaaaaaaa"


class Placing:
    """The router and the keys of a gateway: a session is there once ``gate`` is open."""

    def __init__(self, status: int) -> None:
        self.gate, self.asked, self.status = asyncio.Event(), asyncio.Event(), status
        self.known: dict[bytes, str] = {}

    async def send(self, *_: Any) -> HttpReply:
        self.asked.set()
        await self.gate.wait()
        session = {"sessions": [{"session_api_key": "own"}], "journal": TAG}
        answer = session if self.status == 201 else {"error": {"message": "none"}}
        return HttpReply(self.status, Headers({}), orjson.dumps(answer))

    async def journal_with(self, key: bytes) -> str | None:
        return self.known.get(key)

    def remember(self, key: bytes, tag: str) -> None:
        self.known[key] = tag


@pytest.mark.parametrize("status", [201, 409])
async def test_session_start_outlives_disconnected_caller(status: int) -> None:
    placing = Placing(status)
    sessions = AgentSessions("agents", LiveTable(GatewayLimits()), placing, placing, ())  # type: ignore[arg-type]
    starting = asyncio.create_task(sessions.start(StartAgentSession(api_key="own", model="agents"), "r"))
    await placing.asked.wait()
    starting.cancel()
    await asyncio.wait([starting])
    finding = asyncio.create_task(sessions.find("own"))
    await asyncio.sleep(0)
    placing.gate.set()
    if status == 201:
        assert await finding == TAG
    else:
        with pytest.raises(ApiError):
            await finding
    assert starting.cancelled()
