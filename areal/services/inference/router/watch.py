"""GET /watch: the table now, then after each change the whole table again, or with ``?changes`` only what has changed;
one JSON object a line, and heartbeats between.

A follower is told all changes since its last line at once; one that has fallen far behind gets the whole table again.
Where changes come fast, many are told together: telling them takes a small part of our time.
"""

from __future__ import annotations

import asyncio
import contextlib
import time

import orjson

from areal.services.inference.router.registry import Registry
from areal.services.web.lifetime import Lifetime
from areal.services.web.server import AnyResponse, Request, StreamResponse
from areal.services.web.tasks import until_beat

HEARTBEAT_S = 2.0
_DEAR_S = 0.002
_REST = 5.0  # times as long as the last line took
_LONGEST_REST_S = 0.5


class Watch:
    """The followers of one registry."""

    def __init__(self, registry: Registry, lifetime: Lifetime) -> None:
        self._registry = registry
        self._lifetime = lifetime
        self._wakers: set[asyncio.Event] = set()
        self._lines: dict[tuple[int | None, int], bytes] = {}  # by the serials from and to
        self._cost_s = 0.0
        registry.on_change = self._wake

    def _wake(self) -> None:
        for waker in self._wakers:
            waker.set()

    def _line_after(self, sent: int | None) -> bytes:
        """What a follower lacks that has the table of serial ``sent``, encoded once for all of them."""
        place = sent, self._registry.serial
        if (line := self._lines.get(place)) is None:
            began = time.perf_counter()
            changes = self._registry.changes_since(sent) if sent is not None else None
            said = {"type": "snapshot", **self._registry.snapshot().to_json()}
            if changes is not None:
                said = {"type": "changes", **changes.to_json()}
            line = orjson.dumps(said) + b"\n"
            self._lines = {known: kept for known, kept in self._lines.items() if known[1] == place[1]}
            self._lines[place] = line
            self._cost_s = time.perf_counter() - began
        return line

    async def handle(self, request: Request) -> AnyResponse:
        response = StreamResponse(headers={"Content-Type": "application/x-ndjson", "Cache-Control": "no-store"})
        await response.prepare(request)
        waker = asyncio.Event()
        self._wakers.add(waker)
        leaving = asyncio.create_task(self._lifetime.wait_draining(), name="watch-until-draining")
        leaving.add_done_callback(lambda _: waker.set())
        try:
            await self._feed(response, waker, whole="changes" not in request.query_string)
        finally:
            leaving.cancel()
            self._wakers.discard(waker)
        return response

    async def _feed(self, response: StreamResponse, waker: asyncio.Event, *, whole: bool) -> None:
        sent: int | None = None
        while not self._lifetime.draining:
            waker.clear()
            if sent != self._registry.serial:
                line, sent = self._line_after(None if whole else sent), self._registry.serial
                await response.write(line)
                await asyncio.sleep(min(self._cost_s * _REST, _LONGEST_REST_S) if self._cost_s > _DEAR_S else 0)
            else:
                beat = {"type": "heartbeat", "epoch": self._registry.epoch, "serial": sent}
                await response.write(orjson.dumps(beat) + b"\n")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(until_beat(HEARTBEAT_S)):
                    await waker.wait()
