"""The prompts that a run has consumed, so that across crashes no prompt is lost or trained on twice.

Prompts are numbered by position: position p is row ``order(p)`` of the data set. Positions are taken in ascending order
and end in any order. A checkpoint stores "all below ``frontier``, and these few above it" as spent. A resumed run first
takes the positions in between that are not spent, so prompts in flight are neither skipped nor biased to short
responses.

    returned, or unseen -> in_flight -> trained | rejected | given up     (spent: never taken again)
                               `------> returned

A prompt whose rollout failed, or was too stale, is returned; one that the workflow or dynamic sampling rejected is
spent. A prompt that fails ``MAX_TRIES`` times is given up.
Invariant: ``taken == trained + rejected + returned + given_up + len(in_flight)``.
"""

from __future__ import annotations

import bisect
import hashlib
import json
import random
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from areal.dataclasses import asdict, dataclass, field, fields

MAX_TRIES = 3
_MOST_ROWS = 100_000


@dataclass(frozen=True)
class DataOrder:
    """The order of ``count`` rows over epochs. ``shuffle``: each epoch has a new permutation. ``drop_last``: the last
    batch of an epoch is left out if it is incomplete. ``source`` and ``digest`` identify the rows."""

    count: int
    batch_size: int = 1
    shuffle: bool = True
    drop_last: bool = True
    seed: int = 1
    source: str = ""
    digest: str = ""

    def changes(self, earlier: Mapping[str, object]) -> list[str]:
        """Return the differences from the order in a checkpoint. The same rows from another source are not a
        difference; older checkpoints have no digest."""
        names = ("count", "batch_size", "shuffle", "drop_last", "seed")
        found = [
            f"{name} {earlier[name]} -> {getattr(self, name)}" for name in names if earlier[name] != getattr(self, name)
        ]
        before = str(earlier.get("digest", ""))
        if before and self.digest and before != self.digest:
            was, now = (
                f"{source} (sha256 {digest[:12]})"
                for source, digest in ((earlier["source"], before), (self.source, self.digest))
            )
            found.append(f"rows of {was} -> {now}")
        return found

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
        """Return the rows of batch number ``step``, from 0; the last of an epoch may be short."""
        epoch, number = divmod(step, self.batches_per_epoch)
        first = epoch * self.epoch_size + number * self.batch_size
        last = min(first + self.batch_size, (epoch + 1) * self.epoch_size)
        return [self.row(position) for position in range(first, last)]


@lru_cache(maxsize=4)
def _permutation(count: int, seed: int, epoch: int) -> tuple[int, ...]:
    rows = list(range(count))
    random.Random(f"{seed}/{epoch}").shuffle(rows)
    return tuple(rows)


def rows_digest(rows: Sequence[Any]) -> str:
    """Return the SHA-256 of the content of rows. Of more than 100,000 rows only the first, every n-th and the last are
    read, because reading a row may be slow; changes in the other rows are not noticed."""
    found, last = hashlib.sha256(), len(rows) - 1
    places = range(0, len(rows), 1 + last // _MOST_ROWS)
    for place in (*places, *([last] if places and places[-1] != last else ())):
        try:
            text = json.dumps(rows[place], sort_keys=True, default=_plain)
        except (TypeError, ValueError):  # keys that are not text, or of several types
            text = json.dumps(_with_text_keys(rows[place]), sort_keys=True, default=_plain)
        found.update(text.encode())
        found.update(b"\n")
    return found.hexdigest()


def _with_text_keys(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {json.dumps(_with_text_keys(key), default=_plain): _with_text_keys(each) for key, each in value.items()}
    return [_with_text_keys(each) for each in value] if isinstance(value, list | tuple) else value


def _plain(value: Any) -> Any:
    """Convert a column that is not JSON: arrays and tensors to lists, other objects to the name of their type, because
    their text contains addresses."""
    if isinstance(value, Mapping):
        return dict(value)
    return value.tolist() if hasattr(value, "tolist") else type(value).__qualname__


@dataclass
class Counts:
    """Numbers of positions by outcome; ``taken`` counts every ``take``."""

    taken: int = 0
    trained: int = 0
    rejected: int = 0
    returned: int = 0
    given_up: int = 0


@dataclass
class Frontier:
    """The positions that are spent, in flight or returned. ``take`` puts a position in flight; the other methods end
    it, and raise ValueError for one that is not in flight."""

    frontier: int = 0  # everything below is spent
    beyond: set[int] = field(default_factory=set)  # spent, above the frontier
    in_flight: set[int] = field(default_factory=set)
    returned: list[int] = field(default_factory=list)  # ascending
    unseen: int = 0  # the lowest position that was never taken
    tries: dict[int, int] = field(default_factory=dict)  # failures of positions that are not spent
    counts: Counts = field(default_factory=Counts)

    def take(self) -> int:
        """Return the next position: a returned one, else a new one."""
        if self.returned:
            position = self.returned.pop(0)
        else:
            position = self.unseen
            self.unseen += 1
        self.in_flight.add(position)
        self.counts.taken += 1
        return position

    def consume(self, positions: Iterable[int]) -> None:
        """Record positions that were trained on."""
        for position in positions:
            self._spend(position)
            self.counts.trained += 1

    def reject(self, position: int) -> None:
        """Record a rollout that the workflow or dynamic sampling rejected."""
        self._spend(position)
        self.counts.rejected += 1

    def give_back(self, position: int) -> None:
        """Make a position that was not trained on available again. It is taken before new ones."""
        self._remove_in_flight(position)
        bisect.insort(self.returned, position)
        self.counts.returned += 1

    def fail(self, position: int, *, is_permanent: bool = False) -> bool:
        """Give the position back, or give it up after ``MAX_TRIES`` failures or if ``is_permanent``. Return whether it
        was given up."""
        tried = self.tries.get(position, 0) + 1
        if not is_permanent and tried < MAX_TRIES:
            self.give_back(position)
            self.tries[position] = tried
            return False
        self._spend(position)
        self.counts.given_up += 1
        return True

    def _spend(self, position: int) -> None:
        self._remove_in_flight(position)
        self.tries.pop(position, None)
        self.beyond.add(position)
        while self.frontier in self.beyond:
            self.beyond.remove(self.frontier)
            self.frontier += 1

    def _remove_in_flight(self, position: int) -> None:
        if position not in self.in_flight:
            raise ValueError(f"position {position} is not in flight")
        self.in_flight.remove(position)

    @property
    def spent(self) -> int:
        """The number of positions that are never taken again."""
        return self.frontier + len(self.beyond)

    def state(self) -> dict[str, Any]:
        """Return the state as JSON. Positions in flight count as not taken: a resumed run takes them again."""
        counts = asdict(self.counts) | {"taken": self.counts.taken - len(self.in_flight)}
        tries = [[position, count] for position, count in sorted(self.tries.items())]
        return {
            "frontier": self.frontier,
            "beyond": sorted(self.beyond),
            "unseen": self.unseen,
            "tries": tries,
            "counts": counts,
        }

    @classmethod
    def restored(cls, state: dict[str, Any]) -> Frontier:
        frontier, unseen, beyond = int(state["frontier"]), int(state["unseen"]), set(state["beyond"])
        returned = [position for position in range(frontier, unseen) if position not in beyond]
        spent = frontier + len(beyond)
        stored = {"taken": spent, "trained": spent} | dict(state.get("counts", {}))  # none in older checkpoints
        counts = Counts(**{each.name: int(stored.get(each.name, 0)) for each in fields(Counts)})
        return cls(frontier, beyond, set(), returned, unseen, dict(state.get("tries", [])), counts)


@dataclass
class FailureWindow:
    """Counts the prompts that were given up among the last ``window`` ends."""

    window: int
    first_cause: str | None = None
    _given_up: deque[bool] = field(default_factory=deque)

    def ended(self, count: int = 1) -> None:
        """Record prompts that were trained on or rejected."""
        for _ in range(count):
            self._record(False)

    def given_up(self, cause: str) -> None:
        self.first_cause = self.first_cause or cause
        self._record(True)

    def _record(self, given_up: bool) -> None:
        self._given_up.append(given_up)
        if len(self._given_up) > self.window:
            self._given_up.popleft()
        if not any(self._given_up):
            self.first_cause = None

    @property
    def count(self) -> int:
        return sum(self._given_up)

    @property
    def is_exceeded(self) -> bool:
        """Whether most of the last ``window`` prompts were given up."""
        return 2 * self.count > self.window
