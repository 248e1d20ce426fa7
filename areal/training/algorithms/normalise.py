"""Centring and scaling of rewards and advantages over a group or a batch, the same whatever the layout of ranks.

Groups are what the rollout says they are: a group that lost members to a filter or a failure is normalised over those
that are left, and one of a single member has an advantage of zero.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Level = Literal["batch", "group"] | None
Reduce = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Normalisation:
    """``leave_one_out`` compares each with the mean of the others (RLOO, arXiv 2402.14740)."""

    mean: Level = None
    std: Level = None
    leave_one_out: bool = False
    unbiased: bool = True
    eps: float = 1e-5


GRPO = Normalisation(mean="group", std="group")  # arXiv 2402.03300
DR_GRPO = Normalisation(mean="group")  # arXiv 2503.20783
RLOO = Normalisation(mean="group", leave_one_out=True)


def alone(sums: Tensor) -> Tensor:
    """The reduction of a single rank."""
    return sums


def normalised(values: Tensor, mask: Tensor, groups: Tensor, how: Normalisation, reduce: Reduce = alone) -> Tensor:
    """``values`` and ``mask`` [B, T] or [B], ``groups`` [B] of integers -> like ``values``, zero outside the mask.

    A group lives on one rank. ``reduce`` adds up (count, sum, sum of squares) of a batch over all ranks; every rank
    calls it equally often.
    """
    flat = values.double().reshape(values.shape[0], -1)
    active = mask.reshape(flat.shape).to(flat.dtype)
    means, counts = _means(flat, active, groups, how.mean, reduce)
    centred = flat - means
    if how.leave_one_out and how.mean is not None:
        # x - mean of the others = (x - mean of all) * n / (n - 1)
        centred = torch.where(counts > 1, centred * counts / (counts - 1).clamp(min=1), torch.zeros_like(centred))
    if how.mean == "group":
        centred = torch.where(counts > 1, centred, torch.zeros_like(centred))
    if how.std is not None:
        centred = centred / (_deviations(flat, active, groups, how, reduce) + how.eps)
    return (centred * active).to(values.dtype).reshape(values.shape)


def _means(flat: Tensor, active: Tensor, groups: Tensor, level: Level, reduce: Reduce) -> tuple[Tensor, Tensor]:
    """(mean, count) for each row as [B, 1]."""
    if level is None:
        return torch.zeros_like(flat[:, :1]), torch.full_like(flat[:, :1], 2.0)
    count, total = _sums(active, flat * active, groups, level, reduce)
    return total / count.clamp(min=1), count


def _deviations(flat: Tensor, active: Tensor, groups: Tensor, how: Normalisation, reduce: Reduce) -> Tensor:
    # Around the true mean of this level, in two passes: a sum of squares around zero loses small spreads.
    count, total = _sums(active, flat * active, groups, how.std, reduce)
    around = (flat - total / count.clamp(min=1)) * active
    _, squares = _sums(active, around.square(), groups, how.std, reduce)
    degrees = (count - 1).clamp(min=1) if how.unbiased else count.clamp(min=1)
    return torch.where(count > 1, (squares / degrees).sqrt(), torch.ones_like(squares))  # one alone has no spread


def _sums(active: Tensor, weighted: Tensor, groups: Tensor, level: Level, reduce: Reduce) -> tuple[Tensor, Tensor]:
    rows = torch.stack([active.sum(1), weighted.sum(1)], dim=1)
    if level == "batch":
        total = reduce(rows.sum(0))
        return total[0].expand(len(rows), 1), total[1].expand(len(rows), 1)
    places, members = torch.unique(groups, return_inverse=True)
    by_group = rows.new_zeros(len(places), 2).index_add_(0, members, rows)[members]
    return by_group[:, :1], by_group[:, 1:]
