"""What a model folder's ``config.json`` says about a decoder of the Llama family.

``read_config`` returns the raw mapping; ``parse`` turns it into a ``ModelConfig`` or says, by ``Unsupported``, what
about the architecture is not in the own decoder, so that the caller can fall back to transformers. Both generations of
field names are read: ``rope_theta`` + ``rope_scaling`` + ``torch_dtype`` and ``rope_parameters`` + ``dtype``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from areal.errors import ArealError

_QKV_BIAS = {"llama": False, "mistral": False, "qwen2": True, "qwen3": False}  # when attention_bias is not given
_ROPE_TYPES = ("default", "linear", "llama3")


class Unsupported(Exception):
    """The own decoder does not know this architecture; the text says which part of it."""


@dataclass(frozen=True)
class Rope:
    """Rotary embedding: base, and the scaling's type with its own parameters (rope_type ``linear`` or ``llama3``)."""

    theta: float
    type: str = "default"
    parameters: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a Llama-like decoder. ``dtype`` is the checkpoint's, as a torch name (``bfloat16``)."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    max_positions: int
    rope: Rope
    tied: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    dtype: str


def read_config(folder: Path) -> dict[str, Any]:
    """``folder/config.json``; ArealError when there is no such folder or file, or it is not a JSON object."""
    if not folder.is_dir():
        raise ArealError(f"model folder {folder} does not exist", hint="give the folder that holds config.json")
    path = folder / "config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ArealError(f"{folder} is not a model folder: it has no config.json") from None
    except (OSError, ValueError) as error:
        raise ArealError(f"cannot read {path}: {error}") from error
    if not isinstance(raw, dict):
        raise ArealError(f"{path} is not a JSON object")
    return raw


def parse(raw: Mapping[str, Any]) -> ModelConfig:
    """The decoder's shape. Raises Unsupported for what only transformers can run, ArealError for a missing field."""
    model_type = raw.get("model_type")
    if model_type not in _QKV_BIAS:
        raise Unsupported(f"model_type {model_type!r}")
    _refuse_variants(raw)
    try:
        heads = int(raw["num_attention_heads"])
        hidden = int(raw["hidden_size"])
        bias = bool(raw.get("attention_bias", _QKV_BIAS[model_type]))
        return ModelConfig(
            vocab_size=int(raw["vocab_size"]),
            hidden_size=hidden,
            intermediate_size=int(raw["intermediate_size"]),
            layers=int(raw["num_hidden_layers"]),
            heads=heads,
            kv_heads=int(raw.get("num_key_value_heads") or heads),
            head_dim=int(raw.get("head_dim") or hidden // heads),
            norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
            max_positions=int(raw.get("max_position_embeddings", 2048)),
            rope=_rope(raw),
            tied=bool(raw.get("tie_word_embeddings", False)),
            qkv_bias=True if model_type == "qwen2" else bias,
            output_bias=False if model_type == "qwen2" else bias,
            mlp_bias=bool(raw.get("mlp_bias", False)),
            qk_norm=model_type == "qwen3",
            dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "float32"),
        )
    except KeyError as missing:
        raise ArealError(f"config.json of this {model_type} model lacks {missing}") from None


def _refuse_variants(raw: Mapping[str, Any]) -> None:
    if raw.get("hidden_act", "silu") != "silu":
        raise Unsupported(f"hidden_act {raw['hidden_act']!r}")
    if raw.get("quantization_config"):
        raise Unsupported("quantized weights")
    if raw.get("partial_rotary_factor", 1.0) != 1.0:
        raise Unsupported("partial rotary embedding")
    windowed = raw.get("use_sliding_window", raw["model_type"] == "mistral")
    if windowed and raw.get("sliding_window"):
        raise Unsupported("sliding window attention")


def _rope(raw: Mapping[str, Any]) -> Rope:
    """``rope_parameters`` holds theta and scaling together; before it, ``rope_theta`` stood beside ``rope_scaling``."""
    given: Mapping[str, Any] = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    kind = str(given.get("rope_type") or given.get("type") or "default")
    if kind not in _ROPE_TYPES:
        raise Unsupported(f"rope scaling {kind!r}")
    if given.get("partial_rotary_factor", 1.0) != 1.0:
        raise Unsupported("partial rotary embedding")
    theta = given.get("rope_theta") or raw.get("rope_theta") or 10000.0
    numbers = {name: float(value) for name, value in given.items() if isinstance(value, int | float)}
    return Rope(theta=float(theta), type=kind, parameters=numbers)
