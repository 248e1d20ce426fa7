"""Generalised advantage estimation (arXiv 1506.02438), a timestep being a token or a turn.

Only generated tokens are timesteps: between two of them there may be a tool's answer, which costs no time.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


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
