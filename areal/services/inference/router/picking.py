"""Load balancing: pick the worker for a call. No I/O.

``auto``         power of two choices by tokens in flight; a recorded conversation stays on the worker where it began
``round_robin``  each worker in turn
``least_loaded`` the worker with the fewest tokens in flight
``prefix``       the worker given by a hash of the prompt's beginning, which has that in its prefix cache

A session's calls go to the worker that holds its journal. Prefixes use rendezvous hashing: when a worker is added or
removed, only its own share moves. Load is bounded: if a worker has more than ``_BOUND`` times the mean load plus
``_SLACK_TOKENS``, the call goes to the next worker in order. Otherwise a popular system prompt would send all calls to
one worker.

The cost of a pick does not grow with the pool: in a large pool a prefix selects among the ``_CANDIDATES`` that follow
it on a ring of addresses, and the least loaded worker is taken from a heap. Ring and heap are built once for each list
of workers, which is never modified.
"""

from __future__ import annotations

import bisect
import hashlib
import heapq
import random
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Generic, TypeVar

from areal.dataclasses import dataclass
from areal.wire.routing import WorkerEntry

_BOUND = 1.25
_SLACK_TOKENS = 2048.0
_SMALL_POOL = 32  # up to this size all workers are candidates for a prefix
_CANDIDATES = 8  # in a larger pool
_SPARE = 64
_POOLS_KEPT = 4096
_64_BITS = 2**64 - 1

Load = Callable[[WorkerEntry], float]
V = TypeVar("V")


@dataclass(frozen=True)
class CallKey:
    """The properties of a call that decide its worker. ``tokens``: an estimate of prompt and answer together;
    ``prefix``: a digest of the prompt's beginning; ``tag``: of its session's journal, which only one worker holds."""

    tokens: float = 0.0
    prefix: bytes | None = None
    tag: str | None = None


def rendezvous(key: bytes, workers: Sequence[WorkerEntry]) -> list[WorkerEntry]:
    """Return the workers ordered by their rendezvous weight for ``key``, a digest."""
    weights = _weights(_seed(key), (_digest_of_address(worker.addr) for worker in workers))
    return [workers[place] for place in sorted(range(len(workers)), key=weights.__getitem__, reverse=True)]


class _Ring:
    """A pool's workers sorted by the digests of their addresses. The digests lie in one array, for cache locality."""

    def __init__(self, workers: Sequence[WorkerEntry]) -> None:
        placed = sorted(((_digest_of_address(worker.addr), worker) for worker in workers), key=lambda each: each[0])
        self._size = len(placed)
        self._many = self._size if self._size <= _SMALL_POOL else _CANDIDATES
        around = placed + placed[: self._many]
        self._digests = array("Q", [digest for digest, _ in around])
        self._workers = [worker for _, worker in around]

    def candidates(self, key: bytes) -> _Candidates:
        seed = _seed(key)
        first = bisect.bisect(self._digests, seed, 0, self._size) % self._size if self._many < self._size else 0
        return _Candidates(self._workers, first, _weights(seed, self._digests[first : first + self._many]))


class _Candidates:
    """The candidates for a key: workers of a ring from index ``first`` on, and their ``weights`` for the key."""

    __slots__ = ("_first", "_weights", "_workers")

    def __init__(self, workers: list[WorkerEntry], first: int, weights: list[int]) -> None:
        self._workers, self._first, self._weights = workers, first, weights

    def __len__(self) -> int:
        return len(self._weights)

    @property
    def home(self) -> WorkerEntry:
        return self._workers[self._first + self._weights.index(max(self._weights))]

    def __iter__(self) -> Iterator[WorkerEntry]:
        return iter(self._workers[self._first : self._first + len(self._weights)])

    def preferred(self) -> Iterator[WorkerEntry]:
        """Iterate over the candidates by descending weight."""
        order = sorted(range(len(self._weights)), key=self._weights.__getitem__, reverse=True)
        return (self._workers[self._first + place] for place in order)


class _LoadHeap:
    """A pool's workers grouped by load, and a heap of the loads. A load without workers is dropped when it reaches the
    top."""

    def __init__(self, workers: Sequence[WorkerEntry], load: Load, dice: random.Random) -> None:
        self._workers, self._dice = workers, dice
        self._places = {worker.addr: place for place, worker in enumerate(workers)}
        self._loads = [load(worker) for worker in workers]
        self._equals: dict[float, list[int]] = {}
        self._at = [0] * len(workers)  # each worker's place in the group of its load
        for place, tokens in enumerate(self._loads):
            self._add(place, tokens)
        self._heap = sorted(self._equals)

    def set_load(self, addr: str, tokens: float) -> None:
        place = self._places.get(addr)
        if place is None or tokens == self._loads[place]:
            return
        equals = self._equals[self._loads[place]]
        last = equals.pop()
        if last != place:
            at = self._at[last] = self._at[place]
            equals[at] = last
        if tokens not in self._equals:
            heapq.heappush(self._heap, tokens)
        self._add(place, tokens)
        if len(self._heap) > 2 * len(self._workers) + _SPARE:
            self._equals = {each: equals for each, equals in self._equals.items() if equals}
            self._heap = sorted(self._equals)

    def _add(self, place: int, tokens: float) -> None:
        equals = self._equals.setdefault(tokens, [])
        self._loads[place], self._at[place] = tokens, len(equals)
        equals.append(place)

    def pick(self, load: Load) -> WorkerEntry | None:
        """Return the least loaded worker, or None if the heap must be rebuilt: a load changed without ``set_load``."""
        while not (equals := self._equals[self._heap[0]]):
            del self._equals[heapq.heappop(self._heap)]
        worker = self._workers[equals[int(self._dice.random() * len(equals))]]
        return worker if load(worker) == self._heap[0] else None


def _weights(seed: int, digests: Iterable[int]) -> list[int]:
    """Return the rendezvous weight of each address digest for a seed. Uses Fibonacci hashing, which is cheap."""
    return [(seed ^ digest) * 0x9E3779B97F4A7C15 & _64_BITS for digest in digests]


def _seed(key: bytes) -> int:
    return int.from_bytes(key[:8])


@lru_cache(maxsize=65_536)
def _digest_of_address(addr: str) -> int:
    return int.from_bytes(hashlib.blake2b(addr.encode(), digest_size=8).digest())


class _PoolCache(Generic[V]):
    """Caches a value derived from each pool's list of workers until the list changes."""

    def __init__(self) -> None:
        self._of: dict[str, tuple[Sequence[WorkerEntry], V]] = {}

    def get(self, pool: str, workers: Sequence[WorkerEntry]) -> V | None:
        cached = self._of.get(pool)
        return cached[1] if cached is not None and cached[0] is workers else None

    def put(self, pool: str, workers: Sequence[WorkerEntry], made: V) -> V:
        if len(self._of) >= _POOLS_KEPT:  # models come and go
            self._of.clear()
        self._of[pool] = workers, made
        return made

    def __iter__(self) -> Iterator[V]:
        return (made for _, made in self._of.values())


class Picker:
    """Picks a worker for each call. ``workers``: the routable workers, at least one."""

    def __init__(self, dice: random.Random | None = None) -> None:
        self._dice = dice or random.Random()
        self._turn = -1
        self._rings: _PoolCache[_Ring] = _PoolCache()
        self._heaps: _PoolCache[_LoadHeap] = _PoolCache()

    def set_load(self, addr: str, tokens: float) -> None:
        """Record a worker's new load."""
        for heap in self._heaps:
            heap.set_load(addr, tokens)

    def pick(
        self, strategy: str, workers: Sequence[WorkerEntry], key: CallKey, load: Load, pool: str = ""
    ) -> WorkerEntry:
        """Return the worker for a call. ``pool``: the name of the model to which ``workers`` belong."""
        if len(workers) == 1:
            return workers[0]
        if strategy == "round_robin":
            self._turn += 1
            return workers[self._turn % len(workers)]
        if strategy == "least_loaded":
            cached = self._heaps.get(pool, workers)
            picked = cached.pick(load) if cached is not None else None
            if picked is None:
                picked = self._heaps.put(pool, workers, _LoadHeap(workers, load, self._dice)).pick(load)
            assert picked is not None, "each load was asked for just now"
            return picked
        if key.prefix is None:
            return self._lighter_of_two(workers, load)
        ring = self._rings.get(pool, workers) or self._rings.put(pool, workers, _Ring(workers))
        return (self._by_prefix if strategy == "prefix" else self._by_conversation)(key.prefix, ring, workers, load)

    def _lighter_of_two(self, workers: Sequence[WorkerEntry], load: Load) -> WorkerEntry:
        one, other = self._random_pair(workers)
        return one if load(one) <= load(other) else other

    def _random_pair(self, workers: Sequence[WorkerEntry]) -> tuple[WorkerEntry, WorkerEntry]:
        """Return two different workers, uniformly chosen, at a third of the cost of ``random.sample``."""
        first, second = int(self._dice.random() * len(workers)), int(self._dice.random() * (len(workers) - 1))
        return workers[first], workers[second + (second >= first)]

    def _by_conversation(self, prefix: bytes, ring: _Ring, workers: Sequence[WorkerEntry], load: Load) -> WorkerEntry:
        """Return the conversation's home worker, unless its load clearly exceeds that of a random other one."""
        home = ring.candidates(prefix).home
        one, other = self._random_pair(workers)
        if other is home:
            other = one
        return home if load(home) <= load(other) * _BOUND + _SLACK_TOKENS else other

    def _by_prefix(self, prefix: bytes, ring: _Ring, workers: Sequence[WorkerEntry], load: Load) -> WorkerEntry:
        """Return the first candidate whose load does not clearly exceed the usual load.

        The usual load is the candidates' mean, or in a large pool the load of the lighter of two random workers; that
        worker is returned if all candidates exceed it.
        """
        candidates = ring.candidates(prefix)
        home = candidates.home
        if (held := load(home)) <= _SLACK_TOKENS:  # never above the limit
            return home
        if len(candidates) == len(workers):
            other, usual = home, sum(map(load, candidates)) / len(candidates)  # some candidate is not above the mean
        else:
            other = self._lighter_of_two(workers, load)
            usual = load(other)
        most = usual * _BOUND + _SLACK_TOKENS
        return home if held <= most else next((each for each in candidates.preferred() if load(each) <= most), other)
