"""Health of workers: those with a lease report it themselves, the others are probed by GET /ready, with the period and
timeout of their model."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterable, Mapping
from typing import Any

from areal.services.http.client import CallFailed, HttpClient
from areal.services.http.tasks import until_beat
from areal.services.inference.router.health import Answer
from areal.services.inference.router.registry import WorkerRecord, WorkerRegistry, WorkerReport
from areal.services.journal.keys import is_tag

_MOST_BYTES = 1024 * 1024
_ASKED_AT_ONCE = 256
_EXPIRY_PERIOD_S = 1.0
_LATE_S = 1.0
_LOOK_AGAIN_S = 0.25  # a model that is now probed more often is seen by then
_REST = 20.0  # times as long as looking took: of many workers some are asked a moment late
_NOBODY_S = 1.0  # between two looks where every worker has a lease; who registers without one is asked at once


class Prober:
    """Probes each worker at its own rate: one that answers late does not delay the others."""

    def __init__(self, registry: WorkerRegistry, http: HttpClient, headers: Mapping[str, str]) -> None:
        self._registry = registry
        self._http = http
        self._headers = headers

    async def run(self) -> None:
        async with asyncio.TaskGroup() as probes:
            while True:
                wait_s = self._ask_due(probes)
                await asyncio.sleep(wait_s)

    def _ask_due(self, probes: asyncio.TaskGroup) -> float:
        """Ask every worker whose time has come; in how many seconds to look again."""
        now, next_s, due, periods = time.monotonic(), math.inf, list[WorkerRecord](), dict[str | None, float]()
        for worker in self._registry.workers():
            if worker.expires_at is not None:
                continue
            period_s = periods.get(worker.model) if not worker.health.in_doubt else None
            if period_s is None:
                period_s = self._registry.renew_s(worker)
                if not worker.health.in_doubt:
                    periods[worker.model] = period_s
            left_s = worker.probed_at + period_s - now
            if left_s <= 0:
                due.append(worker)
                left_s = period_s
            if left_s < next_s:
                next_s = left_s
        if due:
            probes.create_task(self.probe(due), name="probes-due")
        if next_s == math.inf:
            return until_beat(_NOBODY_S)
        took_s = time.monotonic() - now
        return max(min(next_s, _LOOK_AGAIN_S), took_s * _REST)

    async def probe(self, workers: Iterable[WorkerRecord]) -> None:
        """Ask these now, and wait for their answers: of thousands some at a time."""
        asked = [worker for worker in workers if worker.expires_at is None]
        for worker in asked:
            worker.probed_at = math.inf  # on its way
        left = iter(asked)

        async def ask_some() -> None:
            for worker in left:
                worker.probed_at = time.monotonic()
                answer, report = await self._ask(worker.addr, self._registry.readiness(worker).timeout_seconds)
                self._registry.observe(worker, answer, report)

        try:
            await asyncio.gather(*(ask_some() for _ in asked[:_ASKED_AT_ONCE]))
        finally:
            for worker in left:
                worker.probed_at = -math.inf

    async def _ask(self, addr: str, timeout_s: float) -> tuple[Answer, WorkerReport | None]:
        asked_at = time.monotonic()
        try:
            reply = await self._http.fetch(
                "GET", addr, "/ready", headers=self._headers, timeout_s=timeout_s, most=_MOST_BYTES
            )
        except (CallFailed, TimeoutError):
            return Answer.LOST, None
        data = reply.object()
        answer = Answer.READY if reply.status == 200 else answer_of(data)
        return answer, report_of(data, asked_at)


async def expire_leases(registry: WorkerRegistry) -> None:
    """Expire leases. A router that was suspended for a while first extends them by that time."""
    looked = time.monotonic()
    while True:
        await asyncio.sleep(planned_s := until_beat(_EXPIRY_PERIOD_S))
        late_s = time.monotonic() - looked - planned_s
        looked = time.monotonic()
        if late_s > _LATE_S:
            registry.extend(late_s)
        registry.expire(looked)


def answer_of(data: Mapping[str, Any]) -> Answer:
    """The status in a body of /ready, or of a lease."""
    known = {"ready": Answer.READY, "draining": Answer.DRAINING}
    return known.get(str(data.get("status")), Answer.NOT_READY)


def report_of(data: Mapping[str, Any], asked_at: float) -> WorkerReport:
    def number(name: str) -> int | None:
        value = data.get(name)
        return value if isinstance(value, int) else None

    def tags(name: str) -> tuple[str, ...]:
        value = data.get(name)
        return (
            tuple(item for item in value if isinstance(item, str) and is_tag(item)) if isinstance(value, list) else ()
        )

    root, adapters, fault = data.get("root"), data.get("adapters"), data.get("fault")
    engine_url, agent_url = data.get("engine_url"), data.get("worker_url")
    return WorkerReport(
        in_flight=number("in_flight") or 0,
        in_flight_tokens=number("in_flight_tokens") or 0,
        version=number("version"),
        paused=data.get("paused") is True,
        max_model_len=number("max_model_len"),
        root=root if isinstance(root, str) else None,
        adapters=tuple(map(str, adapters)) if isinstance(adapters, list) else (),
        journals=tags("journals"),
        elsewhere=tags("journals_elsewhere"),
        sessions=number("sessions") or 0,
        asked_at=asked_at,
        fault=fault if isinstance(fault, str) else "",
        engine_url=engine_url if isinstance(engine_url, str) else None,
        agent_url=agent_url if isinstance(agent_url, str) else None,
    )
