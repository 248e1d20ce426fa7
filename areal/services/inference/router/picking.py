"""Load balancing: the worker that gets a call. Pure but for the dice and the counter, which the caller owns.

``auto``         power of two choices by tokens in flight; a conversation that is recorded stays where it began
``round_robin``  each in turn
``least_loaded`` fewest tokens in flight
``prefix``       the worker that a hash of the prompt's beginning points to, so that its prefix cache is met again

A session's calls are not picked for: they go where its journal is. Prefixes use rendezvous hashing: when a worker
comes or goes, only its own share moves. A prefix does not override load: a worker with more than ``_BOUND`` times the
mean load (and clearly more than a lone call) passes the call on to the next in its order, or one popular system prompt
would put all calls on one worker.

What a pick costs does not grow with the pool: in a large one a prefix chooses among the ``_CANDIDATES`` that follow it
on a ring of addresses, which are other ones only where one of them came or went, and the least loaded worker lies on a
heap. Both are made once for a table's list of workers: such a list is never changed.
"""

from __future__ import annotations

import bisect
import hashlib
import heapq
import random
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

from areal.wire.routing import WorkerEntry

_BOUND = 1.25
_SLACK_TOKENS = 2048.0
_PART = 32  # of a pool that is not larger all are candidates for a prefix
_CANDIDATES = 8  # of a larger one
_SPARE = 64
_POOLS_KEPT = 64
_64_BITS = 2**64 - 1

Load = Callable[[WorkerEntry], float]
Kept = TypeVar("Kept")


@dataclass(frozen=True)
class CallKey:
    """A call's affinity. ``tokens`` is an estimate of prompt and answer together; ``journal``
    the tag of its session's journal, which only one worker holds."""

    tokens: float = 0.0
    prefix: bytes | None = None
    journal: str | None = None


def rendezvous(key: bytes, workers: Sequence[WorkerEntry]) -> list[WorkerEntry]:
    """The workers in the order in which ``key`` prefers them."""
    return sorted(workers, key=_weight_by(key), reverse=True)


class _Ring:
    """A pool's workers in the order of their addresses' digests."""

    def __init__(self, workers: Sequence[WorkerEntry]) -> None:
        placed = sorted(((_digest_of_address(worker.addr), worker) for worker in workers), key=lambda each: each[0])
        self._digests = [digest for digest, _ in placed]
        self._workers = [worker for _, worker in placed]

    def part(self, key: bytes) -> list[WorkerEntry]:
        first = bisect.bisect(self._digests, _digest_of_key(key))
        part = self._workers[first : first + _CANDIDATES]
        return part + self._workers[: _CANDIDATES - len(part)]


class _Least:
    """A pool's workers by their load, as a heap in which each has its present load once at least; others are dropped
    when they come to the top."""

    def __init__(self, workers: Sequence[WorkerEntry], load: Load, dice: random.Random) -> None:
        self._workers, self._dice = workers, dice
        self._places = {worker.addr: place for place, worker in enumerate(workers)}
        self._heap = [(load(worker), dice.random(), place) for place, worker in enumerate(workers)]
        heapq.heapify(self._heap)

    def loaded(self, addr: str, tokens: float) -> None:
        if (place := self._places.get(addr)) is not None:
            heapq.heappush(self._heap, (tokens, self._dice.random(), place))

    def pick(self, load: Load) -> WorkerEntry | None:
        """None where the heap holds more old loads than present ones: it is to be made anew."""
        if len(self._heap) > 4 * len(self._workers) + _SPARE:
            return None
        while self._heap:
            tokens, _, place = self._heap[0]
            if tokens == load(self._workers[place]):
                heapq.heapreplace(self._heap, (tokens, self._dice.random(), place))  # equals take turns
                return self._workers[place]
            heapq.heappop(self._heap)
        return None


def _weight_by(key: bytes) -> Callable[[WorkerEntry], int]:
    """One digest a key and one an address, the latter kept; together they are mixed as SplitMix64 does, which is what a
    call pays for each worker."""
    seed = _digest_of_key(key)

    def weight(worker: WorkerEntry) -> int:
        mixed = seed ^ _digest_of_address(worker.addr)
        mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & _64_BITS
        mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & _64_BITS
        return mixed ^ mixed >> 31

    return weight


def _digest(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest())


@lru_cache(maxsize=1)  # it is asked for twice in one pick
def _digest_of_key(key: bytes) -> int:
    return _digest(key)


@lru_cache(maxsize=65_536)
def _digest_of_address(addr: str) -> int:
    return _digest(addr.encode())


def _remember(
    known: OrderedDict[int, tuple[Sequence[WorkerEntry], Kept]], workers: Sequence[WorkerEntry], made: Kept
) -> None:
    known[id(workers)] = workers, made
    known.move_to_end(id(workers))
    if len(known) > _POOLS_KEPT:
        known.popitem(last=False)


class Picker:
    """One strategy's pick after pick. ``workers`` are the candidates: routable, and never none."""

    def __init__(self, dice: random.Random | None = None) -> None:
        self._dice = dice or random.Random()
        self._turn = -1
        self._rings: OrderedDict[int, tuple[Sequence[WorkerEntry], _Ring]] = OrderedDict()
        self._least: OrderedDict[int, tuple[Sequence[WorkerEntry], _Least]] = OrderedDict()

    def loaded(self, addr: str, tokens: float) -> None:
        """The load of a worker is another one now."""
        for _, least in self._least.values():
            least.loaded(addr, tokens)

    def pick(self, strategy: str, workers: Sequence[WorkerEntry], key: CallKey, load: Load) -> WorkerEntry:
        if len(workers) == 1:
            return workers[0]
        if strategy == "round_robin":
            self._turn += 1
            return workers[self._turn % len(workers)]
        if strategy == "least_loaded":
            return self._least_of(workers, load)
        if key.prefix is not None:
            by = self._by_prefix if strategy == "prefix" else self._where_it_began
            return by(key.prefix, workers, load)
        one, other = self._two(workers)
        return one if load(one) <= load(other) else other

    def _least_of(self, workers: Sequence[WorkerEntry], load: Load) -> WorkerEntry:
        kept = self._least.get(id(workers))
        picked = kept[1].pick(load) if kept is not None and kept[0] is workers else None
        if picked is None:
            least = _Least(workers, load, self._dice)
            _remember(self._least, workers, least)
            picked = least.pick(load)
        assert picked is not None, "a heap that was just made has every worker's present load"
        return picked

    def _part(self, key: bytes, workers: Sequence[WorkerEntry]) -> Sequence[WorkerEntry]:
        """All of a small pool, some of a large one."""
        if len(workers) <= _PART:
            return workers
        kept = self._rings.get(id(workers))
        if kept is None or kept[0] is not workers:
            kept = workers, _Ring(workers)
            _remember(self._rings, workers, kept[1])
        return kept[1].part(key)

    def _two(self, workers: Sequence[WorkerEntry]) -> tuple[WorkerEntry, WorkerEntry]:
        """Different ones, each pair as likely as another, in any order, for a third of what ``random.sample`` costs."""
        first, second = int(self._dice.random() * len(workers)), int(self._dice.random() * (len(workers) - 1))
        return workers[first], workers[second + (second >= first)]

    def _where_it_began(self, prefix: bytes, workers: Sequence[WorkerEntry], load: Load) -> WorkerEntry:
        """By the conversation's beginning, unless that worker has clearly more to do than another one. The cost is the
        same for pools of any size."""
        home = max(self._part(prefix, workers), key=_weight_by(prefix))
        one, other = self._two(workers)
        if other is home:
            other = one
        return home if load(home) <= load(other) * _BOUND + _SLACK_TOKENS else other

    def _by_prefix(self, prefix: bytes, workers: Sequence[WorkerEntry], load: Load) -> WorkerEntry:
        part = self._part(prefix, workers)
        mean = sum(load(worker) for worker in part) / len(part)
        for worker in rendezvous(prefix, part):
            if load(worker) <= mean * _BOUND + _SLACK_TOKENS:
                return worker
        raise AssertionError("some worker is never above the mean")
