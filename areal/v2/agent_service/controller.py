"""AReaL's import path of the agent controller."""

from areal.client import AgentController

__all__ = ["AgentController"]
