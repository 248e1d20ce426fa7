"""How many sessions each replica has, as far as a router can know: what it said, and what it was sent since."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from areal.services.inference.router.registry import Worker


@dataclass
class Placed:
    """Sessions on their way to a replica, or there since ``done_at`` (monotonic)."""

    size: int
    done_at: float | None = None


class Placements:
    """What was placed since each replica last reported, counted on top of its report, so that a burst spreads."""

    def __init__(self) -> None:
        self._placed: dict[str, list[Placed]] = {}

    def sessions(self, worker: Worker) -> int:
        recent = [
            each
            for each in self._placed.pop(worker.addr, ())
            if each.done_at is None or each.done_at >= worker.report.asked_at
        ]
        if recent:
            self._placed[worker.addr] = recent
        return worker.report.sessions + sum(each.size for each in recent)

    def lightest_first(self, workers: Iterable[Worker]) -> list[Worker]:
        return sorted(workers, key=lambda worker: (self.sessions(worker), worker.id))

    @contextmanager
    def placing(self, worker: Worker, size: int) -> Iterator[Placed]:
        """Counts the sessions from now on. The body sets ``size`` to 0 where they did not start."""
        placed = Placed(size)
        self._placed.setdefault(worker.addr, []).append(placed)
        try:
            yield placed
        except BaseException:
            placed.size = 0
            raise
        finally:
            placed.done_at = time.monotonic()
