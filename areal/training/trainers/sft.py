"""Supervised fine-tuning: the mean negative log likelihood of the answers' tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from areal.training.algorithms.logprobs import token_logprobs
from areal.training.algorithms.losses import sft_loss
from areal.training.algorithms.sequences import masked_mean
from areal.training.data.batches import Batch
from areal.training.data.rows import token_batch
from areal.training.metrics import Metrics
from areal.training.trainers.offline import OfflineTrainer


class SFTTrainer(OfflineTrainer):
    """Rows have ``input_ids`` and ``loss_mask``."""

    def collate(self, rows: Sequence[Any]) -> Batch:
        return token_batch(rows)

    def weight(self, micro: Batch) -> Tensor:
        return micro["loss_mask"].sum()

    def loss(self, outputs: Tensor, micro: Batch) -> Tensor:
        logprobs = token_logprobs(outputs, micro["input_ids"])
        return masked_mean(sft_loss(logprobs, micro["loss_mask"]), micro["loss_mask"])

    def named(self, loss: float) -> Metrics:
        return {"loss": loss, "perplexity": float(torch.exp(torch.tensor(loss)))}
