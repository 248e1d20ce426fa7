"""Conversion of weights between Hugging Face's and Megatron's names, layouts and shards. Pure functions over tensors.

Megatron's names are those of the whole model: layers are counted over all pipeline stages, experts over all expert
ranks. ``join`` and ``split`` convert a whole weight, ``shard`` and ``unshard`` divide it over tensor-parallel ranks.
Two layouts are not plain concatenations:

- ``linear_qkv`` has, for each group of heads that share a key, the group's queries, its key and its value;
- every shard of ``linear_fc1`` has its part of gate, then its part of up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from areal.dataclasses import dataclass
from areal.errors import UsageFault

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe")
"""The supported values of ``model_type``."""
Join = Literal["one", "qkv", "gate_up"]


@dataclass(frozen=True)
class Architecture:
    """The shape of a decoder. ``sparse``: for each layer whether it has experts instead of one MLP. ``rope``: the
    ``rope_parameters`` of ``transformers``. ``dropout``: that of the attention."""

    layers: int
    hidden: int
    heads: int
    groups: int
    head_size: int
    feed_forward: int
    vocabulary: int
    epsilon: float
    rope: Mapping[str, object]
    tied: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    dropout: float = 0.0
    sparse: tuple[bool, ...] = ()
    experts: int = 0
    experts_a_token: int = 0
    expert_feed_forward: int = 0
    normalize_experts: bool = True

    @property
    def is_sparse(self) -> bool:
        return any(self.sparse)


def architecture(about: Any) -> Architecture:
    """Return the shape from a configuration of ``transformers``. Raises UsageFault for features that Megatron computes
    differently."""
    kind = about.model_type
    if kind not in FAMILIES:
        raise UsageFault(
            f"the megatron engine has no {kind} models: it has {', '.join(FAMILIES)}", hint="backend=fsdp:d1 has all"
        )
    if getattr(about, "quantization_config", None):
        raise UsageFault(
            "the megatron engine has no models with quantized weights (quantization_config of config.json)",
            hint="path of the model before it was quantized",
        )
    rope = dict(about.rope_parameters)
    layer_types = set(getattr(about, "layer_types", None) or ["full_attention"])
    odd = {
        f"rope of type {rope.get('rope_type')}": rope.get("rope_type", "default") not in ("default", "llama3"),
        "rope of a part of each head": rope.get("partial_rotary_factor", 1.0) != 1.0,
        "attention in windows": layer_types != {"full_attention"} or bool(getattr(about, "use_sliding_window", False)),
        "biases of the attention's output": bool(getattr(about, "attention_bias", False)) and kind != "qwen2",
        "biases of the MLP": bool(getattr(about, "mlp_bias", False)),
        f"the activation {about.hidden_act}": about.hidden_act not in ("silu", "swish"),
    }
    if found := next((name for name, is_odd in odd.items() if is_odd), None):
        raise UsageFault(f"the megatron engine has no {kind} model with {found}", hint="backend=fsdp:d1 has")
    sparse: tuple[bool, ...] = ()
    if kind == "qwen3_moe":
        step, dense = about.decoder_sparse_step, set(about.mlp_only_layers or ())
        sparse = tuple((n + 1) % step == 0 and n not in dense for n in range(about.num_hidden_layers))
    has_experts = any(sparse)
    if has_experts and about.num_experts_per_tok == 1 and about.norm_topk_prob:
        why = "one expert for each token and norm_topk_prob: its weight is 1, and the router learns nothing"
        raise UsageFault(f"the megatron engine has no {kind} model with {why}", hint="backend=fsdp:d1 has")
    return Architecture(
        layers=about.num_hidden_layers,
        hidden=about.hidden_size,
        heads=about.num_attention_heads,
        groups=about.num_key_value_heads,
        head_size=getattr(about, "head_dim", None) or about.hidden_size // about.num_attention_heads,
        feed_forward=about.intermediate_size,
        vocabulary=about.vocab_size,
        epsilon=about.rms_norm_eps,
        rope=rope,
        tied=bool(about.tie_word_embeddings),
        qkv_bias=kind == "qwen2",
        qk_norm=kind in ("qwen3", "qwen3_moe"),
        dropout=about.attention_dropout,
        sparse=sparse,
        experts=about.num_experts if has_experts else 0,
        experts_a_token=about.num_experts_per_tok if has_experts else 0,
        expert_feed_forward=about.moe_intermediate_size if has_experts else 0,
        normalize_experts=bool(about.norm_topk_prob) if has_experts else True,
    )


@dataclass(frozen=True)
class Weight:
    """``name``: Megatron's; ``hf_names``: Hugging Face's, of its parts. ``shape``: of the whole, in Megatron's layout.
    ``shard_dim``: the dimension that is divided over tensor-parallel ranks; None: replicated. ``groups``,
    ``head_size``: of ``qkv``. ``padded``: rows are padded to a multiple of the ranks. ``is_tied``: a copy of another
    weight, which is not saved."""

    name: str
    hf_names: tuple[str, ...]
    shape: tuple[int, ...]
    shard_dim: int | None = None
    kind: Join = "one"
    groups: int = 0
    head_size: int = 0
    padded: bool = False
    is_tied: bool = False
    layer: int | None = None
    expert: int | None = None


def weights(model: Architecture) -> list[Weight]:
    """Return all weights, in the order of the layers."""
    vocabulary, hidden = model.vocabulary, model.hidden
    embedding = "model.embed_tokens.weight"
    found = [Weight("embedding.word_embeddings.weight", (embedding,), (vocabulary, hidden), 0, padded=True)]
    for layer in range(model.layers):
        found += _layer(model, layer)
    found.append(Weight("decoder.final_layernorm.weight", ("model.norm.weight",), (hidden,)))
    head = embedding if model.tied else "lm_head.weight"
    found.append(Weight("output_layer.weight", (head,), (vocabulary, hidden), 0, padded=True, is_tied=model.tied))
    return found


def _layer(model: Architecture, layer: int) -> list[Weight]:
    prefix, hf_prefix = f"decoder.layers.{layer}.", f"model.layers.{layer}."
    hidden, queries = model.hidden, model.heads * model.head_size
    rows = queries + 2 * model.groups * model.head_size
    parts = [f"{hf_prefix}self_attn.{name}_proj" for name in "qkv"]

    def qkv(kind: str, *width: int) -> Weight:
        names = tuple(f"{part}.{kind}" for part in parts)
        name = f"{prefix}self_attention.linear_qkv.{kind}"
        return Weight(name, names, (rows, *width), 0, "qkv", model.groups, model.head_size, layer=layer)

    def one(name: str, hf_name: str, *shape: int, shard_dim: int | None = None) -> Weight:
        return Weight(f"{prefix}{name}.weight", (f"{hf_prefix}{hf_name}.weight",), shape, shard_dim, layer=layer)

    found = [one("input_layernorm", "input_layernorm", hidden), qkv("weight", hidden)]
    found += [qkv("bias")] if model.qkv_bias else []
    if model.qk_norm:
        found += [one(f"self_attention.{x}_layernorm", f"self_attn.{x}_norm", model.head_size) for x in "qk"]
    found.append(one("self_attention.linear_proj", "self_attn.o_proj", hidden, queries, shard_dim=1))
    found.append(one("pre_mlp_layernorm", "post_attention_layernorm", hidden))
    if not (model.sparse and model.sparse[layer]):
        return [*found, *_mlp(f"{prefix}mlp.", f"{hf_prefix}mlp.", hidden, model.feed_forward, layer)]
    found.append(one("mlp.router", "mlp.gate", model.experts, hidden))
    for expert in range(model.experts):
        names = f"{prefix}mlp.experts.local_experts.{expert}.", f"{hf_prefix}mlp.experts.{expert}."
        found += _mlp(*names, hidden, model.expert_feed_forward, layer, expert)
    return found


def _mlp(prefix: str, hf_prefix: str, hidden: int, width: int, layer: int, expert: int | None = None) -> list[Weight]:
    first = (f"{hf_prefix}gate_proj.weight", f"{hf_prefix}up_proj.weight")
    second = (f"{hf_prefix}down_proj.weight",)
    return [
        Weight(f"{prefix}linear_fc1.weight", first, (2 * width, hidden), 0, "gate_up", layer=layer, expert=expert),
        Weight(f"{prefix}linear_fc2.weight", second, (hidden, width), 1, layer=layer, expert=expert),
    ]


def join(weight: Weight, parts: Sequence[Tensor]) -> Tensor:
    """Return Megatron's weight, joined from Hugging Face's ``parts``. Raises UsageFault for other shapes."""
    whole, keys = torch.cat(list(parts)) if len(parts) > 1 else parts[0], weight.groups * weight.head_size
    fits = weight.kind != "qkv" or len(parts[1]) == len(parts[2]) == keys
    if tuple(whole.shape) != weight.shape or not fits:
        found = ", ".join(f"{name} {list(part.shape)}" for name, part in zip(weight.hf_names, parts, strict=True))
        raise UsageFault(
            f"the weights do not fit config.json: it needs {list(weight.shape)}, and the folder has {found}"
        )
    if weight.kind != "qkv":
        return whole
    grouped = [part.reshape(weight.groups, -1, *part.shape[1:]) for part in parts]
    return torch.cat(grouped, 1).flatten(0, 1)


def split(weight: Weight, whole: Tensor) -> list[Tensor]:
    """Return the inverse of ``join``."""
    if weight.kind == "gate_up":
        return list(whole.chunk(2))
    if weight.kind == "one":
        return [whole]
    grouped = whole.reshape(weight.groups, -1, *whole.shape[1:])
    size = weight.head_size
    parts = torch.split(grouped, [grouped.shape[1] - 2 * size, size, size], 1)
    return [part.flatten(0, 1) for part in parts]


def shard(weight: Weight, whole: Tensor, rank: int, size: int) -> Tensor:
    """Return the shard of rank ``rank`` of ``size``."""
    if weight.shard_dim is None or size == 1:
        return whole
    if weight.kind == "gate_up":
        return _pair(whole).chunk(size, 1)[rank].flatten(0, 1)
    if weight.padded:
        whole = torch.nn.functional.pad(whole, (0, 0, 0, -len(whole) % size))
    return whole.chunk(size, weight.shard_dim)[rank]


def unshard(weight: Weight, shards: Sequence[Tensor]) -> Tensor:
    """Return the inverse of ``shard``, from the shards of all ranks in rank order."""
    if weight.shard_dim is None or len(shards) == 1:
        whole = shards[0]
    elif weight.kind == "gate_up":
        whole = torch.cat([_pair(each) for each in shards], 1).flatten(0, 1)
    else:
        whole = torch.cat(list(shards), weight.shard_dim)
    return whole[: weight.shape[0]] if weight.padded else whole


def _pair(rows: Tensor) -> Tensor:
    """Gate and up apart: [2, n, ...]."""
    return rows.reshape(2, -1, *rows.shape[1:])
