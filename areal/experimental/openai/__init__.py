"""AReaL's import path of OpenAI's client as a workflow's own."""

from __future__ import annotations

from areal.unsupported import attribute
from areal.workflow.openai.client import ArealOpenAI
from areal.workflow.openai.client import Interaction as InteractionWithTokenLogpReward

__all__ = ["ArealOpenAI", "InteractionWithTokenLogpReward"]


def __getattr__(name: str) -> object:
    return attribute(__name__, name)
