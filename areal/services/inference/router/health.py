"""Health with hysteresis: one lost probe is noise, three in a row are a death, two answers in a row a recovery.

A worker that itself answers "not ready" is believed at once; one that was never seen becomes ready at its first
good answer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

DOWN_AFTER = 3
UP_AFTER = 2


class Answer(Enum):
    """What one probe found."""

    READY = "ready"
    DRAINING = "draining"  # the worker says so: it was told to stop
    NOT_READY = "not ready"  # the worker says so
    LOST = "lost"  # no answer in time, or none at all


@dataclass(frozen=True)
class Health:
    healthy: bool = False
    leaving: bool = False
    failures: int = 0
    successes: int = 0
    seen: bool = False

    def after(self, answer: Answer) -> Health:
        if answer is Answer.READY:
            successes = self.successes + 1
            up = self.healthy or not self.seen or successes >= UP_AFTER
            return Health(healthy=up, successes=successes, seen=True)
        if answer is Answer.DRAINING:
            return Health(healthy=True, leaving=True, seen=True)
        if answer is Answer.NOT_READY:
            return Health(healthy=False, failures=DOWN_AFTER, seen=True)
        failures = self.failures + 1
        return replace(self, healthy=self.healthy and failures < DOWN_AFTER, failures=failures, successes=0)
