"""Which prompts a run has trained on, and which it still owes: no prompt is lost or trained twice.

A run's prompts are numbered by position: position p is row ``order(p)`` of the data set. Positions are handed out in
ascending order, trained on in any, and survive a crash as "everything below ``frontier``, and these few above it". A
run that resumes hands out the unconsumed ones first, so what was in flight is neither skipped nor biased to short
answers.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any


@dataclass(frozen=True)
class DataOrder:
    """The order of a data set of ``count`` rows, over epochs: a new permutation each where ``shuffle``.

    ``drop_last`` leaves out what does not fill a batch of ``batch_size`` at the end of an epoch.
    """

    count: int
    batch_size: int = 1
    shuffle: bool = True
    drop_last: bool = True
    seed: int = 1

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError("the data set has no rows")
        if self.drop_last and self.batch_size > self.count:
            raise ValueError(f"a batch of {self.batch_size} is more than the {self.count} rows of the data set")

    @property
    def epoch_size(self) -> int:
        """Positions in an epoch."""
        return self.count - self.count % self.batch_size if self.drop_last else self.count

    @property
    def batches_per_epoch(self) -> int:
        return -(-self.epoch_size // self.batch_size)

    def epoch(self, position: int) -> int:
        return position // self.epoch_size

    def row(self, position: int) -> int:
        epoch, place = divmod(position, self.epoch_size)
        return _permutation(self.count, self.seed, epoch)[place] if self.shuffle else place

    def batch(self, step: int) -> list[int]:
        """The rows of batch number ``step``, from 0; the last of an epoch may be short."""
        epoch, number = divmod(step, self.batches_per_epoch)
        first = epoch * self.epoch_size + number * self.batch_size
        last = min(first + self.batch_size, (epoch + 1) * self.epoch_size)
        return [self.row(position) for position in range(first, last)]


@lru_cache(maxsize=4)
def _permutation(count: int, seed: int, epoch: int) -> tuple[int, ...]:
    rows = list(range(count))
    random.Random(f"{seed}/{epoch}").shuffle(rows)
    return tuple(rows)


@dataclass
class Frontier:
    """Every position is owed, out, or consumed. ``take`` makes one out; ``consume`` and ``give_back`` end that."""

    frontier: int = 0  # everything below is consumed
    beyond: set[int] = field(default_factory=set)  # consumed, above the frontier
    out: set[int] = field(default_factory=set)
    owed: list[int] = field(default_factory=list)  # given back, ascending
    unseen: int = 0  # never handed out, from here on

    def take(self) -> int:
        """The position to be worked on next."""
        if self.owed:
            position = self.owed.pop(0)
        else:
            position = self.unseen
            self.unseen += 1
        self.out.add(position)
        return position

    def consume(self, positions: Iterable[int]) -> None:
        """These have been trained on. Raises ValueError for one that is not out."""
        for position in positions:
            self._back(position)
            self.beyond.add(position)
        while self.frontier in self.beyond:
            self.beyond.remove(self.frontier)
            self.frontier += 1

    def give_back(self, position: int) -> None:
        """Not trained on after all: too stale, or failed. It will be handed out again, before new ones."""
        self._back(position)
        self.owed.append(position)
        self.owed.sort()

    def _back(self, position: int) -> None:
        if position not in self.out:
            raise ValueError(f"position {position} is not out")
        self.out.remove(position)

    @property
    def consumed(self) -> int:
        """How many positions have been trained on."""
        return self.frontier + len(self.beyond)

    def state(self) -> dict[str, Any]:
        """As JSON. What is out counts as owed: whoever resumes does not have it any more."""
        return {"frontier": self.frontier, "beyond": sorted(self.beyond), "unseen": self.unseen}

    @classmethod
    def restored(cls, state: dict[str, Any]) -> Frontier:
        frontier, unseen, beyond = int(state["frontier"]), int(state["unseen"]), set(state["beyond"])
        owed = [position for position in range(frontier, unseen) if position not in beyond]
        return cls(frontier=frontier, beyond=beyond, owed=owed, unseen=unseen)
