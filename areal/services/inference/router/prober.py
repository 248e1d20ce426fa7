"""Asks every worker's /ready once a period, all at once, each with its own deadline."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping
from typing import Any

from areal.services.inference.recording.names import is_tag
from areal.services.inference.router.health import Answer
from areal.services.inference.router.registry import Registry, Report, Worker
from areal.services.web.client import CallFailed, HttpClient

_DEADLINE_S = 2.0
_MOST_BYTES = 1024 * 1024


class Prober:
    def __init__(self, registry: Registry, http: HttpClient, headers: Mapping[str, str], *, period_s: float) -> None:
        self._registry = registry
        self._http = http
        self._headers = headers
        self._period_s = period_s

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            started = loop.time()
            await self.probe(self._registry.workers())
            await asyncio.sleep(max(0.0, self._period_s - (loop.time() - started)))

    async def probe(self, workers: Iterable[Worker]) -> None:
        await asyncio.gather(*(self._probe(worker) for worker in workers))

    async def _probe(self, worker: Worker) -> None:
        answer, report = await self._ask(worker.addr)
        self._registry.observe(worker, answer, report)

    async def _ask(self, addr: str) -> tuple[Answer, Report | None]:
        asked_at = time.monotonic()
        try:
            said = await self._http.fetch(
                "GET", addr, "/ready", headers=self._headers, timeout_s=_DEADLINE_S, most=_MOST_BYTES
            )
        except (CallFailed, TimeoutError):
            return Answer.LOST, None
        data = said.object()
        if said.status == 200:
            return Answer.READY, _report(data, asked_at)
        return (Answer.DRAINING if data.get("status") == "draining" else Answer.NOT_READY), _report(data, asked_at)


def _report(data: Mapping[str, Any], asked_at: float) -> Report:
    def number(name: str) -> int | None:
        value = data.get(name)
        return value if isinstance(value, int) else None

    def tags(name: str) -> tuple[str, ...]:
        value = data.get(name)
        return (
            tuple(item for item in value if isinstance(item, str) and is_tag(item)) if isinstance(value, list) else ()
        )

    root = data.get("root")
    return Report(
        in_flight=number("in_flight") or 0,
        in_flight_tokens=number("in_flight_tokens") or 0,
        version=number("version"),
        paused=data.get("paused") is True,
        max_model_len=number("max_model_len"),
        root=root if isinstance(root, str) else None,
        journals=tags("journals"),
        elsewhere=tags("journals_elsewhere"),
        sessions=number("sessions") or 0,
        asked_at=asked_at,
    )
