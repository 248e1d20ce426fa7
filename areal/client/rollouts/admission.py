"""How many episodes may start, and which results are too old to train on. Pure.

Let B be the trainer's batch, eta the versions that the oldest token of a trajectory may lag behind the weights that it
trains. An episode occupies the window from its start until the trainer has *moved on* from the batch it was in, that
is until the next version. With at most (eta + 1) * B episodes in the window, one that starts now is consumed at most
eta versions later, provided that batches are taken oldest first. A straggler that is overtaken is given up as soon as
its first token is too old, or dropped where it would be consumed; its place is free again. Dropped, rejected and failed
episodes leave the window at once: with counts of what *is*, nothing leaks and nothing needs to be corrected after a
restart.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Protocol, TypeVar


@dataclass(frozen=True)
class Window:
    """``batch`` and ``concurrency`` count episodes (groups). ``staleness`` is eta."""

    batch: int
    staleness: int
    concurrency: int

    @property
    def size(self) -> int:
        return (self.staleness + 1) * self.batch


def capacity(window: Window, *, running: int, unconsumed: int, in_training: int, outside: int = 0) -> int:
    """How many episodes may start now; never negative.

    ``running`` and ``unconsumed`` (accepted, not yet taken) are of this window; ``in_training`` were taken since the
    last version; ``outside`` run too, but are not trained on (evaluation): they count for concurrency only.
    """
    by_concurrency = window.concurrency - running - outside
    by_staleness = window.size - (running + unconsumed + in_training)
    return max(0, min(by_concurrency, by_staleness))


def is_stale(window: Window, head_version: int, version: int) -> bool:
    """``head_version``: that of the oldest token."""
    return version - head_version > window.staleness


class Finished(Protocol):
    @property
    def number(self) -> int: ...

    @property
    def head_version(self) -> int: ...

    @property
    def finished(self) -> int: ...


R = TypeVar("R", bound=Finished)


def choose(finished: Iterable[R], count: int) -> list[R]:
    """The ones to consume: oldest weights first, then in the order in which they finished."""
    return sorted(finished, key=lambda each: (each.head_version, each.finished))[:count]


def shuffled(chosen: Sequence[R], seed: int) -> list[R]:
    """In an order that depends neither on when they finished nor on when they were submitted, but is the same in every
    run: so a batch's first minibatch is not that of the short answers."""

    def place(each: R) -> bytes:
        return blake2b(f"{seed}:{each.number}".encode(), digest_size=8).digest()

    return sorted(chosen, key=place)
