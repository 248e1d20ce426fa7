"""Trainers on a fixed data set: supervised fine-tuning, reward models, DPO."""

from __future__ import annotations

import abc
import math
from collections.abc import Mapping, Sequence
from itertools import count, islice
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from areal.api.cli_args import DPOConfig, TrainEngineConfig
from areal.api.engine_api import TokenOutputs
from areal.errors import UsageFault
from areal.rollout.evaluation import Estimate, ratio_estimate, share_estimate
from areal.training.algorithms.losses import PairLoss, dpo_loss, reward_model_loss, sequence_sums, sft_loss
from areal.training.batches import Batch, lengths, paired_batch, select, split_rows, to_device, token_batch
from areal.training.metrics import Metrics
from areal.training.trainers.base import Trainer


class OfflineTrainer(Trainer):
    """A trainer on a fixed data set. ``rows_per_sample`` neighboring rows of a batch stay on one rank."""

    rows_per_sample: ClassVar[int] = 1

    def _open(self) -> None:
        super()._open()
        if self._timers["save"].is_disabled and not self.config.recover.enabled:
            self._note("warning: no model will be kept: saver.freq_epochs=1 saves one after each epoch")
        self.actor = self.add_engine("actor", self.engine_config())

    def engine_config(self) -> TrainEngineConfig:
        return self.config.model  # type: ignore[attr-defined]

    @abc.abstractmethod
    def collate(self, rows: Sequence[Any]) -> Batch:
        """Return a batch of rows. Raises UsageFault with the column that a row lacks."""

    @abc.abstractmethod
    def losses(self, outputs: TokenOutputs, micro: Batch) -> Tensor:
        """Return the loss of each of the N units of a micro-batch (rows, or pairs): [N], a sum over its tokens."""

    @abc.abstractmethod
    def weights(self, micro: Batch) -> Tensor:
        """Return how many tokens or pairs each unit counts as: [N]; 0 if it only fills up a batch."""

    def loss(self, outputs: TokenOutputs, micro: Batch) -> Tensor:
        """Return the mean over a micro-batch."""
        return self.losses(outputs, micro).sum() / self.weight(micro).clamp(min=1)

    def weight(self, micro: Batch) -> Tensor:
        """Return the weight of that mean."""
        return self.weights(micro).sum()

    @abc.abstractmethod
    def loss_metrics(self, loss: float) -> Metrics:
        """Return the metrics of the batches since the last call; ``loss`` is their mean loss."""

    def with_reference(self, batch: Batch) -> Batch:
        """Add the reference model's outputs before the update, if the loss needs them."""
        return batch

    def train(self) -> None:
        self.run()

    def train_step(self) -> Metrics:
        assert self.train_dataset is not None
        with self.timings.of("data"):
            rows = [self.train_dataset[row] for row in self.order.batch(self.step)]
            batch = self.rank_rows(self.collate(rows))
        with self.timings.of("train"):
            update = self.actor.train_batch(self.with_reference(batch), self.loss, self.weight)
        tokens = self.ranks.all_sum(batch["attention_mask"].sum().to(self.ranks.device))
        return {
            **self.loss_metrics(update.loss),
            "grad_norm": update.grad_norm,
            "lr": update.learning_rate,
            "tokens": float(tokens),
        }

    def rank_rows(self, batch: Batch) -> Batch:
        """Return the rows of this data-parallel rank. A short last batch is filled up with rows of weight 0."""
        known, highest = self.actor.vocab_size, int(batch["input_ids"].max())
        if highest >= known:
            raise UsageFault(
                f"the data has token {highest}, but the model {self.actor.config.path} has {known}: they use different "
                "tokenizers",
                hint=f"tokenizer_path is {self.config.tokenizer_path}: leave it out to take the model's own",
            )
        size = self.ranks.data_size * self.rows_per_sample
        if self.ranks.data_size == 1:
            return batch
        count = len(batch["attention_mask"])
        missing = -count % size
        if missing:
            batch = select(batch, [*range(count), *(number % count for number in range(missing))])
            batch["loss_mask"][count:] = False
        return select(
            batch, split_rows(lengths(batch), self.ranks.data_size, self.rows_per_sample)[self.ranks.data_rank]
        )

    def evaluate(self) -> Metrics:
        """Return the metrics of ``valid_dataset``, with intervals clustered by row or pair."""
        if not self.valid_dataset:
            return {}
        size = (self.config.valid_dataset or self.config.train_dataset).batch_size
        losses, weights = list[float](), list[float]()
        for first in range(0, len(self.valid_dataset), size):
            rows = [self.valid_dataset[n] for n in range(first, min(first + size, len(self.valid_dataset)))]
            batch = self.with_reference(self.rank_rows(self.collate(rows)))
            with torch.no_grad():
                outputs = self._outputs(batch)
                batch = to_device(batch, outputs.logprobs.device)
                found = torch.stack([self.losses(outputs, batch).double(), self.weights(batch).double()]).tolist()
            for losses_, weights_ in self.ranks.data_gather(found):
                losses += losses_
                weights += weights_
        loss = ratio_estimate(losses, weights, self.config.evaluator.confidence)
        metrics = self.loss_metrics(loss.value)
        intervals = self.intervals(loss, metrics)
        self._note(f"evaluation after step {self.step}: {self._summary(metrics, intervals)}")
        known = {name: each for name, each in intervals.items() if not math.isnan(each.low)}
        bounds = [(f"{name}/{end}", getattr(each, end)) for name, each in known.items() for end in ("low", "high")]
        return metrics | dict(bounds)

    def intervals(self, loss: Estimate, metrics: Metrics) -> dict[str, Estimate]:
        """Return the estimates of an evaluation by the name of their metric."""
        return {"loss": loss}

    def _outputs(self, batch: Batch) -> TokenOutputs:
        """Return the model's outputs for this rank's rows."""
        if self.actor.config.is_critic:
            return TokenOutputs.of_critic(self.actor.forward(batch, lambda outputs, micro: outputs.values))
        logprobs = self.actor.forward(batch, lambda outputs, micro: outputs.logprobs)
        return TokenOutputs.of_policy(logprobs, logprobs.new_zeros(()).expand_as(logprobs))

    def _summary(self, metrics: Metrics, intervals: Mapping[str, Estimate]) -> str:
        parts = [
            f"{name} {intervals[name].text() if name in intervals else f'{metrics[name]:.4f}'}" for name in metrics
        ]
        return f"{', '.join(parts)}; intervals of {self.config.evaluator.confidence:.4g}"


class PreferenceTrainer(OfflineTrainer):
    """A trainer on preferences. Rows have ``chosen_ids`` and ``rejected_ids``, each with the prompt."""

    rows_per_sample = 2

    def _open(self) -> None:
        super()._open()
        self.actor.config.mb_spec.granularity = 2
        self._right: dict[int, bool] = {}  # by pair: whether it is ranked right, since the last ``loss_metrics``
        self._pairs = count()

    def collate(self, rows: Sequence[Any]) -> Batch:
        batch = paired_batch(rows)
        return {**batch, "pair": torch.tensor([pair for pair in islice(self._pairs, len(rows)) for _ in range(2)])}

    @abc.abstractmethod
    def pairs(self, outputs: TokenOutputs, micro: Batch) -> PairLoss:
        """Return losses and margins of the N pairs."""

    def losses(self, outputs: TokenOutputs, micro: Batch) -> Tensor:
        result, counting = self.pairs(outputs, micro), self.weights(micro)
        found = torch.stack([micro["pair"][0::2], result.margins > 0])[:, counting].tolist()
        self._right |= zip(found[0], map(bool, found[1]), strict=True)  # a rank may repeat a pair, with weight 0
        return torch.where(counting, result.per_pair, 0.0)

    def weights(self, micro: Batch) -> Tensor:
        return micro["loss_mask"].any(1)[0::2]

    def intervals(self, loss: Estimate, metrics: Metrics) -> dict[str, Estimate]:
        right = round(metrics["accuracy"] * loss.prompts)
        shares = [1.0] * right + [0.0] * (loss.prompts - right)
        accuracy = share_estimate(shares, loss.prompts, self.config.evaluator.confidence)
        return {"loss": loss, "accuracy": accuracy}

    def loss_metrics(self, loss: float) -> Metrics:
        counts = torch.tensor([sum(self._right.values()), len(self._right)], device=self.ranks.device)
        self._right.clear()
        right, counted = self.ranks.all_sum(counts).tolist()
        return {"loss": loss, "accuracy": right / max(counted, 1)}


class SFTTrainer(OfflineTrainer):
    """Supervised fine-tuning. Rows have ``input_ids`` and ``loss_mask``."""

    def collate(self, rows: Sequence[Any]) -> Batch:
        return token_batch(rows)

    def losses(self, outputs: TokenOutputs, micro: Batch) -> Tensor:
        return sequence_sums(sft_loss(outputs.logprobs, micro["loss_mask"]), micro["loss_mask"])

    def weights(self, micro: Batch) -> Tensor:
        return micro["loss_mask"].sum(1)

    def intervals(self, loss: Estimate, metrics: Metrics) -> dict[str, Estimate]:
        value, low, high = (float(torch.exp(torch.tensor(each))) for each in (loss.value, loss.low, loss.high))
        return {"loss": loss, "perplexity": Estimate(value, low, high, loss.prompts)}

    def loss_metrics(self, loss: float) -> Metrics:
        return {"loss": loss, "perplexity": float(torch.exp(torch.tensor(loss)))}


class RWTrainer(PreferenceTrainer):
    """Training of a reward model. The score is the value head's output at the last token of an answer."""

    def engine_config(self) -> TrainEngineConfig:
        config = super().engine_config()
        config.is_critic = True
        return config

    def pairs(self, outputs: TokenOutputs, micro: Batch) -> PairLoss:
        last = micro["attention_mask"].sum(1) - 1
        return reward_model_loss(outputs.values.gather(1, last[:, None])[:, 0])


class DPOTrainer(PreferenceTrainer):
    """DPO. Without a ``ref``, the reference is the actor's initial model, also after a resume."""

    config: DPOConfig

    def _open(self) -> None:
        super()._open()
        actor = cast(TrainEngineConfig, self.config.actor)
        self.reference = self.add_reference(self.config.ref or actor, actor.path)

    def engine_config(self) -> TrainEngineConfig:
        return self.config.actor

    def with_reference(self, batch: Batch) -> Batch:
        return {**batch, "reference": self.reference.forward(batch, lambda outputs, micro: outputs.logprobs)}

    def pairs(self, outputs: TokenOutputs, micro: Batch) -> PairLoss:
        return dpo_loss(
            outputs.logprobs,
            micro["reference"],
            micro["loss_mask"],
            beta=self.config.actor.beta,
            label_smoothing=self.config.actor.label_smoothing,
            kind=self.config.actor.loss_type,
        )
