"""Which tensor of a checkpoint goes where in the decoder's own buffers; pure.

The decoder fuses q, k and v into one matrix, gate and up into another, and keeps each rotary pair (i, i + D/2) of a
head side by side (2i, 2i + 1), so that a rotation is one complex product. Scores are unchanged, because q and k are
permuted alike. The plan is the only place that knows the names of a checkpoint: loading at start and swapping weights
under a running engine follow the same one, and both check it against the headers first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from areal.errors import ArealError
from areal.services.inference.engines.embedded.checkpoint import Checkpoint
from areal.services.inference.engines.embedded.model_config import ModelConfig


class Form(Enum):
    PLAIN = auto()
    ROTARY = auto()  # rows are heads of rotary pairs, to be interleaved
    ROTARY_EACH = auto()  # one head's vector, interleaved and repeated for every row of the target


@dataclass(frozen=True)
class Piece:
    """``source`` [shape] fills rows ``start:stop`` of the buffer ``target``."""

    source: str
    shape: tuple[int, ...]
    target: str
    start: int
    stop: int
    form: Form = Form.PLAIN


def buffers(config: ModelConfig) -> dict[str, tuple[int, ...]]:
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


def plan(config: ModelConfig) -> tuple[Piece, ...]:
    """Every tensor the decoder needs, with the shape it must have."""
    vocab, hidden = config.vocab_size, config.hidden_size
    pieces = [
        Piece("model.embed_tokens.weight", (vocab, hidden), "embed", 0, vocab),
        Piece("model.norm.weight", (hidden,), "norm", 0, hidden),
    ]
    if not config.tied:
        pieces.append(Piece("lm_head.weight", (vocab, hidden), "head", 0, vocab))
    for layer in range(config.layers):
        pieces += _attention(config, f"model.layers.{layer}.", f"{layer}.")
        pieces += _mlp(config, f"model.layers.{layer}.", f"{layer}.")
    return tuple(pieces)


def _attention(config: ModelConfig, source: str, target: str) -> list[Piece]:
    hidden, dim = config.hidden_size, config.head_dim
    q, k = config.heads * dim, config.kv_heads * dim
    spans = {"q_proj": (0, q), "k_proj": (q, q + k), "v_proj": (q + k, q + 2 * k)}
    pieces = [Piece(source + "input_layernorm.weight", (hidden,), target + "input_norm", 0, hidden)]
    for name, (start, stop) in spans.items():
        form = Form.PLAIN if name == "v_proj" else Form.ROTARY
        of = f"{source}self_attn.{name}."
        pieces.append(Piece(of + "weight", (stop - start, hidden), target + "qkv", start, stop, form))
        if config.qkv_bias:
            pieces.append(Piece(of + "bias", (stop - start,), target + "qkv_bias", start, stop, form))
    pieces.append(Piece(source + "self_attn.o_proj.weight", (hidden, q), target + "output", 0, hidden))
    if config.output_bias:
        pieces.append(Piece(source + "self_attn.o_proj.bias", (hidden,), target + "output_bias", 0, hidden))
    if config.qk_norm:
        rows = {"q_norm": (0, config.heads), "k_norm": (config.heads, config.heads + config.kv_heads)}
        for name, (start, stop) in rows.items():
            of = f"{source}self_attn.{name}.weight"
            pieces.append(Piece(of, (dim,), target + "qk_norm", start, stop, Form.ROTARY_EACH))
    return pieces


def _mlp(config: ModelConfig, source: str, target: str) -> list[Piece]:
    hidden, inner = config.hidden_size, config.intermediate_size
    pieces = [
        Piece(source + "post_attention_layernorm.weight", (hidden,), target + "post_norm", 0, hidden),
        Piece(source + "mlp.gate_proj.weight", (inner, hidden), target + "gate_up", 0, inner),
        Piece(source + "mlp.up_proj.weight", (inner, hidden), target + "gate_up", inner, 2 * inner),
        Piece(source + "mlp.down_proj.weight", (hidden, inner), target + "down", 0, hidden),
    ]
    if config.mlp_bias:
        pieces += [
            Piece(source + "mlp.gate_proj.bias", (inner,), target + "gate_up_bias", 0, inner),
            Piece(source + "mlp.up_proj.bias", (inner,), target + "gate_up_bias", inner, 2 * inner),
            Piece(source + "mlp.down_proj.bias", (hidden,), target + "down_bias", 0, hidden),
        ]
    return pieces


def check(pieces: Sequence[Piece], checkpoint: Checkpoint, *, tied: bool) -> None:
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
