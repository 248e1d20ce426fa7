"""A worker's health with hysteresis. ``failure_threshold`` consecutive lost probes make it dead, ``success_threshold``
consecutive good probes make it healthy again. A worker that answers "not ready" is unhealthy at once; a worker that was
never ready becomes healthy at its first good probe. No I/O."""

from __future__ import annotations

from enum import Enum

from areal.dataclasses import dataclass, replace
from areal.wire.routing import DEFAULT_READINESS, Readiness


class ProbeResult(Enum):
    """The result of one probe."""

    READY = "ready"
    DRAINING = "draining"  # the worker reports that it is stopping
    NOT_READY = "not ready"  # the worker reports that it is not ready
    LOST = "lost"  # no answer in time


@dataclass(frozen=True)
class WorkerHealth:
    healthy: bool = False
    leaving: bool = False
    failures: int = 0
    successes: int = 0
    seen: bool = False
    was_healthy: bool = False

    @property
    def in_doubt(self) -> bool:
        """Whether further probes may soon make the worker dead, or make it healthy again."""
        return self.failures > 0 if self.healthy else self.successes > 0

    def after(self, result: ProbeResult, rules: Readiness = DEFAULT_READINESS) -> WorkerHealth:
        if result is ProbeResult.READY:
            successes = self.successes + 1
            up = self.healthy or not self.was_healthy or successes >= rules.success_threshold
            return WorkerHealth(healthy=up, successes=successes, seen=True, was_healthy=up or self.was_healthy)
        if result is ProbeResult.DRAINING:
            return WorkerHealth(healthy=True, leaving=True, seen=True, was_healthy=True)
        if result is ProbeResult.NOT_READY:
            return WorkerHealth(False, failures=rules.failure_threshold, seen=True, was_healthy=self.was_healthy)
        failures = self.failures + 1
        return replace(
            self, healthy=self.healthy and failures < rules.failure_threshold, failures=failures, successes=0
        )
