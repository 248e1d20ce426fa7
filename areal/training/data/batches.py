"""A batch is a dict of tensors: columns [B, T] of tokens, padded on the right, and columns [B] of sequences.

``attention_mask`` [B, T] says where the tokens are; everything else may be absent. What belongs to a batch as a whole
travels beside it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

Batch = dict[str, Tensor]

_PADDING: Mapping[str, int] = {"versions": -1, "turn_ids": -1}


def rows(batch: Mapping[str, Tensor]) -> int:
    return len(batch["attention_mask"])


def lengths(batch: Mapping[str, Tensor]) -> list[int]:
    """Tokens of each row."""
    counted: list[int] = batch["attention_mask"].sum(1).tolist()
    return counted


def concat(batches: Sequence[Mapping[str, Tensor]]) -> Batch:
    """One under the other, padded to the widest. Raises ValueError where they have not the same columns."""
    if not batches:
        raise ValueError("no batch to put together")
    names = set(batches[0])
    for batch in batches[1:]:
        if set(batch) != names:
            raise ValueError(f"batches differ in their columns: {sorted(names ^ set(batch))}")
    width = max(batch["attention_mask"].shape[1] for batch in batches)
    return {name: torch.cat([_widened(name, batch[name], width) for batch in batches]) for name in batches[0]}


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


def position_ids(attention_mask: Tensor) -> Tensor:
    """[B, T]: 0, 1, 2 ... over the tokens of a row."""
    return (attention_mask.long().cumsum(1) - 1).clamp(min=0)


def _widened(name: str, column: Tensor, width: int) -> Tensor:
    if column.dim() < 2 or column.shape[1] == width:
        return column
    return torch.nn.functional.pad(column, (0, width - column.shape[1]), value=_PADDING.get(name, 0))
