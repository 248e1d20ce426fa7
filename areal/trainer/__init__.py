"""AReaL's import path of the trainers, each imported when it is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from areal.training.trainers.offline import DPOTrainer, RWTrainer, SFTTrainer
    from areal.training.trainers.ppo import PPOTrainer

__all__ = ["DPOTrainer", "PPOTrainer", "RWTrainer", "SFTTrainer"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import areal

    return getattr(areal, name)
