"""Which rows an update can learn from.

A policy's loss is its advantages times something: a row whose advantages are all 0 (its group's answers were all right,
or all wrong) has no gradient, and is not worth a forward and a backward pass. It still counts in the mean.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from areal.training.data.batches import Batch

if TYPE_CHECKING:
    from areal.api.cli_args import PPOActorConfig


def teaching_rows(batch: Batch, config: PPOActorConfig, *, own_loss: bool = False) -> list[int]:
    """Never none: every rank takes part in every update. All of them where a loss has a part without
    advantages."""
    every = list(range(len(batch["advantages"])))
    beyond = config.entropy_coeff or config.loss_fn or (config.kl_loss_coef and "ref_logprobs" in batch)
    if beyond or own_loss:
        return every
    taught: list[int] = (batch["advantages"] * batch["loss_mask"]).any(1).nonzero()[:, 0].tolist()
    return taught or every[:1]
