"""An answer that is tried again until it is right."""

from areal.rollout.rlvr import MultiTurnWorkflow

__all__ = ["MultiTurnWorkflow"]
