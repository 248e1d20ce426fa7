"""From sampled rows to what a policy update needs: advantages and returns, by the settings of a ``PPOActorConfig``.

In order: shape each reward; normalise rewards over their group or the batch; leave truncated answers without a reward,
or out of the loss, where that is asked for; spread rewards over tokens, less a penalty on the divergence from the
reference; estimate advantages; normalise those.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from areal.api.algorithm_api import AdvantageFn, AdvantageInputs
from areal.api.registry import load_attr
from areal.errors import UsageFault
from areal.training.algorithms.advantages import Advantages, by_token, by_turn
from areal.training.algorithms.correction import second_moment_bound, squared_log_ratios
from areal.training.algorithms.normalise import Normalisation, Reduce, alone, normalised
from areal.training.algorithms.rewards import RewardShaping, kl_estimate, shaped, token_rewards

if TYPE_CHECKING:
    from areal.api.cli_args import NormConfig, PPOActorConfig


@dataclass(frozen=True)
class Beside:
    """What other models say of the same rows, each [B, T]; ``values`` of states in which a token was chosen, ``after``
    [B] that of the state after the last token."""

    reference: Tensor | None = None
    values: Tensor | None = None
    after: Tensor | None = None


def normalisation(config: NormConfig | None) -> Normalisation | None:
    if config is None:
        return None
    return Normalisation(
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
    beside: Beside,
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
    if beside.reference is not None:
        kl = torch.where(mask, kl_estimate(batch["logprobs"], beside.reference, config.kl_estimator), 0.0)
        batch = {**batch, "ref_logprobs": beside.reference, "kl": kl}
    penalty = None if kl is None else config.kl_ctl * kl_factor * kl
    if advantage_fn is None and config.advantage_fn:
        advantage_fn = load_attr(config.advantage_fn, "actor.advantage_fn")
    if advantage_fn is not None:
        estimated = _own(advantage_fn, rewards, penalty, groups, batch, mask, config, beside)
    else:
        estimated = _advantages(rewards, penalty, batch, mask, truncated, config, beside)
    advantages = estimated.advantages
    assert not isinstance(config.adv_norm, bool), "the configuration has made a norm of its older flag"
    if (how := normalisation(config.adv_norm)) is not None:
        advantages = normalised(advantages, mask, groups, how, reduce)
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
    if (norm := normalisation(config.reward_norm)) is not None:
        result = normalised(result, torch.ones_like(result), groups, norm, reduce)
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
    beside: Beside,
) -> Advantages:
    values = torch.zeros(mask.shape) if beside.values is None else beside.values
    after = None if beside.after is None else torch.where(truncated, beside.after, torch.zeros_like(beside.after))
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
    if beside.values is None and config.discount == 1.0 and config.gae_lambda == 1.0:
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
    beside: Beside,
) -> Advantages:
    values = torch.zeros(mask.shape) if beside.values is None else beside.values
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


def informative(rewards: Tensor, groups: Tensor) -> Tensor:
    """[B]: whether a row's group has rewards that differ. One without teaches nothing (dynamic sampling)."""
    places, members = torch.unique(groups, return_inverse=True)
    most = torch.full((len(places),), -torch.inf).scatter_reduce(0, members, rewards.float(), "amax")
    least = torch.full((len(places),), torch.inf).scatter_reduce(0, members, rewards.float(), "amin")
    return (most > least)[members]
