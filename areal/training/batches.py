"""Batches of training data, and their partition over ranks, minibatches and micro-batches.

A batch is a dict of tensors: token columns [B, T], padded on the right, and sequence columns [B]. Only
``attention_mask`` [B, T], True for tokens, is always present. ``areal.rollout.tensors.concat_padded_tensors`` makes
batches of episodes.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from areal.dataclasses import dataclass, replace
from areal.errors import UsageFault

Batch = dict[str, Tensor]
_MAX_SHARE = 0.9  # packing pays if it leaves at most this share of the padded batch's tokens
_MASKED = 1 << 22  # the most attention scores of trees with a mask
_PAYS = 2  # times the scores of the padded batch: one tree is computed faster than many short rows


def lengths(batch: Mapping[str, Tensor]) -> list[int]:
    """Return the number of tokens of each row."""
    return batch["attention_mask"].sum(1).tolist()


def select(batch: Mapping[str, Tensor], indices: Sequence[int]) -> Batch:
    """Return the rows ``indices``, in that order, trimmed to the longest of them. All rows share their memory with
    ``batch``."""
    if list(indices) == list(range(len(batch["attention_mask"]))):
        return trim(batch)
    where = torch.as_tensor(indices, dtype=torch.long, device=batch["attention_mask"].device)
    return trim({name: column[where] for name, column in batch.items()})


def trim(batch: Mapping[str, Tensor]) -> Batch:
    """Remove positions that are padding in every row."""
    used = batch["attention_mask"].any(0).nonzero()
    width = int(used[-1]) + 1 if len(used) else 1
    return {name: column[:, :width] if column.dim() > 1 else column for name, column in batch.items()}


def to_device(batch: Mapping[str, Tensor], device: torch.device) -> Batch:
    return {name: column.to(device, non_blocking=True) for name, column in batch.items()}


def token_batch(rows: Sequence[Mapping[str, Any]], pad_id: int = 0) -> Batch:
    """Return a batch of rows with ``input_ids`` and ``loss_mask``, lists of ints of one length. Raises UsageFault."""
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
    mask[:, 0] = 0  # the first token has no prediction
    return {"input_ids": ids, "attention_mask": torch.arange(width) < sizes[:, None], "loss_mask": mask.bool()}


def paired_batch(rows: Sequence[Mapping[str, Any]]) -> Batch:
    """Return a batch of rows with ``chosen_ids`` and ``rejected_ids``, which become neighboring rows. The answer begins
    after ``prompt_length`` tokens; by default after the common prefix, as in TRL. Raises UsageFault."""
    answers: list[dict[str, object]] = []
    for number, row in enumerate(rows):
        if missing := [name for name in ("chosen_ids", "rejected_ids") if not row.get(name)]:
            raise UsageFault(f"row {number} of the batch has no {missing[0]}: it has {sorted(row)}")
        chosen, rejected = list(row["chosen_ids"]), list(row["rejected_ids"])
        shared = next(
            (place for place, (left, right) in enumerate(zip(chosen, rejected, strict=False)) if left != right),
            min(len(chosen), len(rejected)) - 1,
        )
        prompt = min(shared, row.get("prompt_length", shared))
        if min(len(chosen), len(rejected)) < 2:
            raise UsageFault(
                f"row {number} of the batch has an answer of one token and no prompt: nothing predicts that token"
            )
        for ids in (chosen, rejected):
            answers.append({"input_ids": ids, "loss_mask": [0] * prompt + [1] * (len(ids) - prompt)})
    return token_batch(answers)


def partition(lengths: Sequence[int], parts: int) -> list[list[int]]:
    """Return ``parts`` sets of ascending indices with nearly equal sums, by the largest differencing method (Karmarkar
    and Karp, 1982). Some are empty if there are fewer rows."""
    if parts <= 1:
        return [list(range(len(lengths)))]
    heap: list[tuple[int, int, list[tuple[int, list[int]]]]] = []
    for number, length in enumerate(lengths):
        sets: list[tuple[int, list[int]]] = [(length, [number])] + [(0, []) for _ in range(parts - 1)]
        heap.append((-length, number, sets))
    heapq.heapify(heap)
    while len(heap) > 1:
        (_, first, large), (_, _, small) = heapq.heappop(heap), heapq.heappop(heap)
        # Pair the heaviest sets of one with the lightest of the other.
        joined = [(a + b, left + right) for (a, left), (b, right) in zip(large, reversed(small), strict=True)]
        joined.sort(key=lambda entry: (-entry[0], not entry[1]))  # empty sets last, also behind rows without tokens
        heapq.heappush(heap, (joined[-1][0] - joined[0][0], first, joined))
    if not heap:
        return [[] for _ in range(parts)]
    return [sorted(members) for _, members in heap[0][2]]


def split_rows(lengths: Sequence[int], ranks: int, group: int = 1) -> list[list[int]]:
    """Return the rows of each rank: equal numbers of rows, nearly equal numbers of tokens. ``group`` neighboring rows
    stay together. Raises ValueError if the rows cannot be divided."""
    if group < 1 or len(lengths) % (ranks * group):
        raise ValueError(f"{len(lengths)} rows in groups of {group} cannot be shared equally by {ranks} ranks")
    groups = [sum(lengths[start : start + group]) for start in range(0, len(lengths), group)]
    per_rank = len(groups) // ranks
    assigned: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for number in sorted(range(len(groups)), key=lambda n: -groups[n]):
        rank = min((r for r in range(ranks) if len(assigned[r]) < per_rank), key=loads.__getitem__)
        assigned[rank].append(number)
        loads[rank] += groups[number]
    return [[first * group + n for first in sorted(numbers) for n in range(group)] for numbers in assigned]


def split_groups(lengths: Sequence[int], groups: Sequence[int], ranks: int) -> list[list[int]]:
    """Return the rows of each rank, ascending, whole groups only. Raises ValueError for too few groups."""
    members: dict[int, list[int]] = {}
    for row, group in enumerate(groups):
        members.setdefault(group, []).append(row)
    if len(members) < ranks:
        raise ValueError(f"{len(members)} groups are too few for {ranks} ranks: each needs one")
    ordered = list(members.values())
    parts = partition([sum(lengths[row] for row in rows) for rows in ordered], ranks)
    return [sorted(row for number in part for row in ordered[number]) for part in parts]


def minibatches(lengths: Sequence[int], count: int) -> list[list[int]]:
    """Return at most ``count`` sets of rows with nearly equal tokens, none empty."""
    return [part for part in partition(lengths, min(count, len(lengths))) if part]


@dataclass(frozen=True)
class MicroBatches:
    """The limits of micro-batches: at least ``count``, a multiple of ``divisor``, with at most ``max_tokens`` unless a
    single row has more. ``padded``: a micro-batch costs its rows times its longest row, not the sum of their lengths.
    ``granularity`` neighboring rows stay together (the two answers of a preference). ``ffd`` makes the fewest
    micro-batches within ``max_tokens``; ``kk`` balances their tokens."""

    count: int = 1
    granularity: int = 1
    divisor: int = 1
    max_tokens: int | None = None
    algorithm: Literal["ffd", "kk"] = "ffd"
    padded: bool = True

    def cost(self, lengths: Sequence[int]) -> int:
        """Return the tokens of one micro-batch with rows of these lengths."""
        return max(lengths) * len(lengths) if self.padded else sum(lengths)


def micro_batches(lengths: Sequence[int], limits: MicroBatches, at_least: int = 1) -> list[list[int]]:
    """Return the rows of each micro-batch, none empty, so fewer micro-batches if there are not enough rows.
    ``at_least``: the count of the other ranks, because all ranks must take the same number of steps."""
    if (size := limits.granularity) > 1:
        if len(lengths) % size:
            raise ValueError(f"{len(lengths)} rows are no groups of {size}")
        costs = [limits.cost(lengths[first : first + size]) for first in range(0, len(lengths), size)]
        bins = micro_batches(costs, replace(limits, granularity=1), at_least)
        return [[number * size + n for number in members for n in range(size)] for members in bins]
    bins = [list(range(len(lengths)))]
    if limits.max_tokens:
        bins = _first_fit(lengths, limits, limits.max_tokens)
        if limits.algorithm == "kk":
            bins = _balanced(lengths, limits, limits.max_tokens, len(bins)) or bins
    wanted = -(-max(limits.count, at_least, len(bins)) // limits.divisor) * limits.divisor
    if len(bins) >= wanted:
        return bins
    return [part for part in partition(lengths, min(wanted, len(lengths))) if part]


def synchronized_micro_batches(
    lengths: Sequence[int], limits: MicroBatches, all_max: Callable[[int], int]
) -> list[tuple[list[int], bool]]:
    """Return the rows of each micro-batch, and whether it counts. All ranks get equally many: a rank with too few rows
    repeats its first ones with weight 0. ``all_max``: the maximum of a number over all ranks."""
    local = micro_batches(lengths, limits)
    count = all_max(len(local))
    if count > len(local):
        local = micro_batches(lengths, limits, at_least=count)
    return [(part, True) for part in local] + [(list(range(limits.granularity)), False)] * (count - len(local))


def put_rows(whole: Tensor, rows: Sequence[int], values: Tensor) -> None:
    """Write a micro-batch's ``values`` [b] or [b, t] to ``rows`` of ``whole`` [B] or [B, T], t <= T."""
    if values.dim() > 1:
        whole[rows, : values.shape[1]] = values
    else:
        whole[rows] = values


def target_mask(batch: Mapping[str, Tensor]) -> Tensor:
    """Return the tokens whose log-probabilities are needed: [B, T]. The first token of a row has none."""
    mask = batch["loss_mask" if "loss_mask" in batch else "attention_mask"].bool().clone()
    mask[:, 0] = False
    return mask


def _first_fit(lengths: Sequence[int], limits: MicroBatches, max_tokens: int) -> list[list[int]]:
    """Partition by first fit decreasing."""
    bins: list[list[int]] = []
    costs: list[int] = []  # tokens, or the longest row if rows are padded
    for number in sorted(range(len(lengths)), key=lambda n: -lengths[n]):
        for place, members in enumerate(bins):
            cost = costs[place] * (len(members) + 1) if limits.padded else costs[place] + lengths[number]
            if cost <= max_tokens:
                members.append(number)
                costs[place] = costs[place] if limits.padded else cost
                break
        else:
            bins.append([number])
            costs.append(lengths[number])
    return [sorted(members) for members in bins]


def _balanced(lengths: Sequence[int], limits: MicroBatches, max_tokens: int, parts: int) -> list[list[int]] | None:
    """Return at least ``parts`` sets with nearly equal sums, each within ``max_tokens``; None if impossible."""
    while True:
        sets = [part for part in partition(lengths, parts) if part]
        if all(len(part) == 1 or limits.cost([lengths[n] for n in part]) <= max_tokens for part in sets):
            return sets
        if parts == len(lengths):
            return None
        parts = min(len(lengths), -(-parts * 5 // 4))


@dataclass(frozen=True)
class PackedRows:
    """Rows in which each distinct token is computed once. Samples of one prompt share its tokens, without padding: a
    tree whose trunk is the prompt (arXiv:2305.09781). Only attention depends on other tokens. Short trees are the rows
    of a batch, with a mask. Of long ones a mask is too large: attention runs on the rows of the padded batch
    (``packed_attention`` of ``areal.training.engines.huggingface``).

    ``input_ids`` and ``positions`` [N, W]: all trees one after the other (N = 1), or one a row, with ``mask`` [N, 1, W,
    W]: the tokens that each token attends to. ``places`` [B, T]: the index among the N * W of each token of the batch,
    0 for tokens without an output; ``homes`` [N * W]: the index among the B * T of each packed token.
    """

    input_ids: Tensor
    positions: Tensor
    places: Tensor
    homes: Tensor
    mask: Tensor | None = None

    def to(self, device: torch.device) -> PackedRows:
        columns = {name: column for name, column in vars(self).items() if column is not None}
        return replace(self, **to_device(columns, device))

    def unpacked(self, outputs: Tensor) -> Tensor:
        """Return the model's outputs [N, W, V] in the rows of the batch: [B, T, V]."""
        flat = outputs.flatten(0, 1).index_select(0, self.places.flatten())
        return flat.view(*self.places.shape, -1)


def pack(batch: Mapping[str, Tensor], *, last: bool) -> PackedRows | None:
    """Pack ``input_ids``, ``attention_mask`` and ``loss_mask`` on the CPU; None if packing would not be faster.
    ``last``: include the output at a row's last token, which a critic needs and a policy does not."""
    if "loss_mask" not in batch:
        return None
    ids, mask = batch["input_ids"].numpy(), batch["loss_mask"].numpy() > 0
    lengths = batch["attention_mask"].numpy().sum(1)
    shared = np.where(mask.any(1), mask.argmax(1), 0)
    own = np.maximum(lengths - shared - (0 if last else 1), 0)
    prompts: dict[bytes, list[int]] = {}
    for row, count in enumerate(shared.tolist()):
        prompts.setdefault(ids[row, :count].tobytes(), []).append(row)
    trees = list(prompts.values())
    ends = np.cumsum([shared[rows[0]] + own[rows].sum() for rows in trees])
    sizes = np.diff(ends, prepend=0)
    if not 0 < ends[-1] < _MAX_SHARE * ids.size:
        return None
    count, width = len(trees), int(sizes.max())
    is_masked = count * width**2 <= min(_MASKED, _PAYS * ids.size * ids.shape[1])
    is_masked = is_masked and count * width < _MAX_SHARE * ids.size
    shape = (count, width) if is_masked else (1, int(ends[-1]))
    starts = width * np.arange(count) if is_masked else ends - sizes
    trunks, branches = np.zeros_like(own), np.zeros_like(own)  # where a row's prompt and its own tokens begin
    for start, rows in zip(starts, trees, strict=True):
        trunks[rows] = start
        branches[rows] = start + shared[rows] + own[rows].cumsum() - own[rows]
    steps = np.arange(ids.shape[1])
    is_packed = steps < (shared + own)[:, None]
    places = np.where(steps < shared[:, None], trunks[:, None] + steps, (branches - shared)[:, None] + steps)
    homes = np.zeros(shape, dtype=np.int64)
    homes.reshape(-1)[places[is_packed]] = np.flatnonzero(is_packed)
    parts = np.full(shape, -1)  # 0 in a trunk, the row's number from 1 on in a branch
    numbers = np.where(steps < shared[:, None], 0, np.arange(1, len(ids) + 1)[:, None])
    parts.reshape(-1)[places[is_packed]] = numbers[is_packed]
    return PackedRows(
        input_ids=torch.from_numpy(ids.reshape(-1)[homes]),
        positions=torch.from_numpy(homes % ids.shape[1]),
        places=torch.from_numpy(np.where(is_packed, places, 0)),
        homes=torch.from_numpy(homes.reshape(-1)),
        mask=_visible(torch.from_numpy(parts)) if is_masked else None,
    )


def _visible(parts: Tensor) -> Tensor:
    """Return [N, 1, W, W] from ``parts`` [N, W]: a token sees itself and earlier ones, in its part or the trunk."""
    seen, own = parts[:, None, :], parts[:, :, None]
    return ((seen == 0) | (seen == own)).tril()[:, None]
