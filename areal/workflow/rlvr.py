"""One answer to one prompt, and one verifiable reward."""

from areal.rollout.rlvr import RLVRWorkflow

__all__ = ["RLVRWorkflow"]
