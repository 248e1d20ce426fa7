"""Contracts of user-defined losses and advantages: functions of tensors, named in the configuration (``actor.loss_fn``,
``actor.advantage_fn``) or passed to ``PPOTrainer``.

Every tensor [B, T] is aligned with the tokens: column t belongs to token t. A loss function sees one micro-batch, an
advantage function one rank's batch; the trainer normalizes over all of them.
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
    """A micro-batch. Log-probabilities [B, T] of the trained policy (``logprobs``, the only tensor with a gradient), of
    the proximal policy, against which the ratio is clipped (``proximal``), and of the policy that sampled the tokens
    (``behaviour``); ``advantages`` [B, T]; ``loss_mask`` bool [B, T]; ``batch``: all columns of the rows."""

    logprobs: Tensor
    proximal: Tensor
    behaviour: Tensor
    advantages: Tensor
    loss_mask: Tensor
    batch: Mapping[str, Tensor]
    config: PPOActorConfig


LossFn: TypeAlias = "Callable[[LossInputs], Tensor]"
"""Returns the loss of each token, [B, T]. Like a built-in objective, it is weighted by ``use_decoupled_loss`` and
``rejection_sampling``, and aggregated by ``loss_agg_mode``."""


@dataclass(frozen=True)
class AdvantageInputs:
    """The rows of a rank. ``rewards`` [B]: shaped, and normalized by ``reward_norm``. ``token_rewards`` [B, T]: the
    reward on the last token of each row, minus the KL penalty. ``groups`` [B]: a number that the rows of a prompt
    share. ``values`` [B, T]: the critic's, 0 without one. ``loss_mask`` bool [B, T]."""

    rewards: Tensor
    token_rewards: Tensor
    groups: Tensor
    values: Tensor
    loss_mask: Tensor
    batch: Mapping[str, Tensor]
    config: PPOActorConfig


AdvantageFn: TypeAlias = "Callable[[AdvantageInputs], Tensor]"
"""Returns the advantage of each token, [B, T]. It is normalized afterwards if ``adv_norm`` is set."""
