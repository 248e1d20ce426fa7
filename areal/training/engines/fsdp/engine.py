"""``FSDPEngine``: forward passes, and updates normalised over all micro-batches and ranks.

The engine alone owns normalisation: a loss function returns the mean over its micro-batch, a weight function how much
that mean counts (tokens, sequences, pairs), and every micro-batch contributes ``mean * weight / total weight``. FSDP
averages gradients over ranks, hence the factor of their number. So 1 rank and N ranks, one micro-batch and many, give
the same gradient.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from areal.errors import UsageFault
from areal.training.data.batches import Batch, lengths, moved, rows, select
from areal.training.data.packed_rows import Cost, PackedRows, pack
from areal.training.data.packing import MicroBatches, micro_batches
from areal.training.engines.fsdp.model import compute_dtype, cost_of, load_model, set_training, sharded
from areal.training.engines.fsdp.optimizer import clipped_norm, make_optimizer, set_learning_rate
from areal.training.failures import NonFinite
from areal.training.ranks import Ranks

if TYPE_CHECKING:
    from areal.api.cli_args import MicroBatchSpec, TrainEngineConfig

# On a CPU a large micro-batch is no faster than a few, which have rows of like length together and less padding.
_CPU_TOKENS = 2048

LossFn = Callable[[Tensor, Batch], Tensor]
WeightFn = Callable[[Batch], Tensor]


@dataclass(frozen=True)
class Update:
    """One optimizer step: ``loss`` is the mean over all micro-batches of all ranks."""

    loss: float
    grad_norm: float
    learning_rate: float
    micro_batches: int


@dataclass
class FSDPEngine:
    """One model on the ranks of a run. ``total_steps`` is the number of updates that the schedule spans."""

    config: TrainEngineConfig
    ranks: Ranks
    total_steps: int = 1
    steps: int = 0  # updates done, restored from a checkpoint
    version: int = 0
    model: torch.nn.Module = field(init=False)
    optimizer: torch.optim.Optimizer | None = field(init=False, default=None)
    _cost: Cost | None = field(init=False)  # None: rows are never packed

    def __post_init__(self) -> None:
        model = load_model(self.config, self.ranks)
        self._cost = cost_of(model)
        self.model = sharded(model, self.config, self.ranks)
        if self.config.optimizer is not None:
            self.optimizer = make_optimizer(self.model, self.config.optimizer)
        self._leave_evaluation()

    # -- forward

    def outputs(self, batch: Mapping[str, Tensor], packed: PackedRows | None = None) -> Tensor:
        """Logits [B, T, V], or [B, T, 1] of a critic, in the compute dtype; of padding they mean nothing, nor do logits
        of a row's last token. ``packed``: the rows as they are computed.

        Rows that are not packed need no mask: a causal one never looks to the right, where the padding is, and
        attention without a mask is several times as fast.
        """
        with self._precision():
            if packed is None:
                return _logits(self.model(input_ids=batch["input_ids"], use_cache=False))
            inputs = {"input_ids": packed.input_ids, "position_ids": packed.positions, "attention_mask": packed.mask}
            return packed.unpacked(_logits(self.model(**inputs, use_cache=False)))

    def _micro(self, batch: Mapping[str, Tensor], part: Sequence[int]) -> tuple[Batch, PackedRows | None]:
        """Rows of the batch, on the ranks' device."""
        chosen, device = select(batch, part), self.ranks.device
        rows = pack(chosen, self._cost, last=self.config.is_critic) if self._cost is not None else None
        return moved(chosen, device), rows.to(device) if rows is not None else None

    @torch.no_grad()
    def forward(self, batch: Mapping[str, Tensor], of: Callable[[Tensor, Batch], Tensor]) -> Tensor:
        """``of(outputs, micro-batch)`` [b, T] or [b] for every row of ``batch``, in its order, padded with zeros."""
        parts, results = self._cut(batch), []
        with self._evaluating():
            for part, real in parts:
                micro, packed = self._micro(batch, part)
                result = of(self.outputs(micro, packed), micro)
                if real:
                    results.append((part, result))
        return _in_order(results, batch)

    # -- updates

    def train_batch(self, batch: Mapping[str, Tensor], loss_fn: LossFn, loss_weight_fn: WeightFn) -> Update:
        """One optimizer step over this rank's ``batch``. Raises NonFinite before the step, changing nothing."""
        if self.optimizer is None or self.config.optimizer is None:
            raise UsageFault(
                f"the model {self.config.path} is to be trained, and its optimizer is null",
                hint="actor.optimizer={lr: 1e-5}; a model that is trained needs one",
            )
        rate = set_learning_rate(self.optimizer, self.config.optimizer, self.steps, self.total_steps)
        self.optimizer.zero_grad(set_to_none=True)
        micros = [(*self._micro(batch, part), real) for part, real in self._cut(batch)]
        weights = [loss_weight_fn(micro).double() * real for micro, _, real in micros]
        total = self.ranks.summed(torch.stack(weights).sum()).clamp(min=1e-12)
        losses = [
            self._backward(micro, packed, loss_fn, weight / total, last=number == len(micros) - 1)
            for number, ((micro, packed, _), weight) in enumerate(zip(micros, weights, strict=True))
        ]
        norm = clipped_norm(self.optimizer, self.config.optimizer.gradient_clipping)
        loss = self.ranks.summed(torch.stack(losses).sum())
        self._refuse_non_finite(loss, norm)
        self.optimizer.step()
        self.steps += 1
        return Update(float(loss), float(norm), rate, len(micros))

    def _backward(
        self, micro: Batch, packed: PackedRows | None, loss_fn: LossFn, share: Tensor, *, last: bool
    ) -> Tensor:
        """Add this micro-batch's gradient; its part of the whole loss. A share of 0 still runs both passes: the other
        ranks' collectives wait for them."""
        with self._synchronised(last):
            loss = loss_fn(self.outputs(micro, packed), micro)
            part = torch.where(share > 0, loss.double() * share, loss.double() * 0.0)
            (part * self.ranks.size).float().backward()  # type: ignore[no-untyped-call]
        return part.detach()

    @torch.no_grad()
    def eval_batch(self, batch: Mapping[str, Tensor], loss_fn: LossFn, loss_weight_fn: WeightFn) -> float:
        """The loss as ``train_batch`` would have it, over all ranks."""
        parts: list[Tensor] = []
        with self._evaluating():
            for part, real in self._cut(batch):
                micro, packed = self._micro(batch, part)
                weight = loss_weight_fn(micro).double() * real
                parts.append(torch.stack([loss_fn(self.outputs(micro, packed), micro).double() * weight, weight]))
        weighted, total = self.ranks.summed(torch.stack(parts).sum(0))
        return float(weighted / total.clamp(min=1e-12))

    def _refuse_non_finite(self, loss: Tensor, norm: Tensor) -> None:
        if not bool(torch.isfinite(loss) & torch.isfinite(norm)):
            raise NonFinite(
                f"update {self.steps + 1} of {self.config.path}: loss {float(loss):g}, gradient norm {float(norm):g}; "
                "stopped before the optimizer's step, the weights are those of the update before",
                hint="a lower learning rate, gradient_clipping, or float32; the last checkpoint is intact",
            )

    # -- how

    def _cut(self, batch: Mapping[str, Tensor]) -> list[tuple[list[int], bool]]:
        """Rows of each micro-batch, and whether it counts: a rank with fewer than the others repeats its first
        rows for nothing."""
        spec = self.config.mb_spec
        how = cut_of(spec, _CPU_TOKENS if self.ranks.device.type == "cpu" else None)
        sizes = lengths(batch)
        mine = micro_batches(sizes, how)
        most = self.ranks.largest(len(mine))
        if most > len(mine):
            mine = micro_batches(sizes, how, at_least=most)
        return [(part, True) for part in mine] + [(list(range(spec.granularity)), False)] * (most - len(mine))

    def _precision(self) -> contextlib.AbstractContextManager[Any]:
        dtype = compute_dtype(self.config)
        if self.ranks.group is not None or dtype == torch.float32:
            return contextlib.nullcontext()  # FSDP's own policy casts
        return torch.autocast(self.ranks.device.type, dtype=dtype)

    @contextlib.contextmanager
    def _synchronised(self, last: bool) -> Iterator[None]:
        """Gradients travel with the last micro-batch only."""
        if self.ranks.group is not None:
            self.model.set_requires_gradient_sync(last)  # type: ignore[operator]
        yield

    @contextlib.contextmanager
    def _evaluating(self) -> Iterator[None]:
        self.model.eval()
        try:
            yield
        finally:
            self._leave_evaluation()

    def _leave_evaluation(self) -> None:
        if self.optimizer is not None:
            set_training(self.model, self.config)
        else:
            self.model.eval()


def cut_of(spec: MicroBatchSpec, most: int | None) -> MicroBatches:
    """``most``: tokens of a micro-batch where the configuration has no limit."""
    return MicroBatches(
        count=spec.n_mbs or 1,
        granularity=spec.granularity,
        divisor=spec.n_mbs_divisor or 1,
        max_tokens=spec.max_tokens_per_mb or most,
        algorithm=spec.packing_algorithm,
    )


def _logits(result: Any) -> Tensor:
    logits: Tensor = result.logits
    return logits


def _in_order(results: Sequence[tuple[list[int], Tensor]], batch: Mapping[str, Tensor]) -> Tensor:
    width = batch["attention_mask"].shape[1]
    first = results[0][1]
    shape = (rows(batch), width) if first.dim() > 1 else (rows(batch),)
    whole = torch.zeros(shape, dtype=first.dtype, device=first.device)
    for part, result in results:
        if result.dim() > 1:
            whole[part, : result.shape[1]] = result
        else:
            whole[part] = result
    return whole
