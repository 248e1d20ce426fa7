"""A batch is a dict of tensors: columns [B, T] of tokens, padded on the right, and columns [B] of sequences.

``attention_mask`` [B, T] is True for tokens; everything else may be absent. What belongs to a batch as a whole travels
separately. Episodes become batches by ``areal.rollout.tensors.concat_padded_tensors``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from areal.errors import UsageFault
from areal.training.data.packing import partition

Batch = dict[str, Tensor]


def rows(batch: Mapping[str, Tensor]) -> int:
    return len(batch["attention_mask"])


def lengths(batch: Mapping[str, Tensor]) -> list[int]:
    """Tokens of each row."""
    counted: list[int] = batch["attention_mask"].sum(1).tolist()
    return counted


def select(batch: Mapping[str, Tensor], indices: Sequence[int]) -> Batch:
    """These rows, in this order, no wider than the widest of them."""
    where = torch.as_tensor(indices, dtype=torch.long, device=batch["attention_mask"].device)
    return trimmed({name: column[where] for name, column in batch.items()})


def trimmed(batch: Mapping[str, Tensor]) -> Batch:
    """Without the columns that are padding in every row."""
    mask = batch["attention_mask"]
    used = mask.any(0).nonzero()
    width = int(used[-1]) + 1 if len(used) else 1
    return {name: column[:, :width] if column.dim() > 1 else column for name, column in batch.items()}


def moved(batch: Mapping[str, Tensor], device: torch.device) -> Batch:
    return {name: column.to(device, non_blocking=True) for name, column in batch.items()}


# -- from rows of a data set to a batch


def token_batch(rows: Sequence[Mapping[str, Any]], pad_id: int = 0) -> Batch:
    """Rows with ``input_ids`` and ``loss_mask``: lists of ints, equally long."""
    for number, row in enumerate(rows):
        _check(number, row)
    sizes = [len(row["input_ids"]) for row in rows]
    width, lengths = max(sizes), torch.tensor(sizes)
    padded = torch.tensor(
        [[*row["input_ids"], *[pad_id] * (width - size)] for row, size in zip(rows, sizes, strict=True)]
    )
    masked = torch.tensor([[*row["loss_mask"], *[0] * (width - size)] for row, size in zip(rows, sizes, strict=True)])
    masked[:, 0] = 0  # the first token follows nothing
    return {"input_ids": padded, "attention_mask": torch.arange(width) < lengths[:, None], "loss_mask": masked.bool()}


def paired_batch(rows: Sequence[Mapping[str, Any]], pad_id: int = 0) -> Batch:
    """Preferences with ``chosen_ids`` and ``rejected_ids``: both answers of each row, one after the other. Answers
    begin after ``prompt_length`` tokens; without it the prompt is what both have in common, as in TRL."""
    flat = [side for number, row in enumerate(rows) for side in _sides(number, row)]
    return token_batch(flat, pad_id)


def _sides(number: int, row: Mapping[str, Any]) -> list[dict[str, Any]]:
    missing = [name for name in ("chosen_ids", "rejected_ids") if not row.get(name)]
    if missing:
        raise UsageFault(f"row {number} of the batch has no {missing[0]}: it has {sorted(row)}")
    chosen, rejected = list(row["chosen_ids"]), list(row["rejected_ids"])
    shared = next(
        (place for place, (left, right) in enumerate(zip(chosen, rejected, strict=False)) if left != right),
        min(len(chosen), len(rejected)) - 1,
    )
    prompt = min(shared, row.get("prompt_length", shared))
    return [{"input_ids": ids, "loss_mask": [0] * prompt + [1] * (len(ids) - prompt)} for ids in (chosen, rejected)]


def _check(number: int, row: Mapping[str, Any]) -> None:
    tokens, mask = row.get("input_ids"), row.get("loss_mask")
    if tokens is None or mask is None:
        missing = "input_ids" if tokens is None else "loss_mask"
        raise UsageFault(f"row {number} of the batch has no {missing}: it has {sorted(row)}")
    if len(tokens) != len(mask) or not len(tokens):
        raise UsageFault(f"row {number} of the batch has {len(tokens)} tokens and a mask of {len(mask)}")


# -- whole groups over ranks and minibatches, with nearly equal tokens and no empty part


def shared_groups(lengths: Sequence[int], groups: Sequence[int], ranks: int) -> list[list[int]]:
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
