"""AReaL's import path of what workflows ask about the episode they run in."""

from areal.api import workflow_context

__all__ = ["workflow_context"]
