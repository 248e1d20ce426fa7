"""AReaL's import path of ``ArealOpenAI``, the OpenAI client of workflows."""

from __future__ import annotations

from areal.compat import attribute
from areal.rollout.openai_client import ArealOpenAI, InteractionWithTokenLogpReward

__all__ = ["ArealOpenAI", "InteractionWithTokenLogpReward"]


def __getattr__(name: str) -> object:
    return attribute(__name__, name)
