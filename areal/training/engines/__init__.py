"""Train engines behind one contract, ``areal.api.engine_api.TrainEngine``, opened here alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from areal.api.alloc_mode import train_backend
from areal.resources.plugins import TRAIN_ENGINES

if TYPE_CHECKING:
    from areal.api.cli_args import TrainEngineConfig
    from areal.api.engine_api import TrainEngine
    from areal.training.ranks import Ranks


def open_engine(
    config: TrainEngineConfig, ranks: Ranks, total_steps: int = 1, allocation_mode: str = ""
) -> TrainEngine:
    """The engine that ``config.backend``, else ``allocation_mode``, names (``fsdp`` where neither does), on this rank.
    ``total_steps``: optimizer steps that the learning rate's schedule spans. Raises UsageFault, NotFound."""
    engine: TrainEngine = TRAIN_ENGINES.make(
        train_backend(config.backend, allocation_mode).engine, config, ranks, total_steps
    )
    return engine
