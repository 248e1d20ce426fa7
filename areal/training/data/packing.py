"""Who goes into which micro-batch and to which rank: decisions over lengths alone."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True)
class MicroBatches:
    """At least ``count`` micro-batches, a multiple of ``divisor``, none with more than ``max_tokens`` unless a single
    row is longer. ``padded``: a micro-batch costs its rows times its widest row, not the sum of their lengths. Rows
    come in groups of ``granularity`` neighbours that stay together (the two answers of a preference). Within
    ``max_tokens``, ``ffd`` makes few micro-batches, ``kk`` some of nearly as many tokens each."""

    count: int = 1
    granularity: int = 1
    divisor: int = 1
    max_tokens: int | None = None
    algorithm: Literal["ffd", "kk"] = "ffd"
    padded: bool = True


def micro_batches(lengths: Sequence[int], how: MicroBatches, at_least: int = 1) -> list[list[int]]:
    """Indices of each micro-batch, none empty: fewer than asked for when there are not enough rows.

    ``at_least`` is what the other ranks need: all ranks have to make the same number of steps.
    """
    if how.granularity > 1:
        return _of_groups(lengths, how, at_least)
    wanted = max(how.count, at_least)
    bins = _within(lengths, how) if how.max_tokens else [list(range(len(lengths)))]
    wanted = _multiple(max(wanted, len(bins)), how.divisor)
    if len(bins) >= wanted:
        return bins
    return [part for part in partition(lengths, min(wanted, len(lengths))) if part]


def _of_groups(lengths: Sequence[int], how: MicroBatches, at_least: int) -> list[list[int]]:
    size = how.granularity
    if len(lengths) % size:
        raise ValueError(f"{len(lengths)} rows are no groups of {size}")
    groups = [lengths[first : first + size] for first in range(0, len(lengths), size)]
    costs = [max(group) * size if how.padded else sum(group) for group in groups]
    bins = micro_batches(costs, replace(how, granularity=1), at_least)
    return [[number * size + n for number in members for n in range(size)] for members in bins]


def partition(lengths: Sequence[int], parts: int) -> list[list[int]]:
    """``parts`` sets with nearly equal sums, by the largest differencing method (Karmarkar and Karp, 1982); each in
    ascending order of index, some empty when there are fewer rows."""
    if parts <= 1:
        return [list(range(len(lengths)))]
    heap: list[tuple[int, int, list[tuple[int, list[int]]]]] = []
    for number, length in enumerate(lengths):
        sets: list[tuple[int, list[int]]] = [(length, [number])] + [(0, []) for _ in range(parts - 1)]
        heap.append((-length, number, sets))
    heapq.heapify(heap)
    while len(heap) > 1:
        (_, first, large), (_, _, small) = heapq.heappop(heap), heapq.heappop(heap)
        # The heaviest of one with the lightest of the other.
        joined = [(a + b, left + right) for (a, left), (b, right) in zip(large, reversed(small), strict=True)]
        joined.sort(key=lambda entry: -entry[0])
        heapq.heappush(heap, (joined[-1][0] - joined[0][0], first, joined))
    if not heap:
        return [[] for _ in range(parts)]
    return [sorted(members) for _, members in heap[0][2]]


def spread(lengths: Sequence[int], ranks: int, group: int = 1) -> list[list[int]]:
    """Rows of each rank: every rank gets as many rows (``len(lengths) / ranks``) and nearly as many tokens. Rows come
    in groups of ``group`` neighbours that stay together."""
    if group < 1 or len(lengths) % (ranks * group):
        raise ValueError(f"{len(lengths)} rows in groups of {group} cannot be shared equally by {ranks} ranks")
    groups = [sum(lengths[start : start + group]) for start in range(0, len(lengths), group)]
    each = len(groups) // ranks
    taken: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for number in sorted(range(len(groups)), key=lambda n: -groups[n]):
        rank = min((r for r in range(ranks) if len(taken[r]) < each), key=lambda r: (loads[r], r))
        taken[rank].append(number)
        loads[rank] += groups[number]
    return [[first * group + n for first in sorted(mine) for n in range(group)] for mine in taken]


def _within(lengths: Sequence[int], how: MicroBatches) -> list[list[int]]:
    assert how.max_tokens is not None
    bins = _first_fit(lengths, how, how.max_tokens)
    if how.algorithm == "kk":
        return _even(lengths, how, how.max_tokens, len(bins)) or bins
    return bins


def _first_fit(lengths: Sequence[int], how: MicroBatches, limit: int) -> list[list[int]]:
    """Longest first."""
    bins: list[list[int]] = []
    costs: list[int] = []  # tokens, or the widest row where rows are padded
    for number in sorted(range(len(lengths)), key=lambda n: -lengths[n]):
        for place, members in enumerate(bins):
            cost = costs[place] * (len(members) + 1) if how.padded else costs[place] + lengths[number]
            if cost <= limit:
                members.append(number)
                costs[place] = costs[place] if how.padded else cost
                break
        else:
            bins.append([number])
            costs.append(lengths[number])
    return [sorted(members) for members in bins]


def _even(lengths: Sequence[int], how: MicroBatches, limit: int, least: int) -> list[list[int]] | None:
    """At least so many sets with nearly equal sums, each within the limit; None where no number of them is."""
    parts = least
    while True:
        sets = [part for part in partition(lengths, parts) if part]
        if all(len(part) == 1 or _cost([lengths[n] for n in part], how) <= limit for part in sets):
            return sets
        if parts == len(lengths):
            return None
        parts = min(len(lengths), -(-parts * 5 // 4))


def _cost(inside: Sequence[int], how: MicroBatches) -> int:
    return max(inside) * len(inside) if how.padded else sum(inside)


def _multiple(count: int, of: int) -> int:
    return -(-count // of) * of
