"""Bytes on each GPU of a trainer and of an inference engine: the most that is in memory at one time, with rows of full
length. docs/estimate.md derives the formulas."""

from __future__ import annotations

from areal.dataclasses import dataclass
from areal.estimate.shapes import Shape
from areal.resources.backend import Part

GIB = 1 << 30
RESERVE = int(1.5 * GIB)  # of a trainer: CUDA's context, communicators and workspaces
ENGINE_RESERVE = int(2.5 * GIB)  # of an engine: also CUDA graphs and the activations of a prefill
CPU_RESERVE = GIB // 2  # of a process without a GPU
FRACTIONS = {"sglang": 0.85, "vllm": 0.9, "embedded": 0.9}  # the engines' default shares of a GPU's memory
_PARTS = 16  # logits are computed for one of these parts of a micro-batch at a time (areal.training.engines.head)
_LEAST_LOGITS, _MOST_LOGITS = 1 << 20, 1 << 26
_HYBRID = 3  # shards stay on a node if they take at most a third of its memory


@dataclass(frozen=True)
class Trained:
    """One model of a trainer. ``compute``, ``master``: bytes of a value during a pass, and as it is stored. ``reduce``:
    bytes of a gradient summed over micro-batches. ``trained``: parameters with gradients, 0 for a reference.
    ``micro_tokens``: tokens of a micro-batch on one rank. ``epochs``: passes over the rows of a step."""

    role: str
    shape: Shape
    part: Part
    is_critic: bool = False
    compute: int = 2
    master: int = 4
    reduce: int = 4
    trained: int = 0
    moments: int = 2
    checkpointing: bool = False
    micro_tokens: int = 0
    micro_batches: int = 1
    nodes: int = 1
    epochs: int = 1

    @property
    def parameters(self) -> int:
        return self.shape.critic_parameters if self.is_critic else self.shape.parameters


@dataclass(frozen=True)
class Use:
    """Bytes of one model on each GPU. ``gathered``: weights and gradients that are temporarily whole. ``loading``:
    bytes while the model is loaded, in place of all others."""

    role: str
    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    gathered: int = 0
    activations: int = 0
    kv_cache: int = 0
    loading: int = 0

    @property
    def kept(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.kv_cache

    @property
    def passing(self) -> int:
        return self.gathered + self.activations


def peak(uses: list[Use], reserve: int = RESERVE) -> int:
    """Return the bytes of a process whose models are loaded one after the other, and then run one at a time."""
    kept = loading = 0
    for each in uses:
        loading = max(loading, kept + each.loading)
        kept += each.kept
    return max(kept + max((each.passing for each in uses), default=0), loading) + reserve


def training_use(model: Trained, memory: int) -> Use:
    """Return the use of a trained model on GPUs with ``memory`` bytes each."""
    if model.part.engine == "megatron":
        return _megatron(model)
    part, all_of_it, trained = model.part, model.parameters, model.trained
    shards = _shards(model, memory)
    alone = part.world_size == 1
    if alone:  # autocast keeps a copy of the weights until the end of the backward pass
        gathered = model.compute * all_of_it if model.compute < model.master else 0
    else:  # during a pass the embeddings are whole, and so are two layers: the one that runs and the next
        shape = model.shape
        heads = shape.embeddings * (1 if shape.tied or model.is_critic else 2)
        gathered = model.compute * (heads + 2 * shape.body // shape.layers) // part.tensor
        if model.micro_batches > 1:
            gathered += model.reduce * trained // part.tensor
    return Use(
        model.role,
        weights=model.master * all_of_it // shards,
        gradients=model.master * trained // shards,
        optimizer=model.master * model.moments * trained // shards,
        gathered=gathered,
        activations=_activations(model, mixed=alone and model.compute < model.master),
        loading=model.master * all_of_it,
    )


def _shards(model: Trained, memory: int) -> int:
    """Return how many ranks share one copy of the weights, by the rule of FSDP's ``copies_of_shards``."""
    within, rest = divmod(model.part.data, model.nodes)
    state = model.parameters * (16 if model.trained else 4)
    local = not rest and state // model.part.tensor <= within * memory // _HYBRID
    return model.part.tensor * (within if local else model.part.data)


def layer_bytes(shape: Shape, compute: int, *, mixed: bool = False) -> int:
    """Return the bytes that a layer keeps of a token for the backward pass. Two norms: their input in float32, the
    normalized input and the output. Attention (flash or sdpa): queries, keys, values, two copies of the output, and a
    float32 number for each head. A gated MLP: gate, activation, up, product. ``mixed``: with autocast, norms are
    computed in float32, and each matrix keeps a copy of its input."""
    width = shape.width
    if shape.experts is not None:
        width = shape.experts.chosen * shape.experts.width + shape.experts.shared
    hidden = 2 * 8 + 5 * compute if mixed else 2 * (4 + 2 * compute)
    attention = compute * (3 * shape.query_width + 2 * shape.kv_width) + 4 * shape.heads
    if shape.family.query_norm:
        attention += (4 + compute) * (shape.query_width + shape.kv_width)
    return hidden * shape.hidden + attention + 4 * compute * width


def _activations(model: Trained, *, mixed: bool = False) -> int:
    """Return the bytes of activations of a pass. With checkpointing each layer keeps only its input, and one is
    recomputed as a whole. With autocast, values between layers are float32."""
    shape, tokens = model.shape, model.micro_tokens
    layer, residual = layer_bytes(shape, model.compute, mixed=mixed), 4 if mixed else model.compute
    if not model.trained:
        kept = layer + residual * shape.hidden
    elif model.checkpointing:
        kept = shape.layers * residual * shape.hidden + layer
    else:
        kept = shape.layers * layer
    return (tokens * kept + (0 if model.is_critic else _logits(model))) // (model.part.tensor * model.part.context)


def _logits(model: Trained) -> int:
    """Return the bytes of a part's logits: twice in float32, and the gradients of logits and head."""
    shape = model.shape
    rows = max(-(-model.micro_tokens // _PARTS), _LEAST_LOGITS // shape.vocabulary)
    rows = max(1, min(rows, _MOST_LOGITS // shape.vocabulary))
    head = 4 * shape.embeddings if model.trained else 0
    return (8 + model.compute) * rows * shape.vocabulary + 2 * model.compute * model.micro_tokens * shape.hidden + head


def _megatron(model: Trained) -> Use:
    """Return the use of a model with Megatron. Each rank has the weights and summed gradients of its stage. The
    data-parallel ranks share the optimizer state: two moments, and master weights unless the weights are float32."""
    part, shape = model.part, model.shape
    ends = shape.embeddings * (1 if shape.tied or part.pipeline > 1 else 2)
    own = (shape.body - shape.expert_parameters) // (part.tensor * part.pipeline) + ends // part.tensor
    own += shape.expert_parameters // (part.expert * part.expert_tensor * part.pipeline)
    master = 4 if model.compute < 4 else 0
    return Use(
        model.role,
        weights=model.compute * own,
        gradients=model.reduce * own if model.trained else 0,
        optimizer=(master + 4 * model.moments) * own // part.data if model.trained else 0,
        activations=_activations(model),
        loading=model.compute * own,
    )


@dataclass(frozen=True)
class Served:
    """An inference engine. ``fraction``: the share of a GPU's memory that it takes. ``sequence``: tokens of the longest
    sequence. ``most``: the number of sequences that bounds its cache, 0 for none. ``cache``: the cache's bytes if a
    flag sets them, else 0; a quarter of them is for prefixes."""

    shape: Shape
    part: Part
    fraction: float
    sequence: int
    compute: int = 2
    most: int = 0
    cache: int = 0
    reserve: int = ENGINE_RESERVE

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's keys and values on each GPU. A head is not divided."""
        heads = -(-self.shape.kv_heads // self.part.tensor)
        return 2 * self.compute * heads * self.shape.head_dim * -(-self.shape.layers // self.part.pipeline)


def serving_use(served: Served, memory: int) -> Use:
    """Return the use of an engine. Its cache is what the weights leave of its share of the memory, and may be empty."""
    weights = served.compute * served.shape.parameters // (served.part.tensor * served.part.pipeline)
    left = max(0, int(served.fraction * memory) - weights - served.reserve)
    most = served.most * served.sequence * served.token_bytes
    return Use("rollout", weights=weights, kv_cache=min(left, most or left, served.cache or left))


def sequences(served: Served, memory: int) -> int:
    """Return the number of sequences of full length that the cache of a replica holds."""
    room = serving_use(served, memory).kv_cache
    if served.cache:
        room = min(room, served.cache - served.cache // 4)
    return room // (served.token_bytes * served.sequence)
