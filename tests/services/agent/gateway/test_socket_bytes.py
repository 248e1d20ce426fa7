"""The bytes that the turns of a WebSocket hold."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any, cast

from wsproto.connection import Connection, ConnectionType
from wsproto.events import TextMessage

from areal.services.agent.gateway.sockets import SocketRoutes, _SocketTurns
from areal.services.http.messages import Request, Response, ServerLimits
from areal.services.http.websocket import accept
from tests.services.http.server.server_fixture import get, serving

_HANDSHAKE = (
    "Connection: Upgrade",
    "Upgrade: websocket",
    "Sec-WebSocket-Version: 13",
    f"Sec-WebSocket-Key: {'A' * 22}==",
)


def frame(number: int) -> bytes:
    params = {"message": "x" * 100_000, "sessionKey": str(number)}
    text = json.dumps({"type": "req", "id": number, "method": "agent", "params": params})
    return Connection(ConnectionType.CLIENT).send(TextMessage(data=text))


async def test_message_bytes_are_held_until_turns_end() -> None:
    began: asyncio.Queue[str] = asyncio.Queue()
    release = asyncio.Event()

    async def run(call: Any, sink: Any) -> dict[str, Any]:
        began.put_nowait(call.key)
        await release.wait()
        return {"summary": "", "metadata": {}}

    routes = SimpleNamespace(
        sessions=SimpleNamespace(model_access=lambda params: None), runner=SimpleNamespace(run=run)
    )

    async def application(request: Request) -> Response:
        turns = _SocketTurns(cast(SocketRoutes, routes), accept(request, 2**20), request)
        await turns.run(known=True)
        return Response(101)

    async with serving(application, ServerLimits()) as fixture:
        async with fixture.caller() as caller:
            await caller.say(get("/ws", *_HANDSHAKE))
            assert (await caller.head())[0] == 101
            await caller.say(b"".join(map(frame, range(3))))
            async with asyncio.timeout(20):
                for _ in range(3):
                    await began.get()
            assert fixture.server.budget.held > 300_000
            release.set()
        await fixture.emptied()
        assert fixture.server.budget.held == 0
