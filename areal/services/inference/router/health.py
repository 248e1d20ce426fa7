"""Health with hysteresis: one lost probe is noise, some in a row are a death, some answers in a row a recovery.

A worker that itself answers "not ready" is believed at once; one that was never ready becomes so at its first good
answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from enum import Enum
from typing import Any


@dataclass(frozen=True)
class Readiness:
    """How a model's workers are probed: how often, how long an answer may take, how many lost ones in a row are a
    death, how many answers in a row a recovery."""

    period_seconds: float = 1.0
    timeout_seconds: float = 2.0
    failure_threshold: int = 3
    success_threshold: int = 2

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Readiness:
        """Raises ValueError naming what is wrong."""
        known = {item.name: type(item.default) for item in fields(cls)}
        for name, value in given.items():
            if name not in known:
                raise ValueError(f"unknown setting {name!r}; known: {', '.join(known)}")
            kind = int if known[name] is int else int | float
            if isinstance(value, bool) or not isinstance(value, kind) or not 0 < value < 1e9:
                raise ValueError(f"{name} must be a {'whole ' if kind is int else ''}number above 0")
        return cls(**given)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


DEFAULT = Readiness()


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
    was_healthy: bool = False

    @property
    def in_doubt(self) -> bool:
        """Some more answers decide whether it is dead, or back."""
        return self.failures > 0 if self.healthy else self.successes > 0

    def after(self, answer: Answer, rules: Readiness = DEFAULT) -> Health:
        if answer is Answer.READY:
            successes = self.successes + 1
            up = self.healthy or not self.was_healthy or successes >= rules.success_threshold
            return Health(healthy=up, successes=successes, seen=True, was_healthy=up or self.was_healthy)
        if answer is Answer.DRAINING:
            return Health(healthy=True, leaving=True, seen=True, was_healthy=True)
        if answer is Answer.NOT_READY:
            return Health(False, failures=rules.failure_threshold, seen=True, was_healthy=self.was_healthy)
        failures = self.failures + 1
        return replace(
            self, healthy=self.healthy and failures < rules.failure_threshold, failures=failures, successes=0
        )
