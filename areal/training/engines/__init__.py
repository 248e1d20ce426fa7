"""Train engines behind the contract ``areal.api.engine_api.TrainEngine``, and functions that all of them share."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from areal.api.alloc_mode import train_backend
from areal.errors import UsageFault
from areal.resources.kinds import TRAIN_ENGINES
from areal.training.batches import MicroBatches

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from areal.api.cli_args import MicroBatchSpec, OptimizerConfig, TrainEngineConfig
    from areal.api.engine_api import TrainEngine
    from areal.training.ranks import Ranks


def open_engine(
    config: TrainEngineConfig, ranks: Ranks, total_steps: int = 1, allocation_mode: str = ""
) -> TrainEngine:
    """Return this rank's engine by ``config.backend``, or else ``allocation_mode``, or else ``fsdp``. ``total_steps``:
    optimizer steps of the learning rate schedule. Raises UsageFault, NotFound."""
    name = train_backend(config.backend, allocation_mode).engine
    return TRAIN_ENGINES.make(name, config, ranks, total_steps)


def without_optimizer(path: str, role: str = "actor") -> UsageFault:
    """Return the error of a model that is to be trained and has no optimizer."""
    return UsageFault(
        f"the model {path} is to be trained, and its optimizer is null",
        hint=f"{role}.optimizer={{lr: 1e-5}}; a model that is trained needs one",
    )


@contextlib.contextmanager
def configured_settings(optimizers: Sequence[Optimizer]) -> Iterator[None]:
    """Keep the optimizers' configured settings in a block that loads a checkpoint into the optimizers."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    names: tuple[str, ...] = ("weight_decay", "betas", "eps")
    settings = [{name: group[name] for name in names if name in group} for group in groups]
    yield
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    for group, configured in zip(groups, settings, strict=True):
        group.update(configured)


def micro_batch_limits(spec: MicroBatchSpec, default_tokens: int | None) -> MicroBatches:
    """Return the limits of micro-batches. ``default_tokens``: the limit if the configuration has none."""
    return MicroBatches(
        count=spec.n_mbs or 1,
        granularity=spec.granularity,
        divisor=spec.n_mbs_divisor or 1,
        max_tokens=spec.max_tokens_per_mb or default_tokens,
        algorithm=spec.packing_algorithm,
    )


def learning_rate(config: OptimizerConfig, step: int, total_steps: int) -> float:
    """Return the learning rate of update number ``step`` (from 0) of ``total_steps``.

    It rises linearly to ``lr`` at the last update of the warm-up, then falls by ``lr_scheduler_type`` to
    ``min_lr_ratio * lr`` at update ``total_steps``, and stays there.
    """
    proportion, least = config.warmup_steps_proportion, config.min_lr_ratio
    warmup = min(total_steps, math.ceil(proportion * total_steps)) if proportion > 0 else 0
    if step < warmup:
        return config.lr * ((step + 1) / warmup)
    if config.lr_scheduler_type == "constant":
        return config.lr
    done = min(1.0, (step - warmup) / max(1, total_steps - warmup - 1))
    if config.lr_scheduler_type == "linear":
        return config.lr * (1.0 - (1.0 - least) * done)
    return config.lr * (least + (1.0 - least) * (1.0 + math.cos(math.pi * done)) / 2)
