"""Rotary position embedding as unit complex numbers (RoFormer, arXiv:2104.09864), with linear and Llama 3 scaling."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from areal.services.inference.engines.embedded.model_config import Rope


def inverse_frequencies(rope: Rope, head_dim: int) -> Tensor:
    """Angle per position of each rotary pair, [head_dim / 2] float32."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.type == "linear":
        return frequencies / rope.parameters["factor"]
    if rope.type == "llama3":
        return _llama3(frequencies, rope)
    return frequencies


def _llama3(frequencies: Tensor, rope: Rope) -> Tensor:
    """Long waves are stretched by ``factor``, short ones kept, those between blended by where they lie."""
    low, high = rope.parameters["low_freq_factor"], rope.parameters["high_freq_factor"]
    factor, context = rope.parameters["factor"], rope.parameters["original_max_position_embeddings"]
    waves = 2 * math.pi / frequencies
    blend = (context / waves - low) / (high - low)
    blended = (1 - blend) * frequencies / factor + blend * frequencies
    stretched = torch.where(waves > context / low, frequencies / factor, frequencies)
    between = (waves <= context / low) & (waves >= context / high)
    return torch.where(between, blended, stretched)


def rotations(rope: Rope, head_dim: int, positions: int) -> Tensor:
    """exp(i * position * frequency), [positions, head_dim / 2] complex64."""
    angles = torch.outer(torch.arange(positions, dtype=torch.float32), inverse_frequencies(rope, head_dim))
    return torch.polar(torch.ones_like(angles), angles)
