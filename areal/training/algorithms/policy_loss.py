"""Policy objectives: PPO's clipped ratio and its relatives, with the behaviour correction of asynchronous rollouts.

u = pi_theta / pi_proximal is what is clipped; w = pi_proximal / pi_behaviour is a constant weight. Standard PPO has
the behaviour policy for the proximal one, and w = 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from areal.training.algorithms.sequences import masked_mean

_LOG_BOUND = 30.0  # a ratio's value stays finite, also its square in a gradient's norm


@dataclass(frozen=True)
class PolicyObjective:
    """``clip`` is (below, above) 1. ``dual_clip`` bounds the loss of a negative advantage (arXiv 1912.09729).

    kind: ``ppo`` (arXiv 1707.06347), ``cispo`` (arXiv 2506.13585), ``sapo`` (arXiv 2511.20347).
    level: one ratio a token, or one a sequence (GSPO, arXiv 2507.18071).
    """

    kind: Literal["ppo", "cispo", "sapo"] = "ppo"
    level: Literal["token", "sequence"] = "token"
    clip: tuple[float, float] = (0.2, 0.2)
    dual_clip: float | None = None
    sapo_temperatures: tuple[float, float] = (1.0, 1.05)  # of positive and of negative advantages

    def __post_init__(self) -> None:
        if min(self.clip) < 0:
            raise ValueError(f"clip must not be negative, got {self.clip}")
        if self.dual_clip is not None and self.dual_clip <= 1:
            raise ValueError(f"dual_clip must be above 1, got {self.dual_clip}")


@dataclass(frozen=True)
class PolicyLoss:
    """``per_token`` [B, T] is to be averaged over the loss mask; ``clipped`` [B, T] says where the clip held."""

    per_token: Tensor
    ratio: Tensor
    clipped: Tensor


def policy_loss(
    logprobs: Tensor,
    proximal: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    objective: PolicyObjective,
    weights: Tensor | None = None,
) -> PolicyLoss:
    """All [B, T], token aligned. Only ``logprobs`` has a gradient. ``weights``: the behaviour correction, 0 where a
    token was left out."""
    active = loss_mask.bool()
    log_ratio = torch.where(active, logprobs - proximal, torch.zeros_like(logprobs))
    if objective.level == "sequence":
        # The value is the sequence's geometric mean; each token's own gradient flows in proportion (GSPO, eq. 7).
        log_ratio = masked_mean(log_ratio, active, dim=1).expand_as(log_ratio)
        advantages = masked_mean(advantages, active, dim=1).expand_as(advantages)
    ratio = bounded_exp(log_ratio)
    loss, clipped = _OBJECTIVES[objective.kind](ratio, logprobs, advantages, objective)
    if weights is not None:
        loss = loss * weights
    loss = torch.where(active, loss, torch.zeros_like(loss))
    return PolicyLoss(loss, ratio.detach(), (clipped & active).detach())


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """exp, its value bounded to stay finite. Beyond the bound the gradient is that at the bound, not 0: a token that is
    far too likely must be pushed back, however far it is."""
    value = log_ratio.detach().clamp(-_LOG_BOUND, _LOG_BOUND).exp()
    return value * (1 + (log_ratio - log_ratio.detach()))


def _ppo(ratio: Tensor, logprobs: Tensor, advantages: Tensor, objective: PolicyObjective) -> tuple[Tensor, Tensor]:
    low, high = objective.clip
    free, bounded = -ratio * advantages, -ratio.clamp(1 - low, 1 + high) * advantages
    loss, clipped = torch.maximum(free, bounded), bounded > free
    if objective.dual_clip is not None:
        ceiling = -objective.dual_clip * advantages
        over = (advantages < 0) & (loss > ceiling)
        loss, clipped = torch.where(over, ceiling, loss), clipped | over
    return loss, clipped


def _cispo(ratio: Tensor, logprobs: Tensor, advantages: Tensor, objective: PolicyObjective) -> tuple[Tensor, Tensor]:
    low, high = objective.clip
    bounded = ratio.clamp(1 - low, 1 + high).detach()
    return -bounded * advantages * logprobs, bounded != ratio


def _sapo(ratio: Tensor, logprobs: Tensor, advantages: Tensor, objective: PolicyObjective) -> tuple[Tensor, Tensor]:
    positive, negative = objective.sapo_temperatures
    tau = torch.where(advantages > 0, positive, negative)
    gate = torch.sigmoid(tau * (ratio - 1)) * 4 / tau
    return -gate * advantages, torch.zeros_like(ratio, dtype=torch.bool)


_OBJECTIVES = {"ppo": _ppo, "cispo": _cispo, "sapo": _sapo}
