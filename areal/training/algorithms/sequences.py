"""Sums and means over the tokens of a mask."""

from __future__ import annotations

import torch
from torch import Tensor


def masked_mean(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Mean of ``values`` where ``mask``; 0 where nothing is. With ``dim`` that dimension is kept, as 1."""
    active = mask.to(values.dtype)
    kept = torch.where(mask.bool(), values, torch.zeros_like(values))
    if dim is None:
        return kept.sum() / active.sum().clamp(min=1)
    return kept.sum(dim, keepdim=True) / active.sum(dim, keepdim=True).clamp(min=1)


def sequence_sums(values: Tensor, mask: Tensor) -> Tensor:
    """[B, T] -> [B]: the sum of ``values`` over each row's mask."""
    return torch.where(mask.bool(), values, torch.zeros_like(values)).sum(1)
