"""AReaL's import path of ``InteractionWithTokenLogpReward``: a recorded call and its reward."""

from areal.rollout.openai_client import InteractionWithTokenLogpReward

__all__ = ["InteractionWithTokenLogpReward"]
