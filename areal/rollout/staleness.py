"""Staleness: the number of episodes that may start, the outcome of each, results too old to train on. No I/O.

Let B be the trainer's batch, eta the versions that the oldest token of a trajectory may lag behind the weights that it
trains. An episode occupies the window from its start until the trainer has moved on from the batch it was in, that is
until the next version. With at most (eta + 1) * B episodes in the window, one that starts now is consumed at most eta
versions later, provided that batches are taken oldest first. A straggler is aborted as soon as its first token is too
old, or dropped where it would be consumed; its place is free again. Dropped, rejected and failed episodes leave the
window at once: the counts are of the present state, so nothing leaks and a restart corrects nothing.

    pending -> running -> accepted -> consumed
                  |  |        `-----> dropped (too old): pending again, or abandoned
                  |  |-> aborted (would be too old): abandoned
                  |  `-> rejected
                  `----> failed

Invariant: ``submitted == pending + running + accepted + consumed + rejected + failed + abandoned``, for episodes in the
window. Evaluation and batches that are awaited as a whole run outside it (``EpisodeSpec.outside_window``).

A prompt whose result was dropped runs once more, and no more than that; one that is aborted while it runs is slow by
itself, and does not. Prompts whose answers always take longer than the window would run forever, and fill it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import blake2b
from typing import Any

from areal.rollout.failures import Failure


@dataclass(frozen=True)
class StalenessWindow:
    """``batch`` and ``concurrency`` count episodes (groups). ``staleness`` is eta."""

    batch: int
    staleness: int
    concurrency: int

    @property
    def size(self) -> int:
        return (self.staleness + 1) * self.batch


def capacity(window: StalenessWindow, *, running: int, unconsumed: int, in_training: int, outside: int = 0) -> int:
    """The number of episodes that may start now; never negative.

    ``running`` and ``unconsumed`` (accepted, not yet taken) are of this window; ``in_training`` were taken since the
    last version; ``outside`` run too, but are not trained on (evaluation): they count for concurrency only.
    """
    by_concurrency = window.concurrency - running - outside
    by_staleness = window.size - (running + unconsumed + in_training)
    return max(0, min(by_concurrency, by_staleness))


def is_stale(window: StalenessWindow, head_version: int, version: int) -> bool:
    """``head_version``: that of the oldest token."""
    return version - head_version > window.staleness


_REMEMBERED_FAILURES = 256
_RUNS = 2  # of a prompt whose results are dropped


@dataclass(frozen=True)
class EpisodeSpec:
    """An episode to run. ``workflow`` runs it; ``accept`` may still reject what it gave. ``outside_window``:
    not in a batch of ``take``; its result is for the caller that waits for it."""

    number: int
    data: Mapping[str, Any]
    workflow: Any
    task_id: str
    accept: Callable[[Any], bool] | None = None
    outside_window: bool = False
    is_eval: bool = False


@dataclass(frozen=True)
class Rollout:
    """An episode that was accepted. Versions are those of its oldest and newest token."""

    item: EpisodeSpec
    trajectory: Any
    head_version: int
    tail_version: int
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


def oldest_first(ended: Iterable[Rollout], count: int) -> list[Rollout]:
    """The ones to consume: oldest weights first, then in the order in which they ended, which ``ended`` has."""
    return sorted(ended, key=lambda each: each.head_version)[:count]


def shuffled(chosen: Sequence[Rollout], seed: int) -> list[Rollout]:
    """A batch in an order that depends neither on when they ended nor on when they were submitted, but is the same in
    every run: so a batch's first minibatch is not that of the short answers."""
    return sorted(chosen, key=lambda each: blake2b(f"{seed}:{each.number}".encode(), digest_size=8).digest())


class EndCause(StrEnum):
    REJECTED = "rejected"  # by the workflow, or as not worth training on
    FAILED = "failed"
    STALE = "stale"  # its result was too old, or would have been


@dataclass(frozen=True)
class EpisodeEnd:
    """An episode that will give nothing to train on. ``failure``: where it failed."""

    data: Mapping[str, Any]
    cause: EndCause
    failure: Failure | None = None


@dataclass
class EpisodeCounts:
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
class StalenessManager:
    window: StalenessWindow
    version: int = 0
    seed: int = 0
    counts: EpisodeCounts = field(default_factory=EpisodeCounts)
    pending: deque[EpisodeSpec] = field(default_factory=deque)
    running: set[int] = field(default_factory=set)
    outside: set[int] = field(default_factory=set)
    accepted: dict[int, Rollout] = field(default_factory=dict)  # in the order in which they ended
    in_training: int = 0
    failures: deque[Failure] = field(default_factory=lambda: deque(maxlen=_REMEMBERED_FAILURES))
    failing: int = 0  # failures since the last episode that gave a result
    rejecting: int = 0  # rejected since the last that was accepted
    completed: int = 0  # accepted and rejected since the last batch
    ends: list[EpisodeEnd] | None = None  # not read yet; None until ``drain_ends`` is first called
    _pending_outside: deque[EpisodeSpec] = field(default_factory=deque)
    _drops: dict[int, int] = field(default_factory=dict)
    _maybe_stale: bool = False

    def submit(self, item: EpisodeSpec) -> None:
        if item.outside_window:
            self._pending_outside.append(item)
            return
        self.counts.submitted += 1
        self.pending.append(item)

    def capacity(self) -> int:
        return capacity(
            self.window,
            running=len(self.running),
            unconsumed=len(self.accepted),
            in_training=self.in_training,
            outside=len(self.outside),
        )

    def next_to_run(self) -> EpisodeSpec | None:
        """Marked as running. Those outside the window go first: a caller waits for each of them."""
        if self._pending_outside:
            if len(self.running) + len(self.outside) >= self.window.concurrency:
                return None
            item = self._pending_outside.popleft()
            self.outside.add(item.number)
            return item
        if not self.pending or self.capacity() == 0:
            return None
        item = self.pending.popleft()
        self.running.add(item.number)
        return item

    def ended(self, item: EpisodeSpec, rollout: Rollout | None) -> None:
        """The episode ended with a result, or was rejected."""
        self.failing = 0
        if item.outside_window:
            self.outside.discard(item.number)
            return
        self.running.discard(item.number)
        self.completed += 1
        if rollout is None:
            self._drops.pop(item.number, None)
            self.counts.rejected += 1
            self.rejecting += 1
            self._record_end(EpisodeEnd(item.data, EndCause.REJECTED))
            return
        self.counts.accepted += 1
        self.rejecting = 0
        self.accepted[item.number] = rollout
        self._maybe_stale |= is_stale(self.window, rollout.head_version, self.version)

    def failed(self, item: EpisodeSpec, failure: Failure) -> None:
        self.failures.append(failure)
        self.failing += 1
        if item.outside_window:
            self.outside.discard(item.number)
            return
        self.running.discard(item.number)
        self._drops.pop(item.number, None)
        self.counts.failed += 1
        self._record_end(EpisodeEnd(item.data, EndCause.FAILED, failure))

    def aborted(self, item: EpisodeSpec) -> None:
        """It runs no more: whatever it would give is too old already."""
        self.running.discard(item.number)
        self._drops.pop(item.number, None)
        self.counts.dropped += 1
        self._abandon(item)

    def cancelled(self, item: EpisodeSpec) -> None:
        """It runs no more, and is as if it had not begun."""
        if item.outside_window:
            self.outside.discard(item.number)
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
            drops = self._drops.pop(rollout.number, 0) + 1
            if drops >= _RUNS:
                self._abandon(rollout.item)
            else:
                self._drops[rollout.number] = drops
                self.pending.appendleft(rollout.item)
        return len(stale)

    def _abandon(self, item: EpisodeSpec) -> None:
        self.counts.abandoned += 1
        self._record_end(EpisodeEnd(item.data, EndCause.STALE))

    def _record_end(self, end: EpisodeEnd) -> None:
        if self.ends is not None:
            self.ends.append(end)

    def drain_ends(self) -> list[EpisodeEnd]:
        """Since this was last called; from the first call on they are kept for the next."""
        ends, self.ends = self.ends or [], []
        return ends

    def take(self, count: int) -> list[Rollout] | None:
        """A batch of exactly ``count``, or None."""
        self.drop_stale()
        if len(self.accepted) < count:
            return None
        return self._consume(oldest_first(self.accepted.values(), count))

    def take_completed(self, count: int) -> list[Rollout] | None:
        """The accepted of at least ``count`` episodes that ended, or None. May be short, or empty."""
        self.drop_stale()
        return self._consume(oldest_first(self.accepted.values(), count)) if self.completed >= count else None

    def take_one(self, number: int) -> Rollout | None:
        return self._consume([self.accepted[number]])[0] if number in self.accepted else None

    def _consume(self, chosen: list[Rollout]) -> list[Rollout]:
        for rollout in chosen:
            del self.accepted[rollout.number]
            self._drops.pop(rollout.number, None)
        self.counts.accepted -= len(chosen)
        self.counts.consumed += len(chosen)
        self.in_training += len(chosen)
        self.completed = 0
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
        return not (self.pending or self.running or self.outside or self._pending_outside)

    def outstanding(self) -> list[EpisodeSpec]:
        """Episodes that were submitted and not consumed, for a checkpoint: running ones are pending there."""
        return [*(each.item for each in self.accepted.values()), *self.pending]
