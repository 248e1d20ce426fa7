"""Rows of a batch laid out anew for the model: samples of one prompt share its tokens, and short rows share a row.

A mask says what each token sees: what it saw in the row of its own, at the position that it had there. So outputs and
gradients are those of the padded batch, from fewer tokens: a group of eight short answers costs its prompt once. It is
the attention of a tree whose trunk is the prompt (as in tree attention, Miao et al., arXiv:2305.09781, there for
decoding). A mask costs attention over the whole packed row, so a layout is taken only where it is cheaper as a whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_LONGEST = 4096  # tokens of a packed row: its mask has the square of that
_WORTH = 0.9  # of the padded batch's cost


@dataclass(frozen=True)
class Cost:
    """Of a forward pass, in multiplications. ``token``: the model's parameters; ``pair``: what two tokens that see each
    other cost in all layers, their width times two."""

    token: int
    pair: int

    def padded(self, rows: int, width: int) -> int:
        """A causal pass: half of the pairs."""
        return rows * (width * self.token + width * width * self.pair // 2)

    def masked(self, rows: int, width: int) -> int:
        return rows * (width * self.token + width * width * self.pair)


@dataclass(frozen=True)
class Fold:
    """Batch rows that share their first ``shared`` tokens; ``own`` tokens of each come after."""

    shared: int
    members: tuple[int, ...]
    own: tuple[int, ...]

    @property
    def tokens(self) -> int:
        return self.shared + sum(self.own)


Layout = tuple[tuple[Fold, ...], ...]  # the folds of each packed row


def plan(prompts: Sequence[bytes], shared: Sequence[int], own: Sequence[int], width: int, cost: Cost) -> Layout | None:
    """The cheapest layout of rows that share ``shared`` tokens where their ``prompts`` are equal; None where the padded
    batch, of that ``width``, is about as cheap."""
    groups: dict[bytes, list[int]] = {}
    for row, prompt in enumerate(prompts):
        groups.setdefault(prompt, []).append(row)
    best, least = None, _WORTH * cost.padded(len(prompts), width)
    most = max(map(len, groups.values()))
    while True:
        folds = [part for group in groups.values() for part in _parts(group, most)]
        sizes = [shared[part[0]] + sum([own[row] for row in part]) for part in folds]
        rows, longest = filled(sizes), max(sizes)
        price = cost.masked(len(rows), longest)
        if 0 < longest <= _LONGEST and price < least:
            best, least = (folds, rows), price
        if most == 1:
            break
        most = -(-most // 2)
    if best is None:
        return None
    folds, rows = best
    made = [Fold(shared[part[0]], tuple(part), tuple(own[row] for row in part)) for part in folds]
    return tuple(tuple(made[number] for number in row) for row in rows)


def _parts(group: Sequence[int], most: int) -> Iterator[Sequence[int]]:
    return (group[first : first + most] for first in range(0, len(group), most))


def filled(sizes: Sequence[int]) -> list[list[int]]:
    """Which go into one row, none longer than the longest: first fit, longest first."""
    order = sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True)
    width, shortest = sizes[order[0]], sizes[order[-1]]
    rows: list[list[int]] = []
    rooms: list[int] = []
    open_from = 0  # rows before it are full for all that come
    for number in order:
        size = sizes[number]
        for place in range(open_from, len(rows)):
            if rooms[place] >= size:
                rows[place].append(number)
                rooms[place] -= size
                break
        else:
            rows.append([number])
            rooms.append(width - size)
        while open_from < len(rows) and rooms[open_from] < shortest:
            open_from += 1
    return rows


@dataclass(frozen=True)
class PackedRows:
    """``input_ids`` and ``positions`` [G, L]; ``mask`` [G, 1, L, L], true where a token (the last axis but one) sees
    another; ``places`` [B, T]: where each token of the batch is among the G * L, 0 for those that have no output."""

    input_ids: Tensor
    positions: Tensor
    mask: Tensor
    places: Tensor

    def to(self, device: torch.device) -> PackedRows:
        moved = {name: column.to(device, non_blocking=True) for name, column in vars(self).items()}
        return replace(self, **moved)

    def unpacked(self, outputs: Tensor) -> Tensor:
        """[G, L, V] of the model, as the batch's rows have it: [B, T, V]."""
        flat = outputs.flatten(0, 1).index_select(0, self.places.flatten())
        return flat.view(*self.places.shape, -1)


def pack(batch: Mapping[str, Tensor], cost: Cost, *, last: bool) -> PackedRows | None:
    """Of ``input_ids``, ``attention_mask`` and ``loss_mask``, on the CPU. ``last``: the output of a row's last token is
    wanted too, which says nothing about a token of the row. None where the batch is better left as it is."""
    if "loss_mask" not in batch:
        return None
    ids, mask = batch["input_ids"].numpy(), batch["loss_mask"].numpy() > 0
    lengths = batch["attention_mask"].numpy().sum(1)
    shared = np.where(mask.any(1), mask.argmax(1), 0)
    own = np.maximum(lengths - shared - (0 if last else 1), 0)
    keys = [row[:count].tobytes() for row, count in zip(ids, shared.tolist(), strict=True)]
    layout = plan(keys, shared.tolist(), own.tolist(), ids.shape[1], cost)
    return None if layout is None else _arranged(layout, ids)


def _arranged(layout: Layout, ids: NDArray[np.int64]) -> PackedRows:
    count, longest = len(layout), max(sum(fold.tokens for fold in row) for row in layout)
    where = np.zeros((len(ids), 5), dtype=np.int64)  # of each: fold, branch, shared, starts of shared and own
    own = np.zeros(len(ids), dtype=np.int64)
    number = 0
    for place, row in enumerate(layout):
        start = place * longest
        for fold in row:
            number += 1
            after = start + fold.shared
            for member, tokens in zip(fold.members, fold.own, strict=True):
                where[member] = number, member + 1, fold.shared, start, after
                own[member] = tokens
                after += tokens
            start = after
    folds, branches, shared, begins, goes_on = where.T[:, :, None]
    steps = np.arange(ids.shape[1])
    is_shared = steps < shared
    is_there = steps < shared + own[:, None]
    places = np.where(is_shared, begins + steps, goes_on + steps - shared)
    flat = places[is_there]

    def spread(values: NDArray[np.int64]) -> NDArray[np.int64]:
        whole = np.zeros(count * longest, dtype=np.int64)
        whole[flat] = np.broadcast_to(values, ids.shape)[is_there]
        return whole.reshape(count, longest)

    of_fold, of_branch = spread(folds), spread(np.where(is_shared, 0, branches))
    return PackedRows(
        input_ids=torch.from_numpy(spread(ids)),
        positions=torch.from_numpy(spread(steps)),
        mask=_mask(torch.from_numpy(of_fold), torch.from_numpy(of_branch)),
        places=torch.from_numpy(np.where(is_there, places, 0)),
    )


def _mask(fold: Tensor, branch: Tensor) -> Tensor:
    """A token sees what came before it in its fold: what is shared, and its own branch. Itself it always sees, so that
    padding computes numbers too."""
    longest = fold.shape[1]
    sees = (fold[:, :, None] == fold[:, None]) & ((branch[:, None] == 0) | (branch[:, :, None] == branch[:, None]))
    before = torch.ones(longest, longest, dtype=torch.bool).tril_()
    return (sees & before).unsqueeze(1)
