"""From rows of a data set to a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from areal.errors import UsageFault
from areal.training.data.batches import Batch


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
