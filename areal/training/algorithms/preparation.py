"""From sampled rows to what a policy update needs: advantages and returns, by the settings of a ``PPOActorConfig``.

In order: shape each reward; normalize rewards over their group or the batch; leave truncated answers without a reward,
or out of the loss, where that is asked for; spread rewards over tokens, less a penalty on the divergence from the
reference; estimate advantages; normalize those.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from areal.api.algorithm_api import AdvantageFn, AdvantageInputs
from areal.api.registry import load_attr
from areal.errors import UsageFault
from areal.training.algorithms.advantages import (
    Advantages,
    Normalization,
    Reduce,
    RewardShaping,
    alone,
    by_token,
    by_turn,
    kl_estimate,
    normalized,
    shaped,
    token_rewards,
)
from areal.training.algorithms.losses import masked_mean

if TYPE_CHECKING:
    from areal.api.cli_args import NormConfig, PPOActorConfig


# -- samples of an older policy: w = pi_proximal / pi_behavior multiplies the clipped objective of decoupled PPO (arXiv
# 2505.24298). Where it explodes, the token is left out or the weight clamped; the denominator of the loss stays, or the
# kept tokens would count for more.

Metric = Literal["ratio", "kl_k1", "kl_k2", "kl_k3", "binary_kl"]
_LOG_BOUND = 20.0


@dataclass(frozen=True)
class Rejection:
    """Tokens, or whole sequences, whose ``metric`` lies outside [lower, upper] are masked, or their weight is clamped.

    ``level`` sequence: each sequence has one metric, its tokens' by ``aggregate``, and one weight, which all of its
    tokens have. The weight aggregates log ratios: ``mean`` is the geometric mean of the tokens' ratios, ``sum`` their
    product (the probability ratio of the whole sequence), ``max`` the largest.
    """

    level: Literal["token", "sequence"] = "token"
    action: Literal["mask", "clamp"] = "mask"
    metric: Metric = "ratio"
    aggregate: Literal["mean", "sum", "max"] = "mean"
    upper: float | None = 5.0
    lower: float | None = None


@dataclass(frozen=True)
class Correction:
    """``weights`` [B, T], without gradient; ``kept`` [B, T]: what is still trained on."""

    weights: Tensor
    kept: Tensor


def correction(proximal: Tensor, behavior: Tensor, loss_mask: Tensor, rejection: Rejection | None) -> Correction:
    """``proximal`` and ``behavior`` log probabilities [B, T]. A token whose behavior log probability is not finite
    cannot be corrected for and is left out."""
    known = torch.isfinite(behavior) & torch.isfinite(proximal)
    kept = loss_mask.bool() & known
    log_ratio = torch.where(kept, proximal - behavior, torch.zeros_like(proximal)).detach()
    if rejection is None:
        return Correction(_exp(log_ratio) * kept, kept)
    measured = _metric(log_ratio, behavior, rejection.metric)
    log_weight = log_ratio
    if rejection.level == "sequence":
        log_weight = _of_sequence(log_ratio, kept, rejection.aggregate)
        ratio = rejection.metric == "ratio"
        measured = _exp(log_weight) if ratio else _of_sequence(measured, kept, rejection.aggregate)
    weights = _exp(log_weight)
    if rejection.action == "clamp":
        return Correction(weights.clamp(min=rejection.lower, max=rejection.upper) * kept, kept)
    if rejection.upper is not None:
        kept = kept & (measured <= rejection.upper)
    if rejection.lower is not None:
        kept = kept & (measured >= rejection.lower)
    return Correction(weights * kept, kept)


def _exp(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-_LOG_BOUND, _LOG_BOUND).exp()


def _metric(log_ratio: Tensor, behavior: Tensor, metric: Metric) -> Tensor:
    if metric == "ratio":
        return _exp(log_ratio)
    if metric == "kl_k1":
        return log_ratio
    if metric == "kl_k2":
        return log_ratio.square() / 2
    if metric == "kl_k3":
        bounded = log_ratio.clamp(-_LOG_BOUND, _LOG_BOUND)
        return torch.expm1(bounded) - bounded
    return _binary_kl(behavior + log_ratio, behavior)


def _binary_kl(proximal: Tensor, behavior: Tensor) -> Tensor:
    """The larger of both KL divergences between the coins "this token, or another"."""
    p, b = (logp.exp().clamp(1e-7, 1 - 1e-7) for logp in (proximal, behavior))
    b = torch.where(torch.isfinite(b), b, p)
    forward = p * (p / b).log() + (1 - p) * ((1 - p) / (1 - b)).log()
    backward = b * (b / p).log() + (1 - b) * ((1 - b) / (1 - p)).log()
    return torch.maximum(forward, backward)


def _of_sequence(values: Tensor, kept: Tensor, aggregate: Literal["mean", "sum", "max"]) -> Tensor:
    """[B, T] -> [B, T]: each row has its kept tokens' aggregate everywhere."""
    if aggregate == "mean":
        whole = masked_mean(values, kept, dim=1)
    elif aggregate == "sum":
        whole = (values * kept).sum(1, keepdim=True)
    else:
        whole = values.masked_fill(~kept, -torch.inf).amax(1, keepdim=True)
    return whole.expand_as(values)


def squared_log_ratios(proximal: Tensor, behavior: Tensor, loss_mask: Tensor) -> Tensor:
    """(log pi_behaviour - log pi_proximal)^2 of each token of the mask: [N]."""
    return (behavior - proximal).detach().double().square()[loss_mask.bool()]


def second_moment_bound(squares: Tensor, threshold: float) -> float:
    """M2PO (arXiv 2510.01161) leaves out the largest of ``squares`` [N] until the mean of the others is below
    ``threshold``: the largest that is kept, -1 where none is. Equal squares are kept or left out together. ``squares``
    are those of a whole batch, of all micro-batches and ranks, so that how it is cut changes nothing."""
    ordered = squares[torch.isfinite(squares)].sort().values
    if not len(ordered):
        return -1.0
    means = ordered.cumsum(0) / torch.arange(1, len(ordered) + 1, device=ordered.device)
    last_of_equals = torch.cat([ordered[1:] > ordered[:-1], torch.ones_like(ordered[:1], dtype=torch.bool)])
    below = ordered[(means < threshold) & last_of_equals]  # the running mean of sorted values never falls
    return float(below[-1]) if len(below) else -1.0


def interpolated_proximal(behavior: Tensor, current: Tensor, versions: Tensor, version: int) -> Tensor:
    """A-3PO (arXiv 2512.06547): the proximal log probabilities without a forward pass, between those of the behavior
    and the current policy. ``versions`` [B, T] sampled each token, ``version`` is being optimized.

    alpha = (v_proximal - v_behaviour) / (v - v_behaviour) with v_proximal = v - 1, within [0, 1].
    """
    age = (version - versions).clamp(min=0).to(behavior.dtype)
    alpha = ((age - 1) / age.clamp(min=1)).clamp(0.0, 1.0)
    return (1 - alpha) * behavior + alpha * current.detach()


@dataclass(frozen=True)
class AuxiliaryOutputs:
    """Outputs of other models for the same rows: ``reference`` log-probabilities [B, T], ``values`` [B, T] of the state
    in which each token was chosen, ``after`` [B] of the state after the last token."""

    reference: Tensor | None = None
    values: Tensor | None = None
    after: Tensor | None = None


def normalization(config: NormConfig | None) -> Normalization | None:
    if config is None:
        return None
    return Normalization(
        mean=config.mean_level,
        std=config.std_level,
        leave_one_out=config.mean_leave1out,
        unbiased=config.std_unbiased,
        eps=config.eps,
    )


def prepared(
    batch: Mapping[str, Tensor],
    groups: Tensor,
    config: PPOActorConfig,
    auxiliary: AuxiliaryOutputs,
    reduce: Reduce = alone,
    *,
    kl_factor: float = 1.0,
    advantage_fn: AdvantageFn | None = None,
) -> dict[str, Tensor]:
    """``batch`` with ``advantages``, ``returns``, ``shaped_rewards`` and, where there is a reference, its
    ``ref_logprobs`` and ``kl``. ``groups`` [B]: rows of one prompt have one number. ``truncated`` [B] in the batch:
    answers that were cut off. ``kl_factor`` multiplies ``kl_ctl``; ``advantage_fn`` estimates instead of GAE."""
    mask = batch["loss_mask"].bool()
    truncated = _truncated(batch, config)
    rewards = _sequence_rewards(batch["rewards"].float(), mask, truncated, groups, config, reduce)
    if config.mask_truncated_completions:  # after the rewards: a group's baseline has them
        mask = mask & ~truncated[:, None]
        batch = {**batch, "loss_mask": batch["loss_mask"] * mask}
    kl = None
    if auxiliary.reference is not None:
        kl = torch.where(mask, kl_estimate(batch["logprobs"], auxiliary.reference, config.kl_estimator), 0.0)
        batch = {**batch, "ref_logprobs": auxiliary.reference, "kl": kl}
    penalty = None if kl is None else config.kl_ctl * kl_factor * kl
    if advantage_fn is None and config.advantage_fn:
        advantage_fn = load_attr(config.advantage_fn, "actor.advantage_fn")
    if advantage_fn is not None:
        estimated = _own(advantage_fn, rewards, penalty, groups, batch, mask, config, auxiliary)
    else:
        estimated = _advantages(rewards, penalty, batch, mask, truncated, config, auxiliary)
    advantages = estimated.advantages
    assert not isinstance(config.adv_norm, bool), "the configuration has made a norm of its older flag"
    if (how := normalization(config.adv_norm)) is not None:
        advantages = normalized(advantages, mask, groups, how, reduce)
    return {**batch, "advantages": advantages, "returns": estimated.returns, "shaped_rewards": rewards}


def _sequence_rewards(
    rewards: Tensor, mask: Tensor, truncated: Tensor, groups: Tensor, config: PPOActorConfig, reduce: Reduce
) -> Tensor:
    overlong = config.overlong_tokens or max(1, (config.max_new_tokens or 0) // 5)  # DAPO: 4,096 of 20,480
    how = RewardShaping(
        scale=config.reward_scaling,
        bias=config.reward_bias,
        clip=config.reward_clip,
        overlong_tokens=overlong if config.overlong_reward_penalty else None,
        overlong_penalty=1.0 if config.overlong_penalty_factor is None else config.overlong_penalty_factor,
        max_new_tokens=config.max_new_tokens,
    )
    result = shaped(rewards, mask.sum(1), how)
    if (norm := normalization(config.reward_norm)) is not None:
        result = normalized(result, torch.ones_like(result), groups, norm, reduce)
    if config.mask_no_eos_with_zero:  # after the norm, where 0 is neither reward nor punishment
        result = torch.where(truncated, torch.zeros_like(result), result)
    return result


def _truncated(batch: Mapping[str, Tensor], config: PPOActorConfig) -> Tensor:
    """[B]: answers that were cut off. Raises UsageFault where nobody says it and a setting needs it."""
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
    after = (
        None if auxiliary.after is None else torch.where(truncated, auxiliary.after, torch.zeros_like(auxiliary.after))
    )
    gae_lambda = _gae_lambda(config.gae_lambda, mask)
    if config.gae_timestep_unit == "turn":
        # The penalty stays with its own token: a turn's worth is what it led to.
        turned = by_turn(
            token_rewards(rewards, mask),
            values,
            mask,
            batch["turn_ids"].long(),
            discount=config.discount,
            gae_lambda=gae_lambda,
            bootstrap=after,
        )
        return turned if penalty is None else Advantages(turned.advantages - penalty, turned.returns)
    if auxiliary.values is None and config.discount == 1.0 and config.gae_lambda == 1.0:
        # Without a critic and a discount an advantage is the sum of what is still to come.
        spread = token_rewards(rewards, mask, penalty)
        coming = spread.flip(1).cumsum(1).flip(1) * mask
        return Advantages(coming, coming)
    return by_token(
        token_rewards(rewards, mask, penalty),
        values,
        mask,
        discount=config.discount,
        gae_lambda=gae_lambda,
        bootstrap=after,
    )


def _own(
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
    advantages = advantage_fn(AdvantageInputs(rewards, spread, groups, values, mask, batch, config))
    if not isinstance(advantages, Tensor) or advantages.shape != mask.shape:
        found = list(advantages.shape) if isinstance(advantages, Tensor) else type(advantages).__name__
        raise UsageFault(f"the advantage_fn gave {found}: it must be an advantage for each token, {list(mask.shape)}")
    advantages = torch.where(mask, advantages.float(), 0.0)
    return Advantages(advantages, (advantages + values) * mask)


def _gae_lambda(said: float | str, mask: Tensor) -> float | Tensor:
    """A number, or what the named function makes of the answers' lengths: [B] -> [B]. Raises UsageFault."""
    if not isinstance(said, str):
        return said
    found = load_attr(said, "gae_lambda")(mask.sum(1))
    lambdas = torch.as_tensor(found, dtype=torch.float32, device=mask.device)
    if lambdas.shape not in ((), mask.shape[:1]) or not bool(((lambdas >= 0) & (lambdas <= 1)).all()):
        raise UsageFault(
            f"gae_lambda {said} gave {found!r} for {len(mask)} answers: it must be a number between 0 and 1 for each"
        )
    return lambdas


def with_second_moment_mask(
    batch: Mapping[str, Tensor], threshold: float, gather: Callable[[Tensor], list[Tensor]] = lambda mine: [mine]
) -> dict[str, Tensor]:
    """``batch`` with ``second_moment_mask`` [B, T], the tokens that M2PO keeps. ``gather``: what every rank passes."""
    squares = squared_log_ratios(batch["proximal"], batch["logprobs"], batch["loss_mask"])
    bound = second_moment_bound(torch.cat(gather(squares)), threshold)
    kept = torch.zeros_like(batch["loss_mask"], dtype=torch.bool)
    kept[batch["loss_mask"].bool()] = squares <= bound
    return {**batch, "second_moment_mask": kept}


def has_reward_spread(rewards: Tensor, groups: Tensor) -> Tensor:
    """[B]: whether a row's group has rewards that differ. One without has no gradient (dynamic sampling)."""
    places, members = torch.unique(groups, return_inverse=True)
    most = torch.full((len(places),), -torch.inf).scatter_reduce(0, members, rewards.float(), "amax")
    least = torch.full((len(places),), torch.inf).scatter_reduce(0, members, rewards.float(), "amin")
    return (most > least)[members]
