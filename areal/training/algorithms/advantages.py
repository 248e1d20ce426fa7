"""From the reward of a sequence to the advantage of each of its tokens: rewards, normalization, GAE, KL penalty.

Groups are what the rollout says they are: a group that lost members to a filter or a failure is normalized over the
rest, and a single member has an advantage of zero. Results do not depend on the layout of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
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


# -- centering and scaling over a group or a batch

Level = Literal["batch", "group"] | None
Reduce = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Normalization:
    """``leave_one_out`` compares each with the mean of the others (RLOO, arXiv 2402.14740)."""

    mean: Level = None
    std: Level = None
    leave_one_out: bool = False
    unbiased: bool = True
    eps: float = 1e-5


GRPO = Normalization(mean="group", std="group")  # arXiv 2402.03300
DR_GRPO = Normalization(mean="group")  # arXiv 2503.20783
RLOO = Normalization(mean="group", leave_one_out=True)


def alone(sums: Tensor) -> Tensor:
    """The reduction of a single rank."""
    return sums


def normalized(values: Tensor, mask: Tensor, groups: Tensor, how: Normalization, reduce: Reduce = alone) -> Tensor:
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


def _deviations(flat: Tensor, active: Tensor, groups: Tensor, how: Normalization, reduce: Reduce) -> Tensor:
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


# -- generalized advantage estimation (arXiv 1506.02438), a timestep being a token or a turn. Only generated tokens
# are timesteps: a tool's answer between two of them costs no time.


@dataclass(frozen=True)
class Advantages:
    """``advantages`` and ``returns`` [B, T]; both zero where nothing was generated."""

    advantages: Tensor
    returns: Tensor


def by_token(
    rewards: Tensor,
    values: Tensor,
    loss_mask: Tensor,
    *,
    discount: float,
    gae_lambda: float | Tensor,
    bootstrap: Tensor | None = None,
) -> Advantages:
    """``rewards``, ``values``, ``loss_mask`` [B, T]; ``bootstrap`` [B]: the value of the state after the last token
    where an answer was cut off, 0 where it ended by itself. ``gae_lambda`` may be [B].

    delta_t = r_t + discount * V_next - V_t;  A_t = delta_t + discount * lambda * A_next
    """
    active = loss_mask.bool()
    upcoming = torch.zeros_like(rewards[:, 0]) if bootstrap is None else bootstrap.to(rewards)
    carried = torch.zeros_like(upcoming)
    columns: list[Tensor] = []
    for t in range(rewards.shape[1] - 1, -1, -1):
        here = active[:, t]
        delta = rewards[:, t] + discount * upcoming - values[:, t]
        carried = torch.where(here, delta + discount * gae_lambda * carried, carried)
        upcoming = torch.where(here, values[:, t], upcoming)
        columns.append(torch.where(here, carried, torch.zeros_like(carried)))
    advantages = torch.stack(columns[::-1], dim=1)
    return Advantages(advantages, (advantages + values) * active)


def by_turn(
    rewards: Tensor,
    values: Tensor,
    loss_mask: Tensor,
    turn_ids: Tensor,
    *,
    discount: float,
    gae_lambda: float | Tensor,
    bootstrap: Tensor | None = None,
) -> Advantages:
    """As ``by_token`` with one timestep for each generated turn: its reward is the sum over its tokens, its value that
    of its first token, and all of its tokens share its advantage. ``turn_ids`` [B, T], -1 outside generated turns."""
    turns = int(turn_ids.max()) + 1 if turn_ids.numel() else 0
    if turns <= 0:
        return Advantages(torch.zeros_like(rewards), torch.zeros_like(rewards))
    active = loss_mask.bool() & (turn_ids >= 0)
    place = turn_ids.clamp(min=0)
    shape = (rewards.shape[0], turns)
    turn_rewards = rewards.new_zeros(shape).scatter_add_(1, place, rewards * active)
    present = rewards.new_zeros(shape).scatter_add_(1, place, active.to(rewards.dtype)) > 0
    previous = torch.where(active, place, -1).cummax(1).values
    opens = active & (torch.nn.functional.pad(previous, (1, 0), value=-1)[:, :-1] != place)
    turn_values = values.new_zeros(shape).scatter_add_(1, place, values * opens)
    turned = by_token(turn_rewards, turn_values, present, discount=discount, gae_lambda=gae_lambda, bootstrap=bootstrap)
    return Advantages(turned.advantages.gather(1, place) * active, turned.returns.gather(1, place) * active)


# -- adaptive coefficient of the KL penalty (Ziegler et al., arXiv 1909.08593, section 2.2)

_MOST = 0.2  # the relative error that counts


@dataclass
class KLController:
    """Holds the KL divergence from the reference near ``target``; None: the coefficient stays. ``horizon``: over how
    many sequences the coefficient may grow by a fifth. ``factor`` multiplies the configured coefficient."""

    target: float | None = None
    horizon: int = 10_000
    factor: float = 1.0

    def update(self, kl: float, sequences: int) -> None:
        """``kl``: the mean over the tokens of a batch of so many sequences."""
        if self.target is not None:
            error = min(max(kl / self.target - 1, -_MOST), _MOST)
            self.factor *= 1 + error * sequences / self.horizon
