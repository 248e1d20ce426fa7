"""Workflow of an agent in a gymnasium-compatible environment."""

from areal.rollout.workflows import EnvironmentWorkflow

__all__ = ["EnvironmentWorkflow"]
