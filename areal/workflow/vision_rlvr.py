"""Workflow of one answer to one prompt with images and a verifiable reward."""

from areal.rollout.vision import VisionRLVRWorkflow

__all__ = ["VisionRLVRWorkflow"]
