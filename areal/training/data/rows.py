"""From rows of a data set to a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from areal.errors import UsageFault
from areal.training.data.batches import Batch


def token_batch(rows: Sequence[Mapping[str, Any]], pad_id: int = 0, prefix: str = "") -> Batch:
    """Rows with ``input_ids`` and ``loss_mask`` (lists of ints, equally long; ``prefix`` before both names)."""
    ids, masks = f"{prefix}input_ids", f"{prefix}loss_mask"
    for number, row in enumerate(rows):
        _check(number, row, ids, masks)
    width = max(len(row[ids]) for row in rows)
    lengths = torch.tensor([len(row[ids]) for row in rows])
    padded = torch.tensor([[*row[ids], *[pad_id] * (width - len(row[ids]))] for row in rows])
    masked = torch.tensor([[*row[masks], *[0] * (width - len(row[ids]))] for row in rows])
    masked[:, 0] = 0  # the first token follows nothing
    return {"input_ids": padded, "attention_mask": torch.arange(width) < lengths[:, None], "loss_mask": masked.bool()}


def paired_batch(rows: Sequence[Mapping[str, Any]], pad_id: int = 0) -> Batch:
    """Preferences: the chosen and the rejected answer of each row, one after the other."""
    sides = ("chosen_", "rejected_")
    flat = [
        {"input_ids": row.get(f"{side}input_ids"), "loss_mask": row.get(f"{side}loss_mask")}
        for row in rows
        for side in sides
    ]
    return token_batch(flat, pad_id)


def _check(number: int, row: Mapping[str, Any], ids: str, masks: str) -> None:
    tokens, mask = row.get(ids), row.get(masks)
    if tokens is None or mask is None:
        raise UsageFault(f"row {number} of the batch has no {ids if tokens is None else masks}: it has {sorted(row)}")
    if len(tokens) != len(mask) or not len(tokens):
        raise UsageFault(f"row {number} of the batch has {len(tokens)} tokens and a mask of {len(mask)}")
