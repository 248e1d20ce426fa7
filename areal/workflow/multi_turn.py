"""Workflow that samples further answers until one is correct."""

from areal.rollout.rlvr import MultiTurnWorkflow

__all__ = ["MultiTurnWorkflow"]
