"""Which prompts a run has trained on, and which it still owes: no prompt is lost or trained twice.

A run's prompts are numbered by position: position p is row ``order(p)`` of the data set. Positions are handed out in
ascending order, end in any, and survive a crash as "everything below ``frontier``, and these few above it". A run that
resumes hands out first what is neither, so what was in flight is neither skipped nor biased to short answers.

    owed, or unseen -> out -> trained | rejected | given up     (spent: never handed out again)
                        `---> owed

A prompt whose rollout failed, or was too old to train on, is owed again; one that the workflow or dynamic sampling
refused is spent. A prompt that fails each of ``MOST_TRIES`` times is given up, or it would go round for ever.
Invariant: ``taken == trained + rejected + returned + given_up + len(out)``.
"""

from __future__ import annotations

import bisect
import random
from collections import deque
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from functools import lru_cache
from typing import Any

MOST_TRIES = 3


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
class Counts:
    """Numbers of positions by outcome; ``taken`` counts each time that one was handed out."""

    taken: int = 0
    trained: int = 0
    rejected: int = 0
    returned: int = 0
    given_up: int = 0


@dataclass
class Frontier:
    """``take`` hands a position out; each of the others ends that, and raises ValueError for one that is not out."""

    frontier: int = 0  # everything below is spent
    beyond: set[int] = field(default_factory=set)  # spent, above the frontier
    out: set[int] = field(default_factory=set)
    owed: list[int] = field(default_factory=list)  # ascending
    unseen: int = 0  # never handed out, from here on
    tries: dict[int, int] = field(default_factory=dict)  # that failed, of positions that are not spent
    counts: Counts = field(default_factory=Counts)

    def take(self) -> int:
        """The position to be worked on next."""
        if self.owed:
            position = self.owed.pop(0)
        else:
            position = self.unseen
            self.unseen += 1
        self.out.add(position)
        self.counts.taken += 1
        return position

    def consume(self, positions: Iterable[int]) -> None:
        """These have been trained on."""
        for position in positions:
            self._spend(position)
            self.counts.trained += 1

    def reject(self, position: int) -> None:
        """Nothing to train on came of it, and nobody is to blame."""
        self._spend(position)
        self.counts.rejected += 1

    def give_back(self, position: int) -> None:
        """Not trained on after all. It will be handed out again, before new ones."""
        self._back(position)
        bisect.insort(self.owed, position)
        self.counts.returned += 1

    def fail(self, position: int, *, hopeless: bool = False) -> bool:
        """Given back, or given up after ``MOST_TRIES`` such ends, at once where it is ``hopeless``. Whether it was
        given up."""
        tried = self.tries.get(position, 0) + 1
        if not hopeless and tried < MOST_TRIES:
            self.give_back(position)
            self.tries[position] = tried
            return False
        self._spend(position)
        self.counts.given_up += 1
        return True

    def _spend(self, position: int) -> None:
        self._back(position)
        self.tries.pop(position, None)
        self.beyond.add(position)
        while self.frontier in self.beyond:
            self.beyond.remove(self.frontier)
            self.frontier += 1

    def _back(self, position: int) -> None:
        if position not in self.out:
            raise ValueError(f"position {position} is not out")
        self.out.remove(position)

    @property
    def spent(self) -> int:
        """The number of positions that are not handed out again."""
        return self.frontier + len(self.beyond)

    def state(self) -> dict[str, Any]:
        """As JSON. What is out counts as owed, and as not taken: whoever resumes does not have it any more."""
        ended = asdict(self.counts) | {"taken": self.counts.taken - len(self.out)}
        tries = [[position, count] for position, count in sorted(self.tries.items())]
        return {
            "frontier": self.frontier,
            "beyond": sorted(self.beyond),
            "unseen": self.unseen,
            "tries": tries,
            "counts": ended,
        }

    @classmethod
    def restored(cls, state: dict[str, Any]) -> Frontier:
        frontier, unseen, beyond = int(state["frontier"]), int(state["unseen"]), set(state["beyond"])
        owed = [position for position in range(frontier, unseen) if position not in beyond]
        spent = frontier + len(beyond)
        told = {"taken": spent, "trained": spent} | dict(state.get("counts", {}))  # older ones do not tell
        counts = Counts(**{each.name: int(told.get(each.name, 0)) for each in fields(Counts)})
        return cls(frontier, beyond, set(), owed, unseen, dict(state.get("tries", [])), counts)


@dataclass
class FailureWindow:
    """Whether the last prompts came to anything: pure. ``window`` ends are looked at."""

    window: int
    first_cause: str | None = None
    _lost: deque[bool] = field(default_factory=deque)

    def ended(self, count: int = 1) -> None:
        """Trained on, or rejected."""
        for _ in range(count):
            self._note(False)

    def given_up(self, cause: str) -> None:
        self.first_cause = self.first_cause or cause
        self._note(True)

    def _note(self, lost: bool) -> None:
        self._lost.append(lost)
        if len(self._lost) > self.window:
            self._lost.popleft()
        if not any(self._lost):
            self.first_cause = None

    @property
    def lost(self) -> int:
        return sum(self._lost)

    @property
    def hopeless(self) -> bool:
        """Most of the last ``window`` prompts were given up."""
        return 2 * self.lost > self.window
