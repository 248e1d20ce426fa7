"""What becomes of every episode: counts and results, no I/O.

    pending -> running -> accepted -> consumed
                  |  |        `-----> dropped (too old): pending again, or abandoned
                  |  |-> overtaken (would be too old): abandoned
                  |  `-> rejected
                  `----> failed

Invariant: ``submitted == pending + running + accepted + consumed + rejected + failed + abandoned``, for those that are
trained on (``Item.apart`` false). The ones apart (evaluation, a batch awaited as a whole) are outside the window.

A prompt whose result was dropped runs once more, and no more than that; one that is overtaken while it runs is slow by
itself, and does not. Prompts whose answers always take longer than the window would run for ever, and fill it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from areal.client.rollouts.admission import Window, capacity, choose, is_stale, shuffled

_REMEMBERED_FAILURES = 256
_RUNS = 2


@dataclass(frozen=True)
class Item:
    """An episode to run. ``workflow`` runs it; ``accept`` may still reject what it gave. ``apart``: not trained on by
    way of the ledger; its result is for whoever waits for it."""

    number: int
    data: Mapping[str, Any]
    workflow: Any
    task_id: str
    accept: Callable[[Any], bool] | None = None
    apart: bool = False
    is_eval: bool = False


@dataclass(frozen=True)
class Rollout:
    """An episode that was accepted. Versions are those of its oldest and newest token; ``finished`` counts ends."""

    item: Item
    trajectory: Any
    head_version: int
    tail_version: int
    finished: int
    attempts: int = 1
    seconds: float = 0.0

    @property
    def number(self) -> int:
        return self.item.number

    @property
    def task_id(self) -> str:
        return self.item.task_id

    @property
    def data(self) -> Mapping[str, Any]:
        return self.item.data


@dataclass(frozen=True)
class Failure:
    """An episode that did not give a result: no reward of 0, no row. ``blame``: caller, service, infrastructure,
    reward or workflow."""

    task_id: str
    blame: str
    error: BaseException
    attempts: int


class Cause(StrEnum):
    REJECTED = "rejected"  # by the workflow, or as not worth training on
    FAILED = "failed"
    STALE = "stale"  # its result was too old, or would have been


@dataclass(frozen=True)
class End:
    """An episode that will give nothing to train on. ``failure``: where it failed."""

    data: Mapping[str, Any]
    cause: Cause
    failure: Failure | None = None


@dataclass
class Counts:
    """Since the start, of episodes that are trained on. ``dropped`` counts results that were too old, or would
    have been; ``abandoned`` the prompts that do not run again for it."""

    submitted: int = 0
    accepted: int = 0
    consumed: int = 0
    rejected: int = 0
    failed: int = 0
    dropped: int = 0
    abandoned: int = 0


@dataclass
class Ledger:
    window: Window
    version: int = 0
    seed: int = 0
    counts: Counts = field(default_factory=Counts)
    pending: deque[Item] = field(default_factory=deque)
    running: set[int] = field(default_factory=set)
    apart: set[int] = field(default_factory=set)
    accepted: dict[int, Rollout] = field(default_factory=dict)
    in_training: int = 0
    failures: deque[Failure] = field(default_factory=lambda: deque(maxlen=_REMEMBERED_FAILURES))
    failing: int = 0  # failures since the last episode that gave a result
    rejecting: int = 0  # rejected since the last that was accepted
    tried: int = 0  # accepted and rejected since the last batch
    ends: list[End] | None = None  # not told yet; None: nobody asks
    _waiting_apart: deque[Item] = field(default_factory=deque)
    _drops: dict[int, int] = field(default_factory=dict)
    _maybe_stale: bool = False

    def submit(self, item: Item) -> None:
        if item.apart:
            self._waiting_apart.append(item)
            return
        self.counts.submitted += 1
        self.pending.append(item)

    def capacity(self) -> int:
        return capacity(
            self.window,
            running=len(self.running),
            unconsumed=len(self.accepted),
            in_training=self.in_training,
            outside=len(self.apart),
        )

    def next_to_run(self) -> Item | None:
        """Marked as running. Those apart go first: somebody waits for each of them."""
        if self._waiting_apart:
            if len(self.running) + len(self.apart) >= self.window.concurrency:
                return None
            item = self._waiting_apart.popleft()
            self.apart.add(item.number)
            return item
        if not self.pending or self.capacity() == 0:
            return None
        item = self.pending.popleft()
        self.running.add(item.number)
        return item

    def ended(self, item: Item, rollout: Rollout | None) -> None:
        """With a result, or rejected."""
        self.failing = 0
        if item.apart:
            self.apart.discard(item.number)
            return
        self.running.discard(item.number)
        self.tried += 1
        if rollout is None:
            self._drops.pop(item.number, None)
            self.counts.rejected += 1
            self.rejecting += 1
            self._tell(End(item.data, Cause.REJECTED))
            return
        self.counts.accepted += 1
        self.rejecting = 0
        self.accepted[item.number] = rollout
        self._maybe_stale |= is_stale(self.window, rollout.head_version, self.version)

    def failed(self, item: Item, failure: Failure) -> None:
        self.failures.append(failure)
        self.failing += 1
        if item.apart:
            self.apart.discard(item.number)
            return
        self.running.discard(item.number)
        self._drops.pop(item.number, None)
        self.counts.failed += 1
        self._tell(End(item.data, Cause.FAILED, failure))

    def overtaken(self, item: Item) -> None:
        """It runs no more: whatever it would give is too old already."""
        self.running.discard(item.number)
        self._drops.pop(item.number, None)
        self.counts.dropped += 1
        self._abandon(item)

    def cancelled(self, item: Item) -> None:
        """It runs no more, and is as if it had not begun."""
        if item.apart:
            self.apart.discard(item.number)
        else:
            self.running.discard(item.number)
            self.pending.appendleft(item)

    def drop_stale(self) -> int:
        """Accepted results that are too old for the next batch: their prompts run again, or are abandoned. How many."""
        if not self._maybe_stale:
            return 0
        self._maybe_stale = False
        stale = [each for each in self.accepted.values() if is_stale(self.window, each.head_version, self.version)]
        for rollout in reversed(stale):
            del self.accepted[rollout.number]
            self.counts.accepted -= 1
            self.counts.dropped += 1
            self._run_again(rollout.item)
        return len(stale)

    def _run_again(self, item: Item) -> None:
        drops = self._drops.pop(item.number, 0) + 1
        if drops >= _RUNS:
            self._abandon(item)
        else:
            self._drops[item.number] = drops
            self.pending.appendleft(item)

    def _abandon(self, item: Item) -> None:
        self.counts.abandoned += 1
        self._tell(End(item.data, Cause.STALE))

    def _tell(self, end: End) -> None:
        if self.ends is not None:
            self.ends.append(end)

    def ends_so_far(self) -> list[End]:
        """Since this was last called; from the first call on they are kept for the next."""
        ends, self.ends = self.ends or [], []
        return ends

    def take(self, count: int) -> list[Rollout] | None:
        """A batch of exactly ``count``, or None."""
        self.drop_stale()
        if len(self.accepted) < count:
            return None
        return self._consume(choose(self.accepted.values(), count))

    def take_tried(self, count: int) -> list[Rollout] | None:
        """What was accepted of at least ``count`` episodes that ended, or None. May be short, or empty."""
        self.drop_stale()
        return self._consume(choose(self.accepted.values(), count)) if self.tried >= count else None

    def take_one(self, number: int) -> Rollout | None:
        return self._consume([self.accepted[number]])[0] if number in self.accepted else None

    def _consume(self, chosen: list[Rollout]) -> list[Rollout]:
        for rollout in chosen:
            del self.accepted[rollout.number]
            self._drops.pop(rollout.number, None)
        self.counts.accepted -= len(chosen)
        self.counts.consumed += len(chosen)
        self.in_training += len(chosen)
        self.tried = 0
        return shuffled(chosen, self.seed)

    def set_version(self, version: int) -> None:
        """Raises ValueError for an older one. A newer one ends the training of what was taken."""
        if version < self.version:
            raise ValueError(f"the version is {self.version}: it cannot become {version}")
        if version > self.version:
            self.version, self.in_training, self._maybe_stale = version, 0, True

    @property
    def idle(self) -> bool:
        """Nothing runs, and nothing waits to run."""
        return not (self.pending or self.running or self.apart or self._waiting_apart)

    def outstanding(self) -> list[Item]:
        """What was submitted and not consumed, for a checkpoint: those that ran are only pending there."""
        return [*(each.item for each in self.accepted.values()), *self.pending]
