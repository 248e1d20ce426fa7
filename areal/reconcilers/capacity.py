"""GPUs as a plan sees them: those that are free now, and those that an op of the same plan gives back. Pure.

A GPU that an op frees is handed to an op that waits for it, so that no order in which the plan may run ever holds
more GPUs than there are.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from areal.errors import NoCapacity


@dataclass
class GpuPool:
    """``free`` GPUs can be taken at once; ``_coming`` holds (count, op after which they are free), earliest first."""

    free: int = 0
    _coming: list[tuple[int, int]] = field(default_factory=list)

    @property
    def available(self) -> int:
        return self.free + sum(count for count, _ in self._coming)

    def take(self, count: int, what: str) -> tuple[int, ...]:
        """The ops to wait for before ``count`` more GPUs are there. Raises NoCapacity."""
        if count > self.available:
            raise NoCapacity(
                f"{what} needs {count} GPUs; {self.available} are free",
                hint="areal get processes -o wide shows who holds the GPUs; lower spec.replicas or stop something",
            )
        now = min(count, self.free)
        self.free -= now
        count -= now
        needs = []
        while count:
            coming, op = self._coming.pop(0)
            needs.append(op)
            if coming > count:
                self._coming.insert(0, (coming - count, op))
            count -= min(count, coming)
        return tuple(needs)

    def give(self, count: int, op: int) -> None:
        """``count`` GPUs are free again after ``op``."""
        if count:
            self._coming.append((count, op))

    @contextmanager
    def all_or_nothing(self) -> Iterator[None]:
        """An error inside gives back what was taken."""
        free, coming = self.free, list(self._coming)
        try:
            yield
        except NoCapacity:
            self.free, self._coming = free, coming
            raise
