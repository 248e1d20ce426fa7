"""AReaL's import path of a recorded call and its reward."""

from areal.workflow.openai.client import Interaction as InteractionWithTokenLogpReward

__all__ = ["InteractionWithTokenLogpReward"]
