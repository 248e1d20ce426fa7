"""From the reward of a sequence to the reward of each token."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

_LOG_BOUND = 30.0
KLEstimator = Literal["k1", "k2", "k3"]


@dataclass(frozen=True)
class RewardShaping:
    """``clip(scale * (reward + overlong penalty + bias), +-clip)``.

    The penalty is DAPO's soft overlong punishment (arXiv 2503.14476, eq. 13), part of the reward itself: 0 up to
    ``max_new_tokens - overlong_tokens`` generated tokens, from there linearly down to ``-overlong_penalty``.
    """

    scale: float = 1.0
    bias: float = 0.0
    clip: float | None = None
    overlong_tokens: int | None = None  # None: no penalty
    overlong_penalty: float = 1.0
    max_new_tokens: int | None = None


def shaped(rewards: Tensor, lengths: Tensor, how: RewardShaping) -> Tensor:
    """``rewards`` [B], ``lengths`` [B] (generated tokens) -> [B]."""
    result = rewards
    if how.overlong_tokens:
        if how.max_new_tokens is None:
            raise ValueError("a penalty on overlong answers needs max_new_tokens")
        excess = lengths - (how.max_new_tokens - how.overlong_tokens)
        result = result - how.overlong_penalty * (excess / how.overlong_tokens).clamp(0.0, 1.0)
    result = (result + how.bias) * how.scale
    return result if how.clip is None else result.clamp(-how.clip, how.clip)


def kl_estimate(logprobs: Tensor, reference: Tensor, estimator: KLEstimator = "k1") -> Tensor:
    """Estimate of KL(policy || reference) for each sampled token (http://joschu.net/blog/kl-approx.html).

    k1 = log(p/q): unbiased, signed. k2 = log(p/q)^2 / 2: biased, never negative. k3 = q/p - 1 - log(q/p): unbiased,
    never negative.
    """
    log_ratio = logprobs - reference
    if estimator == "k1":
        return log_ratio
    if estimator == "k2":
        return log_ratio.square() / 2
    # Beyond what a float can hold it goes on in a straight line: finite, and still pulled back.
    beyond = torch.relu(-log_ratio - _LOG_BOUND) * math.exp(_LOG_BOUND)
    return torch.expm1((-log_ratio).clamp(max=_LOG_BOUND)) + beyond + log_ratio


def token_rewards(rewards: Tensor, loss_mask: Tensor, penalty: Tensor | None = None) -> Tensor:
    """Put ``rewards`` [B] on the last generated token of each row; ``penalty`` [B, T] is taken off each token."""
    spread = torch.zeros(loss_mask.shape, dtype=torch.float32, device=rewards.device)
    rows = torch.arange(len(rewards), device=rewards.device)
    positions = torch.arange(loss_mask.shape[1], device=rewards.device)
    last = (positions * loss_mask.long()).amax(1)
    spread[rows, last] = rewards.float() * loss_mask[rows, last].float()
    return spread if penalty is None else spread - penalty * loss_mask
