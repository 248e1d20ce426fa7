"""A scripted HTTP server inside the test's own loop: routes answer as prescribed, and remember what they got."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

Reply = Callable[[web.Request], Any]


@dataclass
class ScriptedApi:
    """``replies`` maps ``"POST /path"`` to (status, body: JSON or bytes) or to a list of stream events, between
    which functions are awaited; ``hooks`` run before them."""

    replies: dict[str, Any] = field(default_factory=dict)
    hooks: dict[str, Callable[[], Awaitable[None]]] = field(default_factory=dict)
    got: list[tuple[str, Any, Mapping[str, str]]] = field(default_factory=list)
    url: str = ""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        raw = await request.read()
        route = f"{request.method} {request.path}"
        self.got.append((route, json.loads(raw) if raw else None, request.headers.copy()))
        if (hook := self.hooks.get(route)) is not None:
            await hook()
        reply = self.replies.get(route, (404, {"error": {"message": f"no {route}"}}))
        if isinstance(reply, tuple):
            status, body = reply
            if isinstance(body, bytes):
                return web.Response(status=status, body=body)
            return web.json_response(body, status=status, dumps=_compact)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for item in reply:
            if callable(item):
                await item()
                continue
            data = item if isinstance(item, str) else json.dumps(item)
            await response.write(f"data: {data}\n\n".encode())
        return response

    def bodies(self, route: str) -> list[Any]:
        return [body for name, body, _ in self.got if name == route]


def _compact(body: Any) -> str:
    return json.dumps(body, separators=(",", ":"))


@contextlib.asynccontextmanager
async def scripted_api(**replies: Any) -> AsyncIterator[ScriptedApi]:
    api = ScriptedApi()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", api.handle)
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    api.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield api
    finally:
        await runner.cleanup()
