"""A batch is a dict of tensors: columns [B, T] of tokens, padded on the right, and columns [B] of sequences.

``attention_mask`` [B, T] says where the tokens are; everything else may be absent. What belongs to a batch as a whole
travels beside it. Batches are put together by ``areal.workflow.tensors.concat_padded_tensors``, as episodes are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

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
