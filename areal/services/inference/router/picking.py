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
from functools import lru_cache

from areal.services.inference.router.table import WorkerEntry

_BOUND = 1.25
_SLACK_TOKENS = 2048.0
_PART = 32
_64_BITS = 2**64 - 1

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
    return sorted(workers, key=_weight_by(key), reverse=True)


def _part(key: bytes, workers: Sequence[WorkerEntry]) -> Sequence[WorkerEntry]:
    """All of a small pool, some of a large one."""
    if len(workers) <= _PART:
        return workers
    return workers[int.from_bytes(key[:8]) % (len(workers) - _PART) :][:_PART]


def _weight_by(key: bytes) -> Callable[[WorkerEntry], int]:
    """One digest a key and one an address, the latter kept; together they are mixed as SplitMix64 does, which is what a
    call pays for each worker."""
    seed = _digest(key)

    def weight(worker: WorkerEntry) -> int:
        mixed = seed ^ _digest_of_address(worker.addr)
        mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & _64_BITS
        mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & _64_BITS
        return mixed ^ mixed >> 31

    return weight


def _digest(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest())


@lru_cache(maxsize=8192)
def _digest_of_address(addr: str) -> int:
    return _digest(addr.encode())


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
        home = max(_part(prefix, workers), key=_weight_by(prefix))
        other = next(worker for worker in self._dice.sample(workers, 2) if worker is not home)
        return home if load(home) <= load(other) * _BOUND + _SLACK_TOKENS else other

    def _by_prefix(self, prefix: bytes, workers: Sequence[WorkerEntry], load: Load) -> WorkerEntry:
        mean = sum(load(worker) for worker in workers) / len(workers)
        for worker in rendezvous(prefix, workers):
            if load(worker) <= mean * _BOUND + _SLACK_TOKENS:
                return worker
        raise AssertionError("some worker is never above the mean")
