"""Advantages and returns of sampled rows, by the settings of a ``PPOActorConfig``.

``prepare`` runs in this order: shape rewards; normalize them over their group or the batch; zero the rewards of
truncated responses or mask these, if configured; assign rewards to tokens, minus the KL penalty; estimate advantages;
normalize advantages.

A group that lost members to a filter or a failure is normalized over the rest; a single member has advantage zero.
A sample of several turns counts once, however many rows it has. Results do not depend on the layout of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from areal.api.algorithm_api import AdvantageFn, AdvantageInputs
from areal.dataclasses import dataclass
from areal.errors import UsageFault
from areal.loading import load_function
from areal.training.algorithms.losses import require_token_tensor

if TYPE_CHECKING:
    from areal.api.cli_args import NormConfig, PPOActorConfig

_LOG_BOUND = 30.0
KLEstimator = Literal["k1", "k2", "k3"]
Level = Literal["batch", "group"] | None
Reduce = Callable[[Tensor], Tensor]
_MAX_ERROR = 0.2  # relative


def shape_rewards(rewards: Tensor, lengths: Tensor, config: PPOActorConfig) -> Tensor:
    """Return ``clip(scaling * (reward - overlong penalty + bias), +-reward_clip)``: ``rewards`` [B] and ``lengths`` [B]
    in generated tokens -> [B].

    The penalty is DAPO's soft overlong punishment (arXiv 2503.14476, eq. 13), part of the reward itself: 0 up to
    ``max_new_tokens - overlong_tokens`` generated tokens, from there linearly up to ``overlong_penalty_factor``.
    """
    if config.overlong_reward_penalty:
        if config.max_new_tokens is None:
            raise ValueError("a penalty on overlong answers needs max_new_tokens")
        buffer = config.overlong_tokens or max(1, config.max_new_tokens // 5)  # DAPO: 4,096 of 20,480
        factor = 1.0 if config.overlong_penalty_factor is None else config.overlong_penalty_factor
        excess = lengths - (config.max_new_tokens - buffer)
        rewards = rewards - factor * (excess / buffer).clamp(0.0, 1.0)
    return ((rewards + config.reward_bias) * config.reward_scaling).clamp(-config.reward_clip, config.reward_clip)


def clipped_share(rewards: Tensor, config: PPOActorConfig) -> float:
    """Return the share of ``rewards`` [B] that ``reward_clip`` changes: they are trained on as if they were equal."""
    scaled = (rewards.float() + config.reward_bias) * config.reward_scaling
    return float((scaled.abs() > config.reward_clip).float().mean())


def longest_turns(loss_mask: Tensor, turn_ids: Tensor | None) -> Tensor:
    """Return the generated tokens of each row's longest turn: [B]. ``turn_ids`` [B, T]: -1 outside turns; None: one."""
    if turn_ids is None or not loss_mask.numel():
        return loss_mask.sum(1)
    places = turn_ids.long().clamp(min=0)
    counts = torch.zeros(len(places), int(places.max()) + 1, dtype=torch.long, device=places.device)
    return counts.scatter_add_(1, places, loss_mask.long()).amax(1)


def kl_estimate(logprobs: Tensor, reference: Tensor, estimator: KLEstimator = "k1") -> Tensor:
    """Return an estimate of KL(policy || reference) for each sampled token (http://joschu.net/blog/kl-approx.html).

    k1 = log(p/q): unbiased, signed. k2 = log(p/q)^2 / 2: biased, never negative. k3 = q/p - 1 - log(q/p): unbiased,
    never negative.
    """
    log_ratio = logprobs - reference
    if estimator == "k1":
        return log_ratio
    if estimator == "k2":
        return log_ratio.square() / 2
    # Linear beyond the bound: finite, and still with a gradient.
    beyond = torch.relu(-log_ratio - _LOG_BOUND) * math.exp(_LOG_BOUND)
    return torch.expm1((-log_ratio).clamp(max=_LOG_BOUND)) + beyond + log_ratio


def token_rewards(rewards: Tensor, loss_mask: Tensor, penalty: Tensor | None = None) -> Tensor:
    """Return rewards [B, T]: ``rewards`` [B] at the last generated token of each row, minus ``penalty`` [B, T]."""
    spread = torch.zeros(loss_mask.shape, dtype=torch.float32, device=rewards.device)
    rows = torch.arange(len(rewards), device=rewards.device)
    positions = torch.arange(loss_mask.shape[1], device=rewards.device)
    last = (positions * loss_mask.long()).amax(1)
    spread[rows, last] = rewards.float() * loss_mask[rows, last].float()
    return spread if penalty is None else spread - penalty * loss_mask


def identity(sums: Tensor) -> Tensor:
    """Return ``sums``: the reduction of a single rank."""
    return sums


def normalize(
    values: Tensor,
    mask: Tensor,
    groups: Tensor,
    norm: NormConfig,
    reduce: Reduce = identity,
    samples: Tensor | None = None,
) -> Tensor:
    """Normalize ``values`` [B, T] or [B] over ``mask``, by ``groups`` [B] of integers or the batch; zero outside the
    mask. ``mean_leave1out`` subtracts the mean of the others (RLOO, arXiv 2402.14740).

    ``samples`` [B] of integers, for values [B]: the rows of one sample, its turns, have one number. Each sample then
    counts once: its rows share a weight of 1. Without it, each row is a sample.

    A group is on one rank. ``reduce`` sums a tensor over all ranks; every rank calls it equally often.
    """
    flat = values.double().reshape(values.shape[0], -1)
    active = mask.reshape(flat.shape).to(flat.dtype)
    sample_means, weights = flat, active
    if samples is not None:
        _, members, sizes = torch.unique(samples, return_inverse=True, return_counts=True)
        weights = active / sizes[members][:, None]
        sample_means = flat.new_zeros(len(sizes), 1).index_add_(0, members, flat * weights)[members]
    centred = flat
    if norm.mean_level is not None:
        counts, totals = _sums(weights, flat * weights, groups, norm.mean_level, reduce)
        means = totals / counts.clamp(min=1)
        centred = flat - means
        if norm.mean_leave1out:
            # mean of the others = mean of all - (its own mean - mean of all) / (n - 1)
            centred = centred + (sample_means - means) / (counts - 1)
        if norm.mean_leave1out or norm.mean_level == "group":  # a single sample has no others
            centred = torch.where(counts > 1.5, centred, torch.zeros_like(centred))
    if norm.std_level is not None:
        deviations = _deviations(flat, weights, groups, norm, reduce)
        centred = centred / (deviations + norm.eps)
        if norm.std_level == "group" and norm.mean_level != "group":  # a group of equal values is not centred on them
            centred = torch.where(deviations > norm.eps, centred, torch.zeros_like(centred))
    return (centred * active).to(values.dtype).reshape(values.shape)


def _deviations(flat: Tensor, weights: Tensor, groups: Tensor, norm: NormConfig, reduce: Reduce) -> Tensor:
    # In two passes, around the mean: a sum of squares around zero loses small deviations to rounding.
    count, total = _sums(weights, flat * weights, groups, norm.std_level, reduce)
    around = flat - total / count
    _, squares = _sums(weights, around.square() * weights, groups, norm.std_level, reduce)
    degrees = count - 1 if norm.std_unbiased else count
    return torch.where(count > 1.5, (squares / degrees).sqrt(), torch.ones_like(squares))  # one value has no deviation


def _sums(weights: Tensor, weighted: Tensor, groups: Tensor, level: Level, reduce: Reduce) -> tuple[Tensor, Tensor]:
    """Return (count, sum) for each row as [B, 1]. Counts are sums of ``weights``, whole except for rounding."""
    rows = torch.stack([weights.sum(1), weighted.sum(1)], dim=1)
    if level == "batch":
        total = reduce(rows.sum(0))
        return total[0].expand(len(rows), 1), total[1].expand(len(rows), 1)
    places, members = torch.unique(groups, return_inverse=True)
    by_group = rows.new_zeros(len(places), 2).index_add_(0, members, rows)[members]
    return by_group[:, :1], by_group[:, 1:]


@dataclass(frozen=True)
class Advantages:
    """``advantages`` and ``returns`` [B, T] of a batch; both are zero at tokens that were not generated."""

    advantages: Tensor
    returns: Tensor


def gae_by_token(
    rewards: Tensor,
    values: Tensor,
    loss_mask: Tensor,
    *,
    discount: float,
    gae_lambda: float | Tensor,
    bootstrap: Tensor | None = None,
) -> Advantages:
    """Estimate generalized advantages (arXiv 1506.02438), one timestep for each generated token; a tool's output is
    none.

    ``rewards``, ``values``, ``loss_mask`` [B, T]; ``bootstrap`` [B]: the value of the state after the last token of a
    truncated response, 0 of a finished one. ``gae_lambda`` may be [B].

    delta_t = r_t + discount * V_next - V_t; A_t = delta_t + discount * lambda * A_next
    """
    active = loss_mask.bool()
    upcoming = rewards.new_zeros(len(rewards)) if bootstrap is None else bootstrap.to(rewards)
    carried = torch.zeros_like(upcoming)
    columns: list[Tensor] = []
    for t in reversed(range(rewards.shape[1])):
        here = active[:, t]
        delta = rewards[:, t] + discount * upcoming - values[:, t]
        carried = torch.where(here, delta + discount * gae_lambda * carried, carried)
        upcoming = torch.where(here, values[:, t], upcoming)
        columns.append(torch.where(here, carried, torch.zeros_like(carried)))
    advantages = torch.stack(columns[::-1], dim=1)
    return Advantages(advantages, (advantages + values) * active)


def gae_by_turn(
    rewards: Tensor,
    values: Tensor,
    loss_mask: Tensor,
    turn_ids: Tensor,
    *,
    discount: float,
    gae_lambda: float | Tensor,
    bootstrap: Tensor | None = None,
) -> Advantages:
    """Estimate as ``gae_by_token``, with one timestep for each generated turn: its reward is the sum over its tokens,
    its value that of its first token, and its tokens share its advantage. ``turn_ids`` [B, T]: -1 outside."""
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
    turned = gae_by_token(
        turn_rewards, turn_values, present, discount=discount, gae_lambda=gae_lambda, bootstrap=bootstrap
    )
    return Advantages(turned.advantages.gather(1, place) * active, turned.returns.gather(1, place) * active)


@dataclass
class KLController:
    """Keeps the KL divergence from the reference near ``target`` (arXiv 1909.08593, section 2.2); None disables it.
    ``factor`` multiplies the configured coefficient. It changes by at most a fifth over ``horizon`` sequences."""

    target: float | None = None
    horizon: int = 10_000
    factor: float = 1.0

    def update(self, kl: float, sequences: int) -> None:
        """Update ``factor`` by ``kl``, the mean over the tokens of a batch of ``sequences``."""
        if self.target is not None:
            error = min(max(kl / self.target - 1, -_MAX_ERROR), _MAX_ERROR)
            self.factor *= 1 + error * min(sequences / self.horizon, 1.0)  # always above 0


@dataclass(frozen=True)
class AuxiliaryOutputs:
    """Outputs of other models for the same rows: ``reference`` log-probabilities [B, T]; critic ``values`` [B, T] of
    the state before each token, and ``after`` [B] of the state after the last token."""

    reference: Tensor | None = None
    values: Tensor | None = None
    after: Tensor | None = None


def prepare(
    batch: Mapping[str, Tensor],
    groups: Tensor,
    config: PPOActorConfig,
    auxiliary: AuxiliaryOutputs,
    reduce: Reduce = identity,
    *,
    kl_factor: float = 1.0,
    advantage_fn: AdvantageFn | None = None,
) -> dict[str, Tensor]:
    """Add ``advantages``, ``returns``, ``shaped_rewards`` and, with a reference, ``ref_logprobs`` and ``kl``.
    ``groups`` [B]: rows of one prompt have one number. In the batch, ``truncated`` [B]: responses that were cut off;
    ``sample_ids`` [B], where samples have several rows: one number for the turns of a sample.
    ``kl_factor`` multiplies ``kl_ctl``; ``advantage_fn`` replaces GAE."""
    assert not isinstance(config.adv_norm, bool), "the configuration has replaced the older flag by a norm"
    mask = batch["loss_mask"].bool()
    truncated = _truncated(batch, config)
    rewards = shape_rewards(batch["rewards"].float(), longest_turns(mask, batch.get("turn_ids")), config)
    if config.reward_norm is not None:
        whole, samples = torch.ones_like(rewards), batch.get("sample_ids")
        rewards = normalize(rewards, whole, groups, config.reward_norm, reduce, samples)
    if config.mask_no_eos_with_zero:  # after the norm, where 0 is neutral
        rewards = torch.where(truncated, torch.zeros_like(rewards), rewards)
    if config.mask_truncated_completions:  # after the rewards, which stay in the group's baseline
        mask = mask & ~truncated[:, None]
        batch = {**batch, "loss_mask": batch["loss_mask"] * mask}
    kl = None
    if auxiliary.reference is not None:
        kl = torch.where(mask, kl_estimate(batch["logprobs"], auxiliary.reference, config.kl_estimator), 0.0)
        batch = {**batch, "ref_logprobs": auxiliary.reference, "kl": kl}
    penalty = None if kl is None else config.kl_ctl * kl_factor * kl
    if advantage_fn is None and config.advantage_fn:
        advantage_fn = load_function(config.advantage_fn, "actor.advantage_fn")
    if advantage_fn is not None:
        estimated = _custom_advantages(advantage_fn, rewards, penalty, groups, batch, mask, config, auxiliary)
    else:
        estimated = _advantages(rewards, penalty, batch, mask, truncated, config, auxiliary)
    advantages = estimated.advantages
    if config.adv_norm is not None:
        advantages = normalize(advantages, mask, groups, config.adv_norm, reduce)
    return {**batch, "advantages": advantages, "returns": estimated.returns, "shaped_rewards": rewards}


def _truncated(batch: Mapping[str, Tensor], config: PPOActorConfig) -> Tensor:
    """Return which responses were cut off: [B]. Raises UsageFault if a setting needs the column and it is missing."""
    if "truncated" in batch:
        return batch["truncated"].bool()
    for name in ("mask_truncated_completions", "mask_no_eos_with_zero"):
        if getattr(config, name):
            raise UsageFault(
                f"actor.{name} needs to know which answers were cut off, and the trajectories have no `truncated`",
                hint="a workflow returns it for each row: whether its last answer ended by its length",
            )
    return torch.zeros(len(batch["loss_mask"]), dtype=torch.bool)


def _advantages(
    rewards: Tensor,
    penalty: Tensor | None,
    batch: Mapping[str, Tensor],
    mask: Tensor,
    truncated: Tensor,
    config: PPOActorConfig,
    auxiliary: AuxiliaryOutputs,
) -> Advantages:
    values = torch.zeros(mask.shape) if auxiliary.values is None else auxiliary.values
    after = auxiliary.after if config.value_bootstrap else None
    after = None if after is None else torch.where(truncated, after, 0.0)
    discount, gae_lambda = config.discount, _gae_lambda(config.gae_lambda, mask)
    if config.gae_timestep_unit == "turn":
        # The penalty applies to its own token only, not to the turn.
        if "turn_ids" not in batch:
            raise UsageFault("actor.gae_timestep_unit turn needs turns, and the trajectories have no `turn_ids`")
        spread, turns = token_rewards(rewards, mask), batch["turn_ids"].long()
        turned = gae_by_turn(spread, values, mask, turns, discount=discount, gae_lambda=gae_lambda, bootstrap=after)
        return turned if penalty is None else Advantages(turned.advantages - penalty, turned.returns)
    spread = token_rewards(rewards, mask, penalty)
    if auxiliary.values is None and config.discount == 1.0 and config.gae_lambda == 1.0:
        # Without a critic and a discount an advantage is the sum of the following rewards.
        following = spread.flip(1).cumsum(1).flip(1) * mask
        return Advantages(following, following)
    return gae_by_token(spread, values, mask, discount=discount, gae_lambda=gae_lambda, bootstrap=after)


def _custom_advantages(
    advantage_fn: AdvantageFn,
    rewards: Tensor,
    penalty: Tensor | None,
    groups: Tensor,
    batch: Mapping[str, Tensor],
    mask: Tensor,
    config: PPOActorConfig,
    auxiliary: AuxiliaryOutputs,
) -> Advantages:
    values = torch.zeros(mask.shape) if auxiliary.values is None else auxiliary.values
    spread = token_rewards(rewards, mask, penalty)
    result = advantage_fn(AdvantageInputs(rewards, spread, groups, values, mask, batch, config))
    result = require_token_tensor("advantage_fn", result, "an advantage", mask)
    advantages = torch.where(mask, result.float(), 0.0)
    return Advantages(advantages, (advantages + values) * mask)


def _gae_lambda(setting: float | str, mask: Tensor) -> float | Tensor:
    """Return a number, or the result [B] of the named function for the lengths [B] of responses. Raises UsageFault."""
    if not isinstance(setting, str):
        return setting
    found = load_function(setting, "actor.gae_lambda")(mask.sum(1))
    lambdas = torch.as_tensor(found, dtype=torch.float32, device=mask.device)
    if lambdas.shape not in ((), mask.shape[:1]) or not bool(((lambdas >= 0) & (lambdas <= 1)).all()):
        raise UsageFault(
            f"gae_lambda {setting} gave {found!r} for {len(mask)} answers: it must be a number between 0 and 1 for each"
        )
    return lambdas
