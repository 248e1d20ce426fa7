"""Direct preference optimisation (arXiv 2305.18290) against a frozen reference."""

from __future__ import annotations

import copy
from typing import cast

from torch import Tensor

from areal.api.cli_args import DPOConfig, TrainEngineConfig
from areal.training.algorithms.logprobs import token_logprobs
from areal.training.algorithms.losses import dpo_loss
from areal.training.data.batches import Batch
from areal.training.trainers.preferences import PreferenceTrainer, counting_pairs


class DPOTrainer(PreferenceTrainer):
    """Without a ``ref`` the reference is the actor as it was before its first update, also after a resume."""

    config: DPOConfig

    def _open(self) -> None:
        super()._open()
        reference = copy.deepcopy(self.config.ref or cast(TrainEngineConfig, self.config.actor))
        reference.optimizer, reference.path = None, reference.path or self.config.actor.path
        self.reference = self.add_engine("ref", reference)

    def engine_config(self) -> TrainEngineConfig:
        return self.config.actor

    def prepared(self, batch: Batch) -> Batch:
        return {**batch, "reference": self.reference.forward(batch, _logprobs)}

    def loss(self, outputs: Tensor, micro: Batch) -> Tensor:
        result = dpo_loss(
            _logprobs(outputs, micro),
            micro["reference"],
            micro["loss_mask"],
            beta=self.config.actor.beta,
            label_smoothing=self.config.actor.label_smoothing,
            kind=self.config.actor.loss_type,
        )
        return self.mean_of(result, counting_pairs(micro))


def _logprobs(logits: Tensor, micro: Batch) -> Tensor:
    return token_logprobs(logits, micro["input_ids"])
