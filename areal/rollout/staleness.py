"""Bounded staleness: how many episodes may start, their outcomes, and results too old to train on. No I/O.

Let B be the trainer's batch size, and eta the number of versions that the oldest token of a trajectory may lag behind
the weights that it trains. An episode occupies the window from its start until the version after the batch that
consumed it. With at most (eta + 1) * B episodes in the window, one that starts now is consumed at most eta versions
later, provided that batches are taken oldest first. A straggler is aborted as soon as its first token is too old, or
dropped when it would be consumed. Dropped, rejected and failed episodes leave the window at once. All counts derive
from the current state, so no slot can leak.

    pending -> running -> accepted -> consumed
                  |  |        `-----> dropped (too old): pending again, or abandoned
                  |  |-> aborted (would be too old): abandoned
                  |  `-> rejected
                  `----> failed

Invariant, for episodes in the window: ``submitted == pending + running + accepted + consumed + rejected + failed +
abandoned``. Evaluation and ``run_batch`` run outside it (``EpisodeSpec.outside_window``).

A prompt whose result was dropped runs once more; one that was aborted does not. Otherwise prompts that always take
longer than the window allows would run forever and fill it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from enum import StrEnum
from hashlib import blake2b
from typing import Any

from areal.dataclasses import dataclass, field
from areal.rollout.failures import Failure

_REMEMBERED_FAILURES = 256
_MAX_RUNS = 2  # how often a prompt runs whose results are dropped


@dataclass(frozen=True)
class StalenessWindow:
    """Limits of episodes. ``batch`` and ``concurrency`` count episodes (groups). ``staleness`` is eta."""

    batch: int
    staleness: int
    concurrency: int

    @property
    def size(self) -> int:
        return (self.staleness + 1) * self.batch


def capacity(window: StalenessWindow, *, running: int, unconsumed: int, in_training: int, outside: int = 0) -> int:
    """Return the number of episodes that may start now; never negative.

    ``running`` and ``unconsumed`` (accepted, not yet taken) are in the window; ``in_training`` were taken since the
    last version; ``outside`` run outside the window (evaluation) and count for concurrency only.
    """
    by_concurrency = window.concurrency - running - outside
    by_staleness = window.size - (running + unconsumed + in_training)
    return max(0, min(by_concurrency, by_staleness))


def is_stale(window: StalenessWindow, head_version: int, version: int) -> bool:
    """Return whether a result with the oldest token of ``head_version`` is too old to train ``version``."""
    return version - head_version > window.staleness


@dataclass(frozen=True)
class EpisodeSpec:
    """An episode to run by ``workflow``; ``accept`` may reject its trajectory. ``outside_window``: its caller waits for
    it, and no batch of ``take`` contains it. ``place``: its place in the order of the data, the same in every run; ""
    stands for its number."""

    number: int
    data: Mapping[str, Any]
    workflow: Any
    task_id: str
    accept: Callable[[Any], bool] | None = None
    outside_window: bool = False
    is_eval: bool = False
    place: str = ""


@dataclass(frozen=True)
class Rollout:
    """An accepted episode, with the versions of its oldest and newest token. ``span``: that of its trace."""

    item: EpisodeSpec
    trajectory: Any
    head_version: int
    tail_version: int
    attempts: int = 1
    seconds: float = 0.0
    span: Any = None

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
    """Return the first ``count`` by oldest weights, then by the order of ``ended``."""
    return sorted(ended, key=lambda each: each.head_version)[:count]


def shuffled(chosen: Sequence[Rollout], seed: int) -> list[Rollout]:
    """Return a batch in a reproducible order that does not depend on when its episodes were submitted and ended.
    Otherwise the first minibatch would have the short responses."""
    names = {each.number: f"{seed}:{each.item.place or each.number}".encode() for each in chosen}
    return sorted(chosen, key=lambda each: blake2b(names[each.number], digest_size=8).digest())


class EndCause(StrEnum):
    REJECTED = "rejected"  # by the workflow or by ``accept``
    FAILED = "failed"
    STALE = "stale"  # its result was too old, or would have been


@dataclass(frozen=True)
class EpisodeEnd:
    """An episode that ended without a result to train on. ``failure``: its failure, if it failed."""

    data: Mapping[str, Any]
    cause: EndCause
    failure: Failure | None = None


@dataclass
class EpisodeCounts:
    """Totals of episodes in the window. ``dropped``: results that were too stale, also of aborted episodes;
    ``abandoned``: the prompts of these that do not run again."""

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
    consecutive_failures: int = 0  # until an episode ends well
    consecutive_rejections: int = 0  # until one is accepted
    completed: int = 0  # accepted and rejected, and not yet counted for a batch
    ends: deque[EpisodeEnd] | None = None  # since ``drain_ends``; None until its first call
    on_abandoned: Callable[[EpisodeSpec], None] = lambda item: None
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
        """Take the next pending episode. Those outside the window go first: a caller waits for each of them."""
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
        """Record a result; None: the episode was rejected."""
        self.consecutive_failures = 0
        if not self._leave(item):
            return
        self.completed += 1
        if rollout is None:
            self._drops.pop(item.number, None)
            self.counts.rejected += 1
            self.consecutive_rejections += 1
            self._record_end(EpisodeEnd(item.data, EndCause.REJECTED))
            return
        self.counts.accepted += 1
        self.consecutive_rejections = 0
        self.accepted[item.number] = rollout
        self._maybe_stale |= is_stale(self.window, rollout.head_version, self.version)

    def failed(self, item: EpisodeSpec, failure: Failure) -> None:
        self.failures.append(failure)
        self.consecutive_failures += 1
        if not self._leave(item):
            return
        self._drops.pop(item.number, None)
        self.counts.failed += 1
        self._record_end(EpisodeEnd(item.data, EndCause.FAILED, failure))

    def aborted(self, item: EpisodeSpec) -> None:
        """Record an episode that was aborted as too stale, or, outside the window, because no caller waits."""
        if not self._leave(item):
            return
        self._drops.pop(item.number, None)
        self.counts.dropped += 1
        self._abandon(item)

    def cancelled(self, item: EpisodeSpec) -> None:
        """Make a cancelled episode pending again."""
        if self._leave(item):
            self.pending.appendleft(item)

    def _leave(self, item: EpisodeSpec) -> bool:
        """Remove an episode from those that run. Return whether it counts in the window."""
        (self.outside if item.outside_window else self.running).discard(item.number)
        return not item.outside_window

    def withdraw(self, numbers: Container[int]) -> None:
        """Forget pending episodes outside the window."""
        self._pending_outside = deque(item for item in self._pending_outside if item.number not in numbers)

    def drop_stale(self) -> int:
        """Drop accepted results that are too stale; their prompts run again or are abandoned. Returns their number."""
        if not self._maybe_stale:
            return 0
        self._maybe_stale = False
        stale = [each for each in self.accepted.values() if is_stale(self.window, each.head_version, self.version)]
        for rollout in reversed(stale):
            del self.accepted[rollout.number]
            self.completed -= 1
            self.counts.accepted -= 1
            self.counts.dropped += 1
            drops = self._drops.pop(rollout.number, 0) + 1
            if drops >= _MAX_RUNS:
                self._abandon(rollout.item)
            else:
                self._drops[rollout.number] = drops
                self.pending.appendleft(rollout.item)
        return len(stale)

    def _abandon(self, item: EpisodeSpec) -> None:
        self.counts.abandoned += 1
        self._record_end(EpisodeEnd(item.data, EndCause.STALE))
        self.on_abandoned(item)

    def _record_end(self, end: EpisodeEnd) -> None:
        if self.ends is not None:
            self.ends.append(end)

    def drain_ends(self) -> list[EpisodeEnd]:
        """Return the ends since the last call; the first call starts the record. Call it from one thread, which may be
        another one than that of the other calls."""
        if self.ends is None:
            self.ends = deque()
        return [self.ends.popleft() for _ in range(len(self.ends))]

    def take(self, count: int) -> list[Rollout] | None:
        """Return a batch of exactly ``count``, or None."""
        self.drop_stale()
        if len(self.accepted) < count:
            return None
        taken = self._consume(oldest_first(self.accepted.values(), count))
        self.completed = len(self.accepted)
        return taken

    def take_completed(self, count: int) -> list[Rollout] | None:
        """Return the accepted episodes among ``count`` ended ones, perhaps none; None until that many have ended."""
        self.drop_stale()
        if self.completed < count:
            return None
        taken = self._consume(oldest_first(self.accepted.values(), count))
        self.completed -= count - len(taken)
        return taken

    def take_one(self, number: int) -> Rollout | None:
        return self._consume([self.accepted[number]])[0] if number in self.accepted else None

    def _consume(self, chosen: list[Rollout]) -> list[Rollout]:
        for rollout in chosen:
            del self.accepted[rollout.number]
            self._drops.pop(rollout.number, None)
        self.counts.accepted -= len(chosen)
        self.counts.consumed += len(chosen)
        self.in_training += len(chosen)
        self.completed -= len(chosen)
        return shuffled(chosen, self.seed)

    def set_version(self, version: int) -> None:
        """Set the version. A newer one ends the training of the batches that were taken. Raises ValueError."""
        if version < self.version:
            raise ValueError(f"the version is {self.version}: it cannot become {version}")
        if version > self.version:
            self.version, self.in_training, self._maybe_stale = version, 0, True

    @property
    def idle(self) -> bool:
        """Whether no episode is running or pending."""
        return not (self.pending or self.running or self.outside or self._pending_outside)

    def outstanding(self) -> list[EpisodeSpec]:
        """Return the accepted and pending episodes, for a checkpoint; the executor adds the running ones."""
        return [*(each.item for each in self.accepted.values()), *self.pending]
