"""Where calls wait for a worker. Back-pressure, not shedding: only past ``max_queued_requests`` is a call refused.

A call waits while its model has no worker that could take it: none is published yet, all are dead or draining, or
each of them has just refused it. Where every worker says that waiting will not help (an external API that refuses our
key), it is told so at once. A call of a session waits for the one worker that holds its journal. It ends as 503
after ``request_timeout_seconds`` without a worker, and much sooner where that worker drains and keeps the session.
"""

from __future__ import annotations

import asyncio
import math
from collections import defaultdict
from collections.abc import Collection

from prometheus_client import Gauge

from areal.services.inference.gateway.live_table import LiveTable
from areal.services.inference.router.picking import CallKey, Picker
from areal.services.inference.router.table import WorkerEntry
from areal.services.web.errors import ApiError

_MOVING_S = 5.0  # for a session to move from a worker that drains; a call that runs there may hold it longer
_JOURNAL_S = 1.0  # who was refused by a journal's holder may ask the same one again: it came back, as the table says


class Admission:
    """Picks workers and counts the tokens each holds for this relay."""

    def __init__(self, table: LiveTable, queued: Gauge) -> None:
        self._table = table
        self._picker = Picker()
        self._tokens: defaultdict[str, float] = defaultdict(float)
        self._waiting = 0
        self._gauge = queued

    def begin(self, worker: WorkerEntry, key: CallKey) -> None:
        self._tokens[worker.addr] += key.tokens + 1.0
        self._picker.loaded(worker.addr, self._tokens[worker.addr])

    def end(self, worker: WorkerEntry, key: CallKey) -> None:
        self._tokens[worker.addr] -= key.tokens + 1.0
        if self._tokens[worker.addr] < 1.0:
            del self._tokens[worker.addr]
        self._picker.loaded(worker.addr, self._load(worker))

    def _load(self, worker: WorkerEntry) -> float:
        return self._tokens.get(worker.addr, 0.0)

    async def worker(self, model: str, key: CallKey, refused: Collection[str], since: float) -> WorkerEntry:
        """The worker for one attempt, rather none of ``refused``; ``since`` (loop time) the call is without one.

        Raises ApiError: 429 (queue full), 503 (waited in vain), 404 (the model went away).
        """
        ready = self._table.routable(model, even_suspects=True, journal=key.journal)
        if refused:
            ready = [worker for worker in ready if worker.addr not in refused]
        chosen = self._pick(ready, key)
        return chosen if chosen is not None else await self._wait(model, key, since)

    def _pick(self, candidates: list[WorkerEntry], key: CallKey) -> WorkerEntry | None:
        if not candidates:
            return None
        if key.journal is not None:
            return candidates[0]
        return self._picker.pick(self._table.snapshot.strategy, candidates, key, self._load)

    async def _wait(self, model: str, key: CallKey, since: float) -> WorkerEntry:
        if self._waiting >= self._table.limits.max_queued_requests:
            message = f"{self._waiting} requests already wait for a worker"
            raise ApiError(429, message, code="queue_full", headers={"Retry-After": "1"})
        self._waiting += 1
        self._gauge.inc()
        try:
            while True:
                await self._table.changed(self._patience(model, key, since))
                # Whoever refused before is asked again, once its suspicion has passed: it may have come back.
                chosen = self._pick(self._table.routable(model, even_suspects=False, journal=key.journal), key)
                if chosen is not None:
                    return chosen
        finally:
            self._waiting -= 1
            self._gauge.dec()

    def _patience(self, model: str, key: CallKey, since: float) -> float:
        """Seconds until it is worth looking again without a new table. Raises when the wait is over."""
        if model not in self._table.snapshot.models:
            raise ApiError(404, f"the model {model!r} was removed", code="model_not_found", param="model")
        waited = asyncio.get_running_loop().time() - since
        left = self._table.limits.request_timeout_seconds - waited
        look_again_s = math.inf
        if key.journal is not None:
            look_again_s = _JOURNAL_S
            moving = self._table.moving(model, key.journal)
            if moving is not None:
                left = min(left, (_MOVING_S if moving else 0.0) - waited)
            if moving is not None and left <= 0:
                message = "the session's worker drains and the session is still there: try again"
                raise ApiError(503, message, code="session_moving", headers={"Retry-After": "2"})
        if fault := self._table.fault(model):
            message = f"the model {model!r} cannot be served: {fault}"
            raise ApiError(503, message, code="engine_unavailable", headers={"Retry-After": "5"})
        if left <= 0:
            message = f"no worker of model {model!r} took the request in {waited:.1f} s"
            raise ApiError(503, message, code="no_worker_available", headers={"Retry-After": "5"})
        return min(left, look_again_s, self._table.suspicion_left_s(model))
