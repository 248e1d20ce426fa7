"""Reward models: one number for an answer, higher for the chosen than for the rejected (Bradley and Terry)."""

from __future__ import annotations

from torch import Tensor

from areal.api.cli_args import TrainEngineConfig
from areal.training.algorithms.losses import reward_model_loss
from areal.training.data.batches import Batch
from areal.training.trainers.preferences import PreferenceTrainer, counting_pairs


class RWTrainer(PreferenceTrainer):
    """The score is the value head's at an answer's last token."""

    def engine_config(self) -> TrainEngineConfig:
        config = super().engine_config()
        config.is_critic = True
        return config

    def loss(self, outputs: Tensor, micro: Batch) -> Tensor:
        last = micro["attention_mask"].sum(1) - 1
        scores = outputs[..., 0].float().gather(1, last[:, None])[:, 0]
        return self.mean_of(reward_model_loss(scores), counting_pairs(micro))
