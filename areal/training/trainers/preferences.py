"""What reward models and DPO share: pairs of answers, and how often the better one is told apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from areal.training.algorithms.losses import PairLoss
from areal.training.algorithms.sequences import masked_mean
from areal.training.data.batches import Batch
from areal.training.data.rows import paired_batch
from areal.training.metrics import Metrics
from areal.training.trainers.offline import OfflineTrainer


class PreferenceTrainer(OfflineTrainer):
    """Rows have ``chosen_ids`` and ``rejected_ids``: prompt and answer."""

    rows_a_sample = 2

    def _open(self) -> None:
        super()._open()
        self.actor.config.mb_spec.granularity = 2
        self._told_apart = torch.zeros(2, dtype=torch.float64)  # (right, counted) since last asked

    def collate(self, rows: Sequence[Any]) -> Batch:
        return paired_batch(rows)

    def weight(self, micro: Batch) -> Tensor:
        return counting_pairs(micro).sum()

    def mean_of(self, result: PairLoss, counting: Tensor) -> Tensor:
        right = ((result.margins > 0) & counting).sum()
        self._told_apart += torch.stack([right, counting.sum()]).double().cpu()
        return masked_mean(result.per_pair, counting)

    def named(self, loss: float) -> Metrics:
        right, counted = self.ranks.summed(self._told_apart.to(self.ranks.device)).tolist()
        self._told_apart.zero_()
        return {"loss": loss, "accuracy": right / max(counted, 1.0)}


def counting_pairs(micro: Batch) -> Tensor:
    """[N] of [2N, T] rows: False for a pair that only fills a batch up."""
    return micro["loss_mask"].any(1)[0::2]
