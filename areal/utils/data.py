"""AReaL's import path of ``concat_padded_tensors``."""

from areal.rollout.tensors import concat_padded_tensors

__all__ = ["concat_padded_tensors"]
