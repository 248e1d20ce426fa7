"""Which worker gets a call. Pure but for the dice and the counter, which the caller owns.

``auto``         power of two choices by tokens in flight; a conversation that is recorded stays where it began
``round_robin``  each in turn
``least_loaded`` fewest tokens in flight
``prefix``       the worker that a hash of the prompt's beginning points to, so that its prefix cache is met again

A session's calls are not picked for: they go where its journal is. Prefixes use rendezvous hashing: when a worker
comes or goes, only its own share moves. A prefix does not override load: a worker with more than ``_BOUND`` times the
mean load (and clearly more than a lone call) passes the call on to the next in its order, or one popular system prompt
would put all calls on one worker.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from areal.services.inference.router.table import WorkerEntry

_BOUND = 1.25
_SLACK_TOKENS = 2048.0
_PART = 32

Load = Callable[[WorkerEntry], float]


@dataclass(frozen=True)
class CallKey:
    """What a call says about where it belongs. ``tokens`` is an estimate of prompt and answer together; ``journal``
    the tag of its session's journal, which only one worker holds."""

    tokens: float = 0.0
    prefix: bytes | None = None
    journal: str | None = None


def rendezvous(key: bytes, workers: Sequence[WorkerEntry]) -> list[WorkerEntry]:
    """The workers in the order in which ``key`` prefers them."""
    return sorted(workers, key=lambda worker: _weight(key, worker.addr), reverse=True)


def _part(key: bytes, workers: Sequence[WorkerEntry]) -> Sequence[WorkerEntry]:
    """All of a small pool, some of a large one."""
    if len(workers) <= _PART:
        return workers
    return workers[int.from_bytes(key[:8]) % (len(workers) - _PART) :][:_PART]


def _weight(key: bytes, addr: str) -> bytes:
    return hashlib.blake2b(key + b"\0" + addr.encode(), digest_size=8).digest()


class Picker:
    """One strategy's pick after pick. ``workers`` are the candidates: routable, and never none."""

    def __init__(self, dice: random.Random | None = None) -> None:
        self._dice = dice or random.Random()
        self._turn = -1

    def pick(self, strategy: str, workers: Sequence[WorkerEntry], key: CallKey, load: Load) -> WorkerEntry:
        if len(workers) == 1:
            return workers[0]
        if strategy == "round_robin":
            self._turn += 1
            return workers[self._turn % len(workers)]
        if strategy == "least_loaded":
            return self._lightest(workers, load)
        if key.prefix is not None:
            by = self._by_prefix if strategy == "prefix" else self._where_it_began
            return by(key.prefix, workers, load)
        return self._lightest(self._dice.sample(workers, 2), load)

    def _lightest(self, workers: Sequence[WorkerEntry], load: Load) -> WorkerEntry:
        loads = [load(worker) for worker in workers]
        least = min(loads)
        return self._dice.choice([worker for worker, tokens in zip(workers, loads, strict=True) if tokens == least])

    def _where_it_began(self, prefix: bytes, workers: Sequence[WorkerEntry], load: Load) -> WorkerEntry:
        """By the conversation's beginning, unless that worker has clearly more to do than another one. The cost is the
        same for pools of any size."""
        home = rendezvous(prefix, _part(prefix, workers))[0]
        other = next(worker for worker in self._dice.sample(workers, 2) if worker is not home)
        return home if load(home) <= load(other) * _BOUND + _SLACK_TOKENS else other

    def _by_prefix(self, prefix: bytes, workers: Sequence[WorkerEntry], load: Load) -> WorkerEntry:
        mean = sum(load(worker) for worker in workers) / len(workers)
        for worker in rendezvous(prefix, workers):
            if load(worker) <= mean * _BOUND + _SLACK_TOKENS:
                return worker
        raise AssertionError("some worker is never above the mean")
