"""Contracts of losses and advantages in user code: functions of tensors, named in the configuration (``actor.loss_fn``,
``actor.advantage_fn``) or given to ``PPOTrainer``.

Every tensor [B, T] is token aligned: column t speaks of token t. Neither function sees more than one micro-batch or
one rank's batch: the trainer normalizes over all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor

    from areal.api.cli_args import PPOActorConfig


@dataclass(frozen=True)
class LossInputs:
    """A micro-batch. Log probabilities [B, T] of the policy that is trained (``logprobs``, the only one with
    a gradient), of the one whose ratio is clipped (``proximal``), and of the one that sampled (``behaviour``);
    ``advantages`` [B, T]; ``loss_mask`` bool [B, T]; ``batch``: every column of the rows."""

    logprobs: Tensor
    proximal: Tensor
    behaviour: Tensor
    advantages: Tensor
    loss_mask: Tensor
    batch: Mapping[str, Tensor]
    config: PPOActorConfig


LossFn: TypeAlias = "Callable[[LossInputs], Tensor]"
"""The loss of each token, [B, T]. It is weighted by ``use_decoupled_loss`` and ``rejection_sampling``, and its mean is
taken by ``loss_agg_mode``, as that of the built-in objectives is."""


@dataclass(frozen=True)
class AdvantageInputs:
    """The rows of a rank. ``rewards`` [B]: shaped and, by ``reward_norm``, normalized. ``token_rewards`` [B, T]: on
    the last token of each row, less the KL penalty. ``groups`` [B]: one number for the rows of a prompt. ``values``
    [B, T]: the critic's, 0 without one. ``loss_mask`` bool [B, T]."""

    rewards: Tensor
    token_rewards: Tensor
    groups: Tensor
    values: Tensor
    loss_mask: Tensor
    batch: Mapping[str, Tensor]
    config: PPOActorConfig


AdvantageFn: TypeAlias = "Callable[[AdvantageInputs], Tensor]"
"""The advantage of each token, [B, T]; normalised afterwards where there is an ``adv_norm``."""
