"""How far weights that are still being written or received have come: what is there can travel, and be made ready,
while the rest comes."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from areal.errors import ArealError


class Arrival:
    """``ends``: at which byte each tensor is whole. Written by one thread, waited for by another."""

    def __init__(self, ends: Mapping[str, int]) -> None:
        self.ends = ends
        self._changed = threading.Condition()
        self._bytes = 0
        self._failure: str | None = None

    @property
    def is_whole(self) -> bool:
        return self._bytes >= max(self.ends.values(), default=0)

    def reach(self, count: int) -> None:
        """The first ``count`` bytes are there."""
        with self._changed:
            self._bytes = count
            self._changed.notify_all()

    def fail(self, why: str) -> None:
        """No more will come."""
        with self._changed:
            self._failure = self._failure or why
            self._changed.notify_all()

    def wait(self, name: str) -> None:
        """Return when the tensor is there. Raises ArealError when it will not come; one that nobody announced is
        waited for as all of them."""
        self.wait_for(self.ends.get(name, max(self.ends.values(), default=0)))

    def wait_all(self) -> None:
        self.wait_for(max(self.ends.values(), default=0))

    def wait_for(self, end: int) -> None:
        """Return when the first ``end`` bytes are there. Raises ArealError when they will not come."""
        with self._changed:
            self._changed.wait_for(lambda: self._bytes >= end or self._failure is not None)
            if self._bytes < end:
                raise ArealError(f"the weights did not arrive: {self._failure}")
