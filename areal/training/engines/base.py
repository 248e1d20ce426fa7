"""The part of a train engine that does not depend on how its model is sharded."""

from __future__ import annotations

import contextlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from areal.api.engine_api import LossFn, NonFinite, TokenOutputs, WeightFn
from areal.training.batches import Batch, lengths, put_rows, synchronized_micro_batches
from areal.training.engines import learning_rate, micro_batch_limits, without_optimizer
from areal.training.engines.huggingface import dtype_by_name, write_model

if TYPE_CHECKING:
    from areal.api.cli_args import OptimizerConfig, TrainEngineConfig
    from areal.training.ranks import Ranks

Parts = list[tuple[list[int], bool]]
"""The rows of each micro-batch, and whether they count."""


class EngineBase(ABC):
    """The common part of train engines (``areal.api.engine_api.TrainEngine``). ``optimizer`` None: no training."""

    model: Any
    optimizer: Any = None
    default_tokens: int | None = None  # the limit of a micro-batch if the configuration has none

    def __init__(self, config: TrainEngineConfig, ranks: Ranks, total_steps: int = 1) -> None:
        self.config, self.ranks, self.total_steps = config, ranks, total_steps
        self.steps = self.version = 0

    @property
    def is_trained(self) -> bool:
        return self.optimizer is not None

    @property
    def dtype(self) -> torch.dtype:
        return dtype_by_name(self.config.dtype)

    def _micro_batches(self, batch: Mapping[str, Tensor]) -> Parts:
        limits = micro_batch_limits(self.config.mb_spec, self.default_tokens)
        return synchronized_micro_batches(lengths(batch), limits, self.ranks.all_max)

    def _schedule(self) -> tuple[OptimizerConfig, float]:
        """Return the settings and the learning rate of the next update. Raises UsageFault without optimizer."""
        settings = self.config.optimizer
        if settings is None:
            raise without_optimizer(self.config.path)
        return settings, learning_rate(settings, self.steps, self.total_steps)

    def _shares(self, micros: Iterable[tuple[Batch, bool]], weight_of: WeightFn) -> list[Tensor]:
        """Return the share of each micro-batch's mean loss in the loss of all ranks."""
        weights = [weight_of(micro).double() * counts for micro, counts in micros]
        total = self.ranks.all_sum(torch.stack(weights).sum()).clamp(min=1e-12)
        return [weight / total for weight in weights]

    @torch.no_grad()
    def forward(self, batch: Mapping[str, Tensor], of: Callable[[TokenOutputs, Batch], Tensor]) -> Tensor:
        parts = self._micro_batches(batch)
        whole: Tensor | None = None
        with self._evaluating():
            for (part, counts), result in zip(parts, self._results(batch, parts, of), strict=True):
                if whole is None:
                    shape = batch["attention_mask"].shape[: result.dim()]
                    whole = torch.zeros(shape, dtype=result.dtype, device=result.device)
                if counts:
                    put_rows(whole, part, result)
        assert whole is not None, "every rank has a micro-batch"
        return whole

    @torch.no_grad()
    def eval_batch(self, batch: Mapping[str, Tensor], loss_fn: LossFn, loss_weight_fn: WeightFn) -> float:
        def weighted(outputs: TokenOutputs, micro: Batch) -> Tensor:
            weight = loss_weight_fn(micro).double()
            return torch.stack([loss_fn(outputs, micro).double() * weight, weight])

        parts = self._micro_batches(batch)
        with self._evaluating():
            results = self._results(batch, parts, weighted)
            found = [result * counts for (_, counts), result in zip(parts, results, strict=True)]
        loss, total = self.ranks.all_sum(torch.stack(found).sum(0))
        return float(loss / total.clamp(min=1e-12))

    @abstractmethod
    def _results(
        self, batch: Mapping[str, Tensor], parts: Parts, of: Callable[[TokenOutputs, Batch], Tensor]
    ) -> Iterable[Tensor]:
        """Return ``of(outputs, micro-batch)`` of each of ``parts``, without gradients."""

    def save_model(self, folder: Path, tokenizer: str = "") -> None:
        weights = {name: tensor.cpu().contiguous() for name, tensor in self.named_tensors(self.dtype)}
        if self.ranks.is_first:
            write_model(weights, self._saved_configs(), folder, tokenizer)

    @abstractmethod
    def named_tensors(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]: ...

    @abstractmethod
    def _saved_configs(self) -> Sequence[Any]:
        """Return the configurations of transformers that are saved with the model."""

    def _check_finite(self, loss: float, norm: float) -> None:
        """Raise NonFinite if the loss or the norm is not finite."""
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise NonFinite(
                f"update {self.steps + 1} of {self.config.path}: loss {loss:g}, gradient norm {norm:g}; "
                "stopped before the optimizer's step, the weights are those of the update before",
                hint="a lower learning rate, gradient_clipping, or float32; the last checkpoint is intact",
            )

    @contextlib.contextmanager
    def _evaluating(self) -> Iterator[None]:
        self.model.eval()
        try:
            yield
        finally:
            self._restore_mode()

    @abstractmethod
    def _restore_mode(self) -> None: ...


def share_of(loss: Tensor, share: Tensor) -> Tensor:
    """Return a micro-batch's part of the whole loss; 0 for a share of 0, whatever its loss is."""
    return torch.where(share > 0, loss.double() * share, loss.double() * 0.0)
