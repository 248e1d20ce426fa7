"""The shape of a decoder-only transformer, from the ``config.json`` of its folder, and its number of parameters."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any, Literal, NamedTuple

from areal.dataclasses import dataclass
from areal.errors import UsageFault


class Family(NamedTuple):
    """What the ``config.json`` of a model type does not say. ``qkv_bias``, ``out_bias``: None if ``attention_bias``
    decides. ``query_norm``: whether queries and keys are normalized, each head or all together."""

    qkv_bias: bool | None = None
    out_bias: bool | None = None
    query_norm: Literal["", "head", "all"] = ""
    norms: int = 2  # norms of the hidden state in a layer
    tied: bool = False  # the default of tie_word_embeddings


_PLAIN = Family(qkv_bias=False, out_bias=False)
FAMILIES: Mapping[str, Family] = {
    "llama": Family(),
    "mistral": _PLAIN,
    "mixtral": _PLAIN,
    "phi3": _PLAIN,
    "qwen2": Family(qkv_bias=True, out_bias=False),
    "qwen2_moe": Family(qkv_bias=True, out_bias=False),
    "qwen3": Family(query_norm="head"),
    "qwen3_moe": Family(query_norm="head"),
    "olmo2": Family(query_norm="all"),
    "gemma": Family(tied=True),
    "gemma2": Family(norms=4, tied=True),
    "gemma3_text": Family(query_norm="head", norms=4, tied=True),
}
_MOST, _MOST_LAYERS = 1 << 31, 1 << 16  # larger sizes are refused
_LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Experts:
    """The experts of a layer. ``layers``: the number of layers that have them. ``shared``: the width of the expert that
    every token passes, 0 for none."""

    count: int
    chosen: int
    width: int
    layers: int
    shared: int = 0


@dataclass(frozen=True)
class Shape:
    """The sizes of a model. ``width``: the size of the MLP in layers without experts."""

    family: Family
    vocabulary: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    width: int
    tied: bool
    attention_bias: bool = False
    mlp_bias: bool = False
    experts: Experts | None = None

    @property
    def query_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim

    @cached_property
    def attention(self) -> int:
        """Return the number of parameters of a layer's attention."""
        qkv_bias = self.attention_bias if self.family.qkv_bias is None else self.family.qkv_bias
        out_bias = self.attention_bias if self.family.out_bias is None else self.family.out_bias
        outputs = self.query_width + 2 * self.kv_width
        matrices = self.hidden * outputs + self.query_width * self.hidden
        norm = {"": 0, "head": 2 * self.head_dim, "all": self.query_width + self.kv_width}[self.family.query_norm]
        return matrices + outputs * qkv_bias + self.hidden * out_bias + norm

    def mlp(self, width: int) -> int:
        """Return the number of parameters of a gated MLP."""
        return 3 * self.hidden * width + (2 * width + self.hidden) * self.mlp_bias

    @property
    def embeddings(self) -> int:
        return self.vocabulary * self.hidden

    @cached_property
    def body(self) -> int:
        """Return the number of parameters of the layers and the last norm."""
        return self._layers(lambda experts: experts.count) + self.hidden

    @property
    def parameters(self) -> int:
        return self.body + self.embeddings * (1 if self.tied else 2)

    @property
    def critic_parameters(self) -> int:
        """Parameters with a head of one value (and its bias) in place of the vocabulary's."""
        return self.body + self.embeddings + self.hidden + 1

    @cached_property
    def active(self) -> int:
        """Parameters that multiply a token: those of its chosen experts and of the head, without the embeddings."""
        return self._layers(lambda experts: experts.chosen) + self.embeddings

    @property
    def expert_parameters(self) -> int:
        """Parameters of all experts that a token can be routed to."""
        return 0 if self.experts is None else self.experts.layers * self.experts.count * self.mlp(self.experts.width)

    def adapters(self, rank: int, targets: tuple[str, ...]) -> int:
        """Return the parameters of LoRA adapters of ``rank``. Raises UsageFault for other than linear layers."""
        sizes = {
            "q_proj": self.hidden + self.query_width,
            "k_proj": self.hidden + self.kv_width,
            "v_proj": self.hidden + self.kv_width,
            "o_proj": self.query_width + self.hidden,
            **dict.fromkeys(("gate_proj", "up_proj", "down_proj"), self.hidden + self.width),
        }
        named = _LORA_TARGETS if targets in ((), ("all-linear",)) else targets
        if self.experts is not None or (unknown := [each for each in named if each not in sizes]):
            what = "experts" if self.experts is not None else ", ".join(unknown)
            raise UsageFault(f"adapters of {what} are not estimated", hint=f"target_modules of {', '.join(sizes)}")
        return self.layers * rank * sum(sizes[each] for each in named)

    def _layers(self, experts_of: Any) -> int:
        each = self.attention + self.family.norms * self.hidden
        if self.experts is None:
            return self.layers * (each + self.mlp(self.width))
        experts, dense = self.experts, self.layers - self.experts.layers
        routed = self.hidden * experts.count + experts_of(experts) * self.mlp(experts.width)
        if experts.shared:
            routed += self.mlp(experts.shared) + self.hidden
        return self.layers * each + dense * self.mlp(self.width) + experts.layers * routed


def shape_of(config: Mapping[str, object], where: str) -> Shape:
    """Return the shape that the content of a ``config.json`` describes; ``where`` names the file in errors. Raises
    UsageFault for an unknown model type, and for a missing size."""
    kind = str(config.get("model_type", ""))
    if kind not in FAMILIES:
        raise UsageFault(
            f"{where}: the parameters of model_type {kind!r} cannot be counted", hint=f"known: {', '.join(FAMILIES)}"
        )
    family = FAMILIES[kind]

    def size(name: str, default: int | None = None) -> int:
        value = config.get(name)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise UsageFault(f"{where}: {name} must be a positive number, and is {value!r}")
        if value > (most := _MOST_LAYERS if name == "num_hidden_layers" else _MOST):
            raise UsageFault(f"{where}: {name} must be at most {most}")
        return value

    hidden, heads, layers = size("hidden_size"), size("num_attention_heads"), size("num_hidden_layers")
    tied = config.get("tie_word_embeddings")
    if not isinstance(config.get("mlp_only_layers") or [], list):
        raise UsageFault(f"{where}: mlp_only_layers must be a list of layers")
    experts = _experts(config, kind, layers, size)
    if experts is not None and experts.chosen > experts.count:
        raise UsageFault(f"{where}: a token cannot have {experts.chosen} of {experts.count} experts")
    return Shape(
        family=family,
        vocabulary=size("vocab_size"),
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=size("num_key_value_heads", heads),
        head_dim=size("head_dim", 128 if kind == "qwen3_moe" else hidden // heads),
        width=size("intermediate_size"),
        tied=family.tied if tied is None else bool(tied),
        attention_bias=bool(config.get("attention_bias")),
        mlp_bias=bool(config.get("mlp_bias")) and kind == "llama",
        experts=experts,
    )


def _experts(config: Mapping[str, Any], kind: str, layers: int, size: Any) -> Experts | None:
    if kind == "mixtral":
        return Experts(size("num_local_experts"), size("num_experts_per_tok"), size("intermediate_size"), layers)
    if not kind.endswith("_moe"):
        return None
    dense, step = config.get("mlp_only_layers") or [], size("decoder_sparse_step", 1)
    sparse = sum(layer not in dense and (layer + 1) % step == 0 for layer in range(layers))
    shared = size("shared_expert_intermediate_size") if kind == "qwen2_moe" else 0
    count = size("num_experts", config.get("num_local_experts"))  # transformers 5 writes the second name
    return Experts(count, size("num_experts_per_tok"), size("moe_intermediate_size"), sparse, shared)
