"""Losses of supervised fine-tuning, of a critic, of a reward model, and of direct preference optimisation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from areal.training.algorithms.sequences import sequence_sums


def sft_loss(logprobs: Tensor, loss_mask: Tensor) -> Tensor:
    """Negative log likelihood of each token of the mask: [B, T], to be averaged over the mask."""
    return torch.where(loss_mask.bool(), -logprobs, torch.zeros_like(logprobs))


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, loss_mask: Tensor, clip: float | None) -> Tensor:
    """Squared error of a critic, its step from ``old_values`` bounded by ``clip`` (arXiv 1707.06347, section 6):
    [B, T], to be averaged over the mask."""
    error = (values - returns).square()
    if clip is not None:
        bounded = old_values + (values - old_values).clamp(-clip, clip)
        error = torch.maximum(error, (bounded - returns).square())
    return torch.where(loss_mask.bool(), error / 2, torch.zeros_like(error))


@dataclass(frozen=True)
class PairLoss:
    """``per_pair`` [N], to be averaged; ``margins`` [N]: how much better the chosen one does; right above 0."""

    per_pair: Tensor
    margins: Tensor


def reward_model_loss(scores: Tensor) -> PairLoss:
    """Bradley-Terry: ``scores`` [2N], chosen and rejected in turn, of the last token of each answer."""
    margins = scores[0::2] - scores[1::2]
    return PairLoss(-torch.nn.functional.logsigmoid(margins), margins.detach())


def dpo_loss(
    logprobs: Tensor,
    reference: Tensor,
    loss_mask: Tensor,
    beta: float,
    label_smoothing: float = 0.0,
    kind: Literal["sigmoid", "ipo"] = "sigmoid",
) -> PairLoss:
    """Direct preference optimisation (arXiv 2305.18290): ``logprobs`` and ``reference`` [2N, T] of chosen and rejected
    answers in turn. ``label_smoothing`` is the share of labels thought wrong (conservative DPO). ``ipo``: the squared
    distance of the mean log ratios' difference from 1 / (2 beta) (arXiv 2310.12036)."""
    gained = sequence_sums(logprobs - reference, loss_mask)
    if kind == "ipo":
        gained = gained / loss_mask.sum(1).clamp(min=1)
        gap = gained[0::2] - gained[1::2]
        return PairLoss((gap - 1 / (2 * beta)).square(), gap.detach())
    margins = beta * (gained[0::2] - gained[1::2])
    right, wrong = torch.nn.functional.logsigmoid(margins), torch.nn.functional.logsigmoid(-margins)
    return PairLoss(-(1 - label_smoothing) * right - label_smoothing * wrong, margins.detach())
