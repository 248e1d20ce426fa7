"""AReaL's import path of ``workflow_context``, which describes the running episode."""

from __future__ import annotations

from areal.api import workflow_context
from areal.compat import attribute

__all__ = ["workflow_context"]


def __getattr__(name: str) -> object:
    return attribute(__name__, name)
