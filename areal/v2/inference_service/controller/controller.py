"""AReaL's import path of the rollout controller."""

from areal.client import RolloutControllerV2

__all__ = ["RolloutControllerV2"]
