"""Workflow of one answer to one prompt with a verifiable reward."""

from areal.rollout.rlvr import RLVRWorkflow

__all__ = ["RLVRWorkflow"]
