"""Health of workers. Workers with a lease report it themselves; the others are probed by GET /ready, with the period
and timeout of their model."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterable, Mapping
from typing import TypeVar

from areal.dataclasses import dataclass
from areal.http.client import CallFailed, HttpClient
from areal.services.http.tasks import IDLE_S, until_beat
from areal.services.inference.router.health import ProbeResult
from areal.services.inference.router.registry import WorkerRecord, WorkerRegistry, WorkerReport
from areal.services.journal.keys import is_tag

T = TypeVar("T")
_MOST_BYTES = 1024 * 1024
_MOST_AT_ONCE = 256
_EXPIRY_PERIOD_S = 1.0  # between checks while a lease may end, and the most that an end is noticed late
_LATE_S = 1.0
_LOOK_AGAIN_S = 0.25  # bounds the delay of a worker whose period became shorter
_REST = 20.0  # the pause, as a multiple of the time that the last check took; delays probes slightly in a large pool


@dataclass(eq=False)
class Prober:
    """Probes each worker at its own rate, so that a slow worker does not delay the others' probes."""

    _registry: WorkerRegistry
    _http: HttpClient
    _headers: Mapping[str, str]

    async def run(self) -> None:
        async with asyncio.TaskGroup() as probes:
            while True:
                wait_s = self._probe_due(probes)
                await asyncio.sleep(wait_s)

    def _probe_due(self, probes: asyncio.TaskGroup) -> float:
        """Start the probes that are due. Return the seconds until the next check."""
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
            return until_beat(2 * IDLE_S)  # every worker has a lease; registering without one probes at once
        took_s = time.monotonic() - now
        return max(min(next_s, _LOOK_AGAIN_S), took_s * _REST)

    async def probe(self, workers: Iterable[WorkerRecord]) -> None:
        """Probe these workers now, up to ``_MOST_AT_ONCE`` at a time, and wait for the results."""
        probed = [worker for worker in workers if worker.expires_at is None]
        for worker in probed:
            worker.probed_at = math.inf  # the probe is under way
        left = iter(probed)

        async def probe_some() -> None:
            for worker in left:
                worker.probed_at = time.monotonic()
                result, report = await self._fetch(worker.addr, self._registry.readiness(worker).timeout_seconds)
                self._registry.observe(worker, result, report)

        try:
            await asyncio.gather(*(probe_some() for _ in probed[:_MOST_AT_ONCE]))
        finally:
            for worker in left:
                worker.probed_at = -math.inf

    async def _fetch(self, addr: str, timeout_s: float) -> tuple[ProbeResult, WorkerReport | None]:
        asked_at = time.monotonic()
        try:
            reply = await self._http.fetch(
                "GET", addr, "/ready", headers=self._headers, timeout_s=timeout_s, most=_MOST_BYTES
            )
        except (CallFailed, TimeoutError):
            return ProbeResult.LOST, None
        data = reply.object()
        result = ProbeResult.READY if reply.status == 200 else read_result(data)
        return result, read_report(data, asked_at)


async def expire_leases(registry: WorkerRegistry) -> None:
    """Expire leases periodically. If the router was suspended, first extend every lease by that time."""
    looked = time.monotonic()
    while True:
        latest_s = registry.next_expiry() - looked + _EXPIRY_PERIOD_S
        periods = (2 * IDLE_S, IDLE_S, _EXPIRY_PERIOD_S)
        planned_s = next((beat for beat in map(until_beat, periods) if beat <= latest_s), _EXPIRY_PERIOD_S)
        await asyncio.sleep(planned_s)
        late_s = time.monotonic() - looked - planned_s
        looked = time.monotonic()
        if late_s > _LATE_S:
            registry.extend(late_s)
        registry.expire(looked)


def read_result(data: Mapping[str, object]) -> ProbeResult:
    """Return the probe result for the ``status`` in a body of /ready or of a lease."""
    known = {"ready": ProbeResult.READY, "draining": ProbeResult.DRAINING}
    return known.get(str(data.get("status")), ProbeResult.NOT_READY)


def read_report(data: Mapping[str, object], asked_at: float) -> WorkerReport:
    """Return the report in a body of /ready or of a lease. Fields of the wrong type are ignored."""

    def value(name: str, kind: type[T]) -> T | None:
        found = data.get(name)
        return found if isinstance(found, kind) else None

    def tags(name: str) -> tuple[str, ...]:
        return tuple(item for item in value(name, list) or () if isinstance(item, str) and is_tag(item))

    damaged = value("journals_damaged", dict) or {}
    return WorkerReport(
        in_flight=value("in_flight", int) or 0,
        in_flight_tokens=value("in_flight_tokens", int) or 0,
        version=value("version", int),
        paused=data.get("paused") is True,
        max_model_len=value("max_model_len", int),
        root=value("root", str),
        adapters=tuple(map(str, value("adapters", list) or ())),
        journals=tags("journals"),
        elsewhere=tags("journals_elsewhere"),
        damaged={tag: str(name) for tag, name in damaged.items() if is_tag(tag)},
        sessions=value("sessions", int) or 0,
        started=value("sessions_started", int),
        asked_at=asked_at,
        fault=value("fault", str) or "",
        engine_url=value("engine_url", str),
        agent_url=value("worker_url", str),
    )
