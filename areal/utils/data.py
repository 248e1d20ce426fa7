"""AReaL's import path of what puts trajectories together."""

from areal.rollout.tensors import concat_padded_tensors

__all__ = ["concat_padded_tensors"]
