"""AReaL's import path of what workflows ask about the episode they run in."""

from __future__ import annotations

from areal.api import workflow_context
from areal.unsupported import attribute

__all__ = ["workflow_context"]


def __getattr__(name: str) -> object:
    return attribute(__name__, name)
