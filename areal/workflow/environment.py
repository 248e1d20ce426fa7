"""An agent in a gymnasium-compatible environment."""

from areal.rollout.agents import EnvironmentWorkflow

__all__ = ["EnvironmentWorkflow"]
