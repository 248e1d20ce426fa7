"""GET /watch: the table now, then the table after each change, one JSON object a line, and heartbeats between.

A slow follower misses intermediate tables, never the last one: each write is the newest snapshot.
"""

from __future__ import annotations

import asyncio
import contextlib

import orjson

from areal.services.inference.router.registry import Registry
from areal.services.web.lifetime import Lifetime
from areal.services.web.server import AnyResponse, Request, StreamResponse

HEARTBEAT_S = 2.0


class Watch:
    """The followers of one registry."""

    def __init__(self, registry: Registry, lifetime: Lifetime) -> None:
        self._registry = registry
        self._lifetime = lifetime
        self._wakers: set[asyncio.Event] = set()
        self._line: tuple[int, bytes] = (-1, b"")
        registry.on_change = self._wake

    def _wake(self) -> None:
        for waker in self._wakers:
            waker.set()

    def _current(self) -> bytes:
        """The snapshot's line, encoded once for all followers."""
        serial = self._registry.serial
        if self._line[0] != serial:
            self._line = (serial, orjson.dumps({"type": "snapshot", **self._registry.snapshot().to_json()}) + b"\n")
        return self._line[1]

    async def handle(self, request: Request) -> AnyResponse:
        response = StreamResponse(headers={"Content-Type": "application/x-ndjson", "Cache-Control": "no-store"})
        await response.prepare(request)
        waker = asyncio.Event()
        self._wakers.add(waker)
        leaving = asyncio.create_task(self._lifetime.wait_draining(), name="watch-until-draining")
        leaving.add_done_callback(lambda _: waker.set())
        try:
            await self._feed(response, waker)
        finally:
            leaving.cancel()
            self._wakers.discard(waker)
        return response

    async def _feed(self, response: StreamResponse, waker: asyncio.Event) -> None:
        sent = -1
        while not self._lifetime.draining:
            waker.clear()
            if sent != self._registry.serial:
                sent = self._registry.serial
                await response.write(self._current())
            else:
                beat = {"type": "heartbeat", "epoch": self._registry.epoch, "serial": sent}
                await response.write(orjson.dumps(beat) + b"\n")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(HEARTBEAT_S):
                    await waker.wait()
