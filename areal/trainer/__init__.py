"""AReaL's import path of the trainers, each imported when it is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from areal.lazy import lazy

if TYPE_CHECKING:
    from areal.training.trainers.offline import DPOTrainer, RWTrainer, SFTTrainer
    from areal.training.trainers.ppo import PPOTrainer

__all__ = ["DPOTrainer", "PPOTrainer", "RWTrainer", "SFTTrainer"]
__getattr__ = lazy(__name__, dict.fromkeys(__all__, "areal"))
