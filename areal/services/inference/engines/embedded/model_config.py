"""A model folder's configuration: the shape of a Llama-family decoder, its end tokens, and where each tensor goes.

``read_config`` returns the raw mapping of ``config.json``; ``parse`` turns it into a ``ModelConfig`` or says, by
``UnsupportedArchitecture``, what about the architecture is not in the own decoder, so that the caller can fall back to
transformers. Both generations of field names are read: ``rope_theta`` + ``rope_scaling`` + ``torch_dtype`` and
``rope_parameters`` + ``dtype``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from pathlib import Path
from typing import Any

from areal.errors import ArealError
from areal.services.inference.engines.embedded.checkpoint import WeightFiles

_QKV_BIAS = {"llama": False, "mistral": False, "qwen2": True, "qwen3": False}  # when attention_bias is not given
_ROPE_TYPES = ("default", "linear", "llama3")


class UnsupportedArchitecture(Exception):
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
    """The decoder's shape. Raises UnsupportedArchitecture for what only transformers can run, ArealError for a field
    that is missing."""
    model_type = raw.get("model_type")
    if model_type not in _QKV_BIAS:
        raise UnsupportedArchitecture(f"model_type {model_type!r}")
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
        raise UnsupportedArchitecture(f"hidden_act {raw['hidden_act']!r}")
    if raw.get("quantization_config"):
        raise UnsupportedArchitecture("quantized weights")
    if raw.get("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedArchitecture("partial rotary embedding")
    windowed = raw.get("use_sliding_window", raw["model_type"] == "mistral")
    if windowed and raw.get("sliding_window"):
        raise UnsupportedArchitecture("sliding window attention")


def _rope(raw: Mapping[str, Any]) -> Rope:
    """``rope_parameters`` holds theta and scaling together; before it, ``rope_theta`` stood beside ``rope_scaling``."""
    given: Mapping[str, Any] = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    kind = str(given.get("rope_type") or given.get("type") or "default")
    if kind not in _ROPE_TYPES:
        raise UnsupportedArchitecture(f"rope scaling {kind!r}")
    if given.get("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedArchitecture("partial rotary embedding")
    theta = given.get("rope_theta") or raw.get("rope_theta") or 10000.0
    numbers = {name: float(value) for name, value in given.items() if isinstance(value, int | float)}
    return Rope(theta=float(theta), type=kind, parameters=numbers)


# -- end tokens
#
# All that config.json, generation_config.json and the tokenizer name count: instruction models often name the end of
# a turn in one file and the end of text in another.


def end_tokens(folder: Path, config: Mapping[str, Any]) -> frozenset[int]:
    """Ids of the end tokens. A file that is absent adds none."""
    found = _ids(config.get("eos_token_id")) | _ids(_read(folder / "generation_config.json").get("eos_token_id"))
    text = _read(folder / "tokenizer_config.json").get("eos_token")
    if isinstance(text, dict):  # an AddedToken, written out
        text = text.get("content")
    for token in _read(folder / "tokenizer.json").get("added_tokens") or []:
        if text is not None and token.get("content") == text:
            found |= _ids(token.get("id"))
    return frozenset(found)


def _ids(value: Any) -> set[int]:
    if isinstance(value, int):
        return {value}
    return {each for each in value if isinstance(each, int)} if isinstance(value, list) else set()


def _read(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}


# -- buffer layout
#
# The decoder fuses q, k and v into one matrix, gate and up into another, and keeps each rotary pair (i, i + D/2) of a
# head side by side (2i, 2i + 1), so that a rotation is one complex product. Scores are unchanged, because q and k are
# permuted alike. The plan is the only place that knows the names of a checkpoint: loading at start and swapping
# weights under a running engine follow the same one, and both check it against the headers first.


class Form(Enum):
    PLAIN = auto()
    ROTARY = auto()  # rows are heads of rotary pairs, to be interleaved
    ROTARY_EACH = auto()  # one head's vector, interleaved and repeated for every row of the target


@dataclass(frozen=True)
class BufferSlice:
    """``source`` [shape] fills rows ``start:stop`` of the buffer ``target``."""

    source: str
    shape: tuple[int, ...]
    target: str
    start: int
    stop: int
    form: Form = Form.PLAIN


def buffer_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every buffer of the decoder; a tied head is no buffer of its own."""
    hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
    rotary, all_heads = config.heads + config.kv_heads, config.heads + 2 * config.kv_heads
    shapes: dict[str, tuple[int, ...]] = {"embed": (config.vocab_size, hidden), "norm": (hidden,)}
    if not config.tied:
        shapes["head"] = (config.vocab_size, hidden)
    for layer in range(config.layers):
        at = f"{layer}."
        shapes[at + "input_norm"] = shapes[at + "post_norm"] = (hidden,)
        shapes[at + "qkv"] = (all_heads * dim, hidden)
        shapes[at + "output"] = (hidden, config.heads * dim)
        shapes[at + "gate_up"] = (2 * inner, hidden)
        shapes[at + "down"] = (hidden, inner)
        if config.qkv_bias:
            shapes[at + "qkv_bias"] = (all_heads * dim,)
        if config.output_bias:
            shapes[at + "output_bias"] = (hidden,)
        if config.mlp_bias:
            shapes[at + "gate_up_bias"] = (2 * inner,)
            shapes[at + "down_bias"] = (hidden,)
        if config.qk_norm:
            shapes[at + "qk_norm"] = (rotary, dim)
    return shapes


def buffer_slices(config: ModelConfig) -> tuple[BufferSlice, ...]:
    """Every tensor the decoder needs, with the shape it must have."""
    vocab, hidden = config.vocab_size, config.hidden_size
    pieces = [
        BufferSlice("model.embed_tokens.weight", (vocab, hidden), "embed", 0, vocab),
        BufferSlice("model.norm.weight", (hidden,), "norm", 0, hidden),
    ]
    if not config.tied:
        pieces.append(BufferSlice("lm_head.weight", (vocab, hidden), "head", 0, vocab))
    for layer in range(config.layers):
        pieces += _attention(config, f"model.layers.{layer}.", f"{layer}.")
        pieces += _mlp(config, f"model.layers.{layer}.", f"{layer}.")
    return tuple(pieces)


def _attention(config: ModelConfig, source: str, target: str) -> list[BufferSlice]:
    hidden, dim = config.hidden_size, config.head_dim
    q, k = config.heads * dim, config.kv_heads * dim
    spans = {"q_proj": (0, q), "k_proj": (q, q + k), "v_proj": (q + k, q + 2 * k)}
    pieces = [BufferSlice(source + "input_layernorm.weight", (hidden,), target + "input_norm", 0, hidden)]
    for name, (start, stop) in spans.items():
        form = Form.PLAIN if name == "v_proj" else Form.ROTARY
        of = f"{source}self_attn.{name}."
        pieces.append(BufferSlice(of + "weight", (stop - start, hidden), target + "qkv", start, stop, form))
        if config.qkv_bias:
            pieces.append(BufferSlice(of + "bias", (stop - start,), target + "qkv_bias", start, stop, form))
    pieces.append(BufferSlice(source + "self_attn.o_proj.weight", (hidden, q), target + "output", 0, hidden))
    if config.output_bias:
        pieces.append(BufferSlice(source + "self_attn.o_proj.bias", (hidden,), target + "output_bias", 0, hidden))
    if config.qk_norm:
        rows = {"q_norm": (0, config.heads), "k_norm": (config.heads, config.heads + config.kv_heads)}
        for name, (start, stop) in rows.items():
            of = f"{source}self_attn.{name}.weight"
            pieces.append(BufferSlice(of, (dim,), target + "qk_norm", start, stop, Form.ROTARY_EACH))
    return pieces


def _mlp(config: ModelConfig, source: str, target: str) -> list[BufferSlice]:
    hidden, inner = config.hidden_size, config.intermediate_size
    pieces = [
        BufferSlice(source + "post_attention_layernorm.weight", (hidden,), target + "post_norm", 0, hidden),
        BufferSlice(source + "mlp.gate_proj.weight", (inner, hidden), target + "gate_up", 0, inner),
        BufferSlice(source + "mlp.up_proj.weight", (inner, hidden), target + "gate_up", inner, 2 * inner),
        BufferSlice(source + "mlp.down_proj.weight", (hidden, inner), target + "down", 0, hidden),
    ]
    if config.mlp_bias:
        pieces += [
            BufferSlice(source + "mlp.gate_proj.bias", (inner,), target + "gate_up_bias", 0, inner),
            BufferSlice(source + "mlp.up_proj.bias", (inner,), target + "gate_up_bias", inner, 2 * inner),
            BufferSlice(source + "mlp.down_proj.bias", (hidden,), target + "down_bias", 0, hidden),
        ]
    return pieces


def check(pieces: Sequence[BufferSlice], checkpoint: WeightFiles, *, tied: bool) -> None:
    """Raise ArealError unless the checkpoint holds exactly what the plan needs, in the planned shapes.

    A tensor more is refused as well: it means another model, of which a part would load without a word.
    """
    shapes: Mapping[str, tuple[int, ...]] = {name: entry.shape for name, entry in checkpoint.entries.items()}
    missing = [piece.source for piece in pieces if piece.source not in shapes]
    if missing:
        raise ArealError(f"{checkpoint.folder} lacks {_some(missing)}")
    wrong = [
        f"{piece.source} is {list(shapes[piece.source])}, config.json makes it {list(piece.shape)}"
        for piece in pieces
        if shapes[piece.source] != piece.shape
    ]
    if wrong:
        raise ArealError(f"{checkpoint.folder}: {_some(wrong)}")
    extra = sorted(set(shapes) - {piece.source for piece in pieces} - ({"lm_head.weight"} if tied else set()))
    extra = [name for name in extra if not name.endswith("rotary_emb.inv_freq")]
    if extra:
        raise ArealError(f"{checkpoint.folder} holds tensors this model does not have: {_some(extra)}")


def _some(texts: list[str]) -> str:
    more = f" and {len(texts) - 3} more" if len(texts) > 3 else ""
    return "; ".join(texts[:3]) + more
