"""Batches of training data, and which of their rows go where.

A batch is a dict of tensors: columns [B, T] of tokens, padded on the right, and columns [B] of sequences.
``attention_mask`` [B, T] is True for tokens; everything else may be absent. What belongs to a batch as a whole travels
separately. Episodes become batches by ``areal.rollout.tensors.concat_padded_tensors``.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from areal.errors import UsageFault

Batch = dict[str, Tensor]


def lengths(batch: Mapping[str, Tensor]) -> list[int]:
    """Tokens of each row."""
    counted: list[int] = batch["attention_mask"].sum(1).tolist()
    return counted


def select(batch: Mapping[str, Tensor], indices: Sequence[int]) -> Batch:
    """These rows, in this order, no wider than the widest of them."""
    where = torch.as_tensor(indices, dtype=torch.long, device=batch["attention_mask"].device)
    return trim({name: column[where] for name, column in batch.items()})


def trim(batch: Mapping[str, Tensor]) -> Batch:
    """Without the columns that are padding in every row."""
    used = batch["attention_mask"].any(0).nonzero()
    width = int(used[-1]) + 1 if len(used) else 1
    return {name: column[:, :width] if column.dim() > 1 else column for name, column in batch.items()}


def to_device(batch: Mapping[str, Tensor], device: torch.device) -> Batch:
    return {name: column.to(device, non_blocking=True) for name, column in batch.items()}


# -- from rows of a data set to a batch


def token_batch(rows: Sequence[Mapping[str, Any]], pad_id: int = 0) -> Batch:
    """Rows with ``input_ids`` and ``loss_mask``: lists of ints, equally long. Raises UsageFault."""
    for number, row in enumerate(rows):
        for column in ("input_ids", "loss_mask"):
            if row.get(column) is None:
                raise UsageFault(f"row {number} of the batch has no {column}: it has {sorted(row)}")
        tokens, masked = len(row["input_ids"]), len(row["loss_mask"])
        if tokens != masked or not tokens:
            raise UsageFault(f"row {number} of the batch has {tokens} tokens and a mask of {masked}")
    sizes = torch.tensor([len(row["input_ids"]) for row in rows])
    width = int(sizes.max())
    ids, mask = (
        torch.tensor([[*row[column], *[fill] * (width - len(row[column]))] for row in rows])
        for column, fill in (("input_ids", pad_id), ("loss_mask", 0))
    )
    mask[:, 0] = 0  # the first token follows nothing
    return {"input_ids": ids, "attention_mask": torch.arange(width) < sizes[:, None], "loss_mask": mask.bool()}


def paired_batch(rows: Sequence[Mapping[str, Any]]) -> Batch:
    """Preferences with ``chosen_ids`` and ``rejected_ids``: both answers of each row, one after the other. Answers
    begin after ``prompt_length`` tokens; without it the prompt is what both have in common, as in TRL."""
    answers: list[dict[str, Any]] = []
    for number, row in enumerate(rows):
        if missing := [name for name in ("chosen_ids", "rejected_ids") if not row.get(name)]:
            raise UsageFault(f"row {number} of the batch has no {missing[0]}: it has {sorted(row)}")
        chosen, rejected = list(row["chosen_ids"]), list(row["rejected_ids"])
        shared = next(
            (place for place, (left, right) in enumerate(zip(chosen, rejected, strict=False)) if left != right),
            min(len(chosen), len(rejected)) - 1,
        )
        prompt = min(shared, row.get("prompt_length", shared))
        for ids in (chosen, rejected):
            answers.append({"input_ids": ids, "loss_mask": [0] * prompt + [1] * (len(ids) - prompt)})
    return token_batch(answers)


# -- over ranks and minibatches, with nearly equal tokens


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


def split_rows(lengths: Sequence[int], ranks: int, group: int = 1) -> list[list[int]]:
    """Rows of each rank: every rank gets as many rows (``len(lengths) / ranks``) and nearly as many tokens. Rows come
    in groups of ``group`` neighbors that stay together."""
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


def split_groups(lengths: Sequence[int], groups: Sequence[int], ranks: int) -> list[list[int]]:
    """Rows of each rank, ascending. Raises ValueError where there are fewer groups than ranks."""
    members: dict[int, list[int]] = {}
    for row, group in enumerate(groups):
        members.setdefault(group, []).append(row)
    if len(members) < ranks:
        raise ValueError(f"{len(members)} groups are too few for {ranks} ranks: each needs one")
    ordered = list(members.values())
    parts = partition([sum(lengths[row] for row in rows) for rows in ordered], ranks)
    while any(not part for part in parts):  # few groups of very different sizes
        parts.sort(key=len)
        parts[0].append(parts[-1].pop())
    return [sorted(row for number in part for row in ordered[number]) for part in parts]


def minibatches(lengths: Sequence[int], count: int) -> list[list[int]]:
    """At most ``count`` sets of rows with nearly equal tokens, none empty."""
    return [part for part in partition(lengths, min(count, len(lengths))) if part]


# -- micro-batches


@dataclass(frozen=True)
class MicroBatches:
    """At least ``count`` micro-batches, a multiple of ``divisor``, none with more than ``max_tokens`` unless a single
    row is longer. ``padded``: a micro-batch costs its rows times its widest row, not the sum of their lengths. Rows
    come in groups of ``granularity`` neighbors that stay together (the two answers of a preference). Within
    ``max_tokens``, ``ffd`` makes few micro-batches, ``kk`` some of nearly as many tokens each."""

    count: int = 1
    granularity: int = 1
    divisor: int = 1
    max_tokens: int | None = None
    algorithm: Literal["ffd", "kk"] = "ffd"
    padded: bool = True

    def cost(self, lengths: Sequence[int]) -> int:
        """Tokens that rows of these lengths take in one micro-batch."""
        return max(lengths) * len(lengths) if self.padded else sum(lengths)


def micro_batches(lengths: Sequence[int], how: MicroBatches, at_least: int = 1) -> list[list[int]]:
    """Indices of each micro-batch, none empty: fewer than asked for when there are not enough rows.

    ``at_least`` is what the other ranks need: all ranks have to make the same number of steps.
    """
    if (size := how.granularity) > 1:
        if len(lengths) % size:
            raise ValueError(f"{len(lengths)} rows are no groups of {size}")
        costs = [how.cost(lengths[first : first + size]) for first in range(0, len(lengths), size)]
        bins = micro_batches(costs, replace(how, granularity=1), at_least)
        return [[number * size + n for number in members for n in range(size)] for members in bins]
    bins = [list(range(len(lengths)))]
    if how.max_tokens:
        bins = _first_fit(lengths, how, how.max_tokens)
        if how.algorithm == "kk":
            bins = _even(lengths, how, how.max_tokens, len(bins)) or bins
    wanted = -(-max(how.count, at_least, len(bins)) // how.divisor) * how.divisor
    if len(bins) >= wanted:
        return bins
    return [part for part in partition(lengths, min(wanted, len(lengths))) if part]


def common_cut(
    lengths: Sequence[int], how: MicroBatches, all_max: Callable[[int], int]
) -> list[tuple[list[int], bool]]:
    """Rows of each micro-batch, and whether it counts. Every rank makes as many: one that has fewer rows than the
    others repeats its first ones for nothing. ``all_max``: the largest number of all ranks."""
    mine = micro_batches(lengths, how)
    most = all_max(len(mine))
    if most > len(mine):
        mine = micro_batches(lengths, how, at_least=most)
    return [(part, True) for part in mine] + [(list(range(how.granularity)), False)] * (most - len(mine))


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
    """At least ``least`` sets with nearly equal sums, each within the limit; None where there is no such number."""
    parts = least
    while True:
        sets = [part for part in partition(lengths, parts) if part]
        if all(len(part) == 1 or how.cost([lengths[n] for n in part]) <= limit for part in sets):
            return sets
        if parts == len(lengths):
            return None
        parts = min(len(lengths), -(-parts * 5 // 4))


# -- packed rows: each token of a batch is computed once. Samples of one prompt share its tokens, and nothing is padded:
# a tree whose trunk is the prompt (Miao et al., arXiv:2305.09781). Attention alone looks at other tokens. It goes back
# to the rows of the batch (``areal.training.engines.huggingface.packed_attention``), so that no mask of the square of
# the length is there, however long they are.

_WORTH = 0.9  # of the padded batch's tokens


@dataclass(frozen=True)
class PackedRows:
    """``input_ids`` and ``positions`` [1, L]; ``places`` [B, T]: where each token of the batch is among the L, 0 for
    those that have no output; ``homes`` [L]: where each of them is in the batch, among the B * T."""

    input_ids: Tensor
    positions: Tensor
    places: Tensor
    homes: Tensor

    def to(self, device: torch.device) -> PackedRows:
        moved = {name: column.to(device, non_blocking=True) for name, column in vars(self).items()}
        return replace(self, **moved)

    def unpacked(self, outputs: Tensor) -> Tensor:
        """[1, L, V] of the model, as the batch's rows have it: [B, T, V]."""
        flat = outputs.flatten(0, 1).index_select(0, self.places.flatten())
        return flat.view(*self.places.shape, -1)


def pack(batch: Mapping[str, Tensor], *, last: bool) -> PackedRows | None:
    """Of ``input_ids``, ``attention_mask`` and ``loss_mask``, on the CPU. ``last``: the output of a row's last token is
    wanted too, which says nothing about a token of the row. None where the batch is better left as it is."""
    if "loss_mask" not in batch:
        return None
    ids, mask = batch["input_ids"].numpy(), batch["loss_mask"].numpy() > 0
    lengths = batch["attention_mask"].numpy().sum(1)
    shared = np.where(mask.any(1), mask.argmax(1), 0)
    own = np.maximum(lengths - shared - (0 if last else 1), 0)
    prompts: dict[bytes, list[int]] = {}
    for row, count in enumerate(shared.tolist()):
        prompts.setdefault(ids[row, :count].tobytes(), []).append(row)
    trunks, branches = np.zeros_like(own), np.zeros_like(own)  # where a row's prompt begins, and what is its own
    total = 0
    for members in prompts.values():
        trunks[members] = total
        total += int(shared[members[0]])
        ends = total + own[members].cumsum()
        branches[members] = ends - own[members]
        total = int(ends[-1])
    if not 0 < total < _WORTH * ids.size:
        return None
    steps = np.arange(ids.shape[1])
    there = steps < (shared + own)[:, None]
    places = np.where(steps < shared[:, None], trunks[:, None] + steps, (branches - shared)[:, None] + steps)
    homes = np.zeros(total, dtype=np.int64)
    homes[places[there]] = np.flatnonzero(there)
    return PackedRows(
        input_ids=torch.from_numpy(ids.reshape(-1)[homes][None]),
        positions=torch.from_numpy((homes % ids.shape[1])[None]),
        places=torch.from_numpy(np.where(there, places, 0)),
        homes=torch.from_numpy(homes),
    )
