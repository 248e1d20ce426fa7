"""Train engines behind one contract, ``areal.api.engine_api.TrainEngine``, opened here alone."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from areal.api.alloc_mode import train_backend
from areal.resources.kinds import TRAIN_ENGINES
from areal.training.batches import MicroBatches

if TYPE_CHECKING:
    from areal.api.cli_args import MicroBatchSpec, OptimizerConfig, TrainEngineConfig
    from areal.api.engine_api import TrainEngine
    from areal.training.ranks import Ranks


def open_engine(
    config: TrainEngineConfig, ranks: Ranks, total_steps: int = 1, allocation_mode: str = ""
) -> TrainEngine:
    """The engine that ``config.backend``, else ``allocation_mode``, names (``fsdp`` where neither does), on this rank.
    ``total_steps``: optimizer steps that the learning rate's schedule spans. Raises UsageFault, NotFound."""
    name = train_backend(config.backend, allocation_mode).engine
    engine: TrainEngine = TRAIN_ENGINES.make(name, config, ranks, total_steps)
    return engine


def cut_of(spec: MicroBatchSpec, most: int | None) -> MicroBatches:
    """``most``: tokens of a micro-batch where the configuration has no limit."""
    return MicroBatches(
        count=spec.n_mbs or 1,
        granularity=spec.granularity,
        divisor=spec.n_mbs_divisor or 1,
        max_tokens=spec.max_tokens_per_mb or most,
        algorithm=spec.packing_algorithm,
    )


def learning_rate(config: OptimizerConfig, step: int, total_steps: int) -> float:
    """The learning rate of update number ``step`` (from 0) of ``total_steps``.

    It rises linearly over the warm-up, reaching ``lr`` with its last update, and then falls to ``min_lr_ratio`` of it
    by ``lr_scheduler_type``, reached with the last one. Beyond ``total_steps`` it stays there.
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
