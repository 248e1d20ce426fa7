"""What training on a fixed data set has in common: batches by position, a loss over them, its mean over a held-out
set."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor

from areal.api.cli_args import TrainEngineConfig
from areal.errors import UsageFault
from areal.training.data.batches import Batch, lengths, select
from areal.training.data.packing import spread
from areal.training.metrics import Metrics
from areal.training.trainers.base import Trainer


class OfflineTrainer(Trainer):
    """``rows_a_sample`` neighbours in a batch belong together and stay on one rank."""

    rows_a_sample: ClassVar[int] = 1

    def _open(self) -> None:
        super()._open()
        self.actor = self.add_engine("actor", self.engine_config())

    def engine_config(self) -> TrainEngineConfig:
        config: TrainEngineConfig = self.config.model  # type: ignore[attr-defined]
        return config

    @abc.abstractmethod
    def collate(self, rows: Sequence[Any]) -> Batch:
        """Raises UsageFault naming what a row lacks."""

    @abc.abstractmethod
    def loss(self, outputs: Tensor, micro: Batch) -> Tensor:
        """The mean over a micro-batch."""

    @abc.abstractmethod
    def weight(self, micro: Batch) -> Tensor:
        """How much that mean counts."""

    @abc.abstractmethod
    def named(self, loss: float) -> Metrics:
        """The metrics of the batches since this was last called, whose mean loss is ``loss``."""

    def prepared(self, batch: Batch) -> Batch:
        """With what the loss needs beside the rows, computed before the update."""
        return batch

    def train(self) -> None:
        self.run()

    def train_step(self) -> Metrics:
        assert self.train_dataset is not None
        with self.timings.of("data"):
            rows = [self.train_dataset[row] for row in self.order.batch(self.step)]
            batch = self.mine(self.collate(rows))
        with self.timings.of("train"):
            update = self.actor.train_batch(self.prepared(batch), self.loss, self.weight)
        counted = self.ranks.summed(batch["attention_mask"].sum().to(self.ranks.device))
        return {
            **self.named(update.loss),
            "grad_norm": update.grad_norm,
            "lr": update.learning_rate,
            "tokens": float(counted),
        }

    def mine(self, batch: Batch) -> Batch:
        """This rank's rows. A short last batch is filled up with rows that count for nothing."""
        self._check_tokens(batch)
        size = self.ranks.size * self.rows_a_sample
        if self.ranks.size == 1:
            return batch
        count = len(batch["attention_mask"])
        missing = -count % size
        if missing:
            batch = select(batch, [*range(count), *(number % count for number in range(missing))])
            batch["loss_mask"][count:] = False
        return select(batch, spread(lengths(batch), self.ranks.size, self.rows_a_sample)[self.ranks.rank])

    def _check_tokens(self, batch: Batch) -> None:
        """Raises UsageFault for a token that the model has no place for."""
        size, highest = int(self.actor.model.config.vocab_size), int(batch["input_ids"].max())  # type: ignore[arg-type, union-attr]
        if highest >= size:
            raise UsageFault(
                f"the data has token {highest}, and the model {self.actor.config.path} knows {size}: they are of two "
                "tokenizers",
                hint=f"tokenizer_path is {self.config.tokenizer_path}: leave it out to take the model's own",
            )

    def evaluate(self) -> Metrics:
        if not self.valid_dataset:
            return {}
        size = (self.config.valid_dataset or self.config.train_dataset).batch_size
        weighted, total = 0.0, 0.0
        for first in range(0, len(self.valid_dataset), size):
            rows = [self.valid_dataset[n] for n in range(first, min(first + size, len(self.valid_dataset)))]
            batch = self.collate(rows)
            weight = float(self.weight(batch))
            mean = self.actor.eval_batch(self.prepared(self.mine(batch)), self.loss, self.weight)
            weighted, total = weighted + mean * weight, total + weight
        return self.named(weighted / max(total, 1e-12))
