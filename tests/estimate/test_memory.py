"""Bytes: activations as torch saves them for the backward pass, and the cases at the edges of the formulas."""

from __future__ import annotations

from typing import Any

import pytest

from areal.dataclasses import replace
from areal.estimate.memory import (
    GIB,
    RESERVE,
    Served,
    Trained,
    layer_bytes,
    peak,
    sequences,
    serving_use,
    training_use,
)
from areal.estimate.shapes import Shape, shape_of
from areal.resources.backend import Part

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

QWEN = {"model_type": "qwen2", "vocab_size": 151936, "hidden_size": 1536, "intermediate_size": 8960}
QWEN |= {"num_hidden_layers": 28, "num_attention_heads": 12, "num_key_value_heads": 2, "tie_word_embeddings": True}
SHAPE = shape_of(QWEN, "config.json")
N = SHAPE.parameters
H100 = 80 * GIB


def trained(part: Part, **given: Any) -> Trained:
    return Trained("actor", SHAPE, part, **{"trained": N, "micro_tokens": 1024, **given})


def saved_bytes(kind: str, layers: int, tokens: int, mode: str) -> tuple[int, Shape]:
    """What torch keeps for the backward pass, without the weights and autocast's copies of them."""
    config = transformers.AutoConfig.for_model(
        kind,
        vocab_size=64,
        hidden_size=128,
        intermediate_size=344,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=0,
    )
    dtype = torch.bfloat16 if mode == "bfloat16" else torch.float32
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).train()
    sizes = {tuple(sorted(each.shape)) for each in model.parameters()}
    found: dict[int, Any] = {}

    def keep(tensor: Any) -> Any:
        if tuple(sorted(tensor.shape)) not in sizes:
            found[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=mode == "autocast"):
            model(input_ids=torch.zeros(1, tokens, dtype=torch.long), use_cache=False)
    return sum(each.untyped_storage().nbytes() for each in found.values()), shape_of(config.to_dict(), kind)


@pytest.mark.parametrize("mode", ["float32", "bfloat16", "autocast"])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_estimated_layer_bytes_match_torch(kind: str, mode: str) -> None:
    tokens = 96
    (more, shape), (less, _) = (saved_bytes(kind, layers, tokens, mode) for layers in (2, 1))
    measured = (more - less) / tokens
    estimated = layer_bytes(shape, 4 if mode == "float32" else 2, mixed=mode == "autocast")
    # Rows that are packed have the output of attention twice, and these are not packed.
    estimated -= (4 if mode == "float32" else 2) * shape.query_width
    assert measured == pytest.approx(estimated, rel=0.02)


def test_one_rank_states_are_sixteen_bytes_per_parameter() -> None:
    use = training_use(trained(Part("fsdp")), H100)
    assert use.weights + use.gradients + use.optimizer == 16 * N
    assert use.gathered == 2 * N and use.loading == 4 * N


def test_states_are_sharded_over_all_ranks_but_loading_is_not() -> None:
    one, four = (training_use(trained(Part("fsdp", data=ranks)), H100) for ranks in (1, 4))
    assert (four.weights, four.optimizer, four.loading) == (one.weights // 4, one.optimizer // 4, one.loading)
    assert training_use(trained(Part("fsdp", data=2, tensor=2)), H100).weights == four.weights


def test_accumulated_gradients_are_whole_on_each_rank() -> None:
    once, often = (training_use(trained(Part("fsdp", data=4), micro_batches=count), H100) for count in (1, 2))
    assert often.gathered - once.gathered == 4 * N


def test_shards_stay_on_node_within_a_third_of_memory() -> None:
    small = training_use(trained(Part("fsdp", data=16), nodes=2), H100)
    assert small.weights == 4 * N // 8
    large = training_use(trained(Part("fsdp", data=16), nodes=2), 4 * GIB)
    assert large.weights == 4 * N // 16


def test_checkpointing_keeps_one_layer_and_layer_inputs() -> None:
    whole, less = (training_use(trained(Part("fsdp", data=2), checkpointing=each), H100) for each in (False, True))
    assert whole.activations - less.activations == 1024 * (27 * layer_bytes(SHAPE, 2) - 28 * 2 * SHAPE.hidden)


def test_reference_keeps_only_weights() -> None:
    use = training_use(replace(trained(Part("fsdp", data=2)), trained=0, role="ref"), H100)
    assert use.weights == 2 * N and use.gradients == use.optimizer == 0


def test_only_adapters_have_gradients_and_moments() -> None:
    adapters = SHAPE.adapters(8, ())
    use = training_use(trained(Part("fsdp"), trained=adapters), H100)
    assert (use.weights, use.gradients, use.optimizer) == (4 * N, 4 * adapters, 8 * adapters)


def test_megatron_shards_optimizer_over_data_ranks() -> None:
    use = training_use(trained(Part("megatron", data=4)), H100)
    assert (use.weights, use.gradients, use.optimizer) == (2 * N, 4 * N, 12 * N // 4)


def test_peak_is_loading_when_shards_are_small() -> None:
    uses = [training_use(trained(Part("fsdp", data=64), checkpointing=True, micro_tokens=1), H100)]
    assert peak(uses) == 4 * N + RESERVE
    two = [*uses, replace(uses[0], role="critic")]
    assert peak(two) == uses[0].kept + 4 * N + RESERVE


# A model without tied embeddings, and one with experts in every second layer.
LLAMA = shape_of(QWEN | {"model_type": "llama", "tie_word_embeddings": False}, "config.json")
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 512, "decoder_sparse_step": 2}
EXPERTS = shape_of(QWEN | {"model_type": "qwen3_moe", **_EXPERTS}, "config.json")


@pytest.mark.parametrize("shape", [SHAPE, LLAMA], ids=["tied", "untied"])
@pytest.mark.parametrize("critic", [False, True])
@pytest.mark.parametrize("tensor", [1, 2])
def test_gathered_are_the_embeddings_and_two_layers(shape: Shape, critic: bool, tensor: int) -> None:
    """``c(2Vh + 2P_layer)/t`` of docs/estimate.md; tied embeddings and a critic have one matrix."""
    part = Part("fsdp", data=2, tensor=tensor)
    use = training_use(Trained("actor", shape, part, is_critic=critic, trained=1, micro_tokens=8), H100)
    matrices = 1 if critic or shape.tied else 2
    layer = (shape.parameters - (1 if shape.tied else 2) * shape.embeddings) / shape.layers
    assert use.gathered == pytest.approx(2 * (matrices * shape.embeddings + 2 * layer) / tensor, rel=1e-6)


def test_one_rank_without_autocast_has_no_copies_of_weights() -> None:
    assert training_use(trained(Part("fsdp"), compute=4), H100).gathered == 0
    assert training_use(trained(Part("fsdp"), compute=2, master=2), H100).gathered == 0


@pytest.mark.parametrize("tokens", [16, 1024, 16384])
@pytest.mark.parametrize("part", [Part("fsdp", data=2), Part("fsdp", data=2, tensor=2), Part("megatron", context=4)])
@pytest.mark.parametrize("compute", [2, 4])
def test_activations_are_layers_and_a_part_of_the_logits(tokens: int, part: Part, compute: int) -> None:
    """The rows "activations of a layer", "all layers" and "logits" of docs/estimate.md, letter by letter."""
    s, c, h, q, k, a, f, v, layers = tokens, compute, 1536, 1536, 256, 12, 8960, 151936, 28
    layer = 2 * (4 + 2 * c) * h + c * (3 * q + 2 * k) + 4 * a + 4 * c * f
    rows = {16: 2**20 // v, 1024: 1024 // 16, 16384: 2**26 // v}[tokens]  # at least 2^20 logits, at most 2^26
    logits = (8 + c) * rows * v + 2 * c * s * h
    ranks = part.tensor * part.context
    given = trained(part, compute=compute, micro_tokens=tokens)
    whole = training_use(given, H100).activations
    assert whole == (s * layers * layer + logits + 4 * v * h) // ranks
    less = training_use(replace(given, checkpointing=True), H100).activations
    assert less == (s * (layers * c * h + layer) + logits + 4 * v * h) // ranks
    reference = training_use(replace(given, trained=0), H100).activations
    assert reference == (s * (layer + c * h) + logits) // ranks
    critic = training_use(replace(given, is_critic=True), H100).activations
    assert critic == s * layers * layer // ranks


def test_layer_of_experts_keeps_those_that_a_token_passes() -> None:
    dense = shape_of(QWEN | {"model_type": "qwen3_moe", "intermediate_size": 2 * 512, **_EXPERTS}, "config.json")
    shared = shape_of(
        QWEN | {"model_type": "qwen2_moe", "shared_expert_intermediate_size": 700, **_EXPERTS}, "config.json"
    )
    plain = shape_of(QWEN | {"intermediate_size": 2 * 512 + 700}, "config.json")
    assert layer_bytes(EXPERTS, 2) == layer_bytes(replace(dense, experts=None), 2)
    assert layer_bytes(shared, 2) == layer_bytes(plain, 2)


def test_autocast_keeps_values_between_layers_in_float32() -> None:
    one, two = (trained(Part("fsdp", data=ranks), checkpointing=True) for ranks in (1, 2))
    mixed, plain = (training_use(each, H100).activations for each in (one, two))
    layers = layer_bytes(SHAPE, 2, mixed=True) - layer_bytes(SHAPE, 2)
    assert mixed - plain == 1024 * (layers + 28 * 2 * SHAPE.hidden)


def test_shards_of_a_reference_count_as_its_weights() -> None:
    """FSDP keeps the shards on a node if the model's state takes at most a third of it: 16 bytes a parameter, 4 without
    gradients."""
    part = Part("fsdp", data=4)
    for trains, state in ((N, 16 * N), (0, 4 * N)):
        model = trained(part, nodes=2, trained=trains)
        fits = 3 * -(-state // 2)  # on two ranks of a node
        assert training_use(model, fits).weights == 4 * N // 2
        assert training_use(model, fits - 3).weights == 4 * N // 4
    assert training_use(trained(Part("fsdp", data=3), nodes=2), H100).weights == 4 * N // 3, "nodes are not equal"


def test_megatron_divides_layers_over_stages_and_experts_over_their_ranks() -> None:
    ends = LLAMA.embeddings
    whole = training_use(replace(trained(Part("megatron")), shape=LLAMA), H100)
    assert (whole.weights, whole.loading) == (2 * LLAMA.parameters, 2 * LLAMA.parameters)
    split = training_use(replace(trained(Part("megatron", tensor=2, pipeline=4)), shape=LLAMA), H100)
    assert split.weights == 2 * (LLAMA.body // 8 + ends // 2), "the first and the last stage have one matrix"
    assert training_use(replace(trained(Part("megatron", tensor=2)), shape=SHAPE), H100).weights == pytest.approx(N)
    part = Part("megatron", data=2, tensor=2, pipeline=2, expert=2, ffn_tensor=1)
    mixed = training_use(replace(trained(part), shape=EXPERTS), H100)
    others = EXPERTS.body - EXPERTS.expert_parameters
    assert mixed.weights == 2 * (others // 4 + EXPERTS.embeddings // 2 + EXPERTS.expert_parameters // 4)


def test_megatron_keeps_master_weights_unless_weights_are_float32() -> None:
    half, single = (training_use(trained(Part("megatron"), compute=compute), H100) for compute in (2, 4))
    assert (half.optimizer, single.optimizer) == (12 * N, 8 * N)
    assert training_use(trained(Part("megatron"), moments=0), H100).optimizer == 4 * N
    reference = training_use(trained(Part("megatron"), trained=0), H100)
    assert (reference.weights, reference.gradients, reference.optimizer) == (2 * N, 0, 0)
    assert half.gathered == 0 and half.activations > 0


def test_models_of_one_trainer_run_sequentially() -> None:
    actor = training_use(trained(Part("fsdp")), H100)
    critic = replace(actor, role="critic", activations=actor.activations // 2)
    assert peak([actor, critic]) == actor.kept + critic.kept + actor.passing + RESERVE


def test_cache_gets_memory_left_by_weights() -> None:
    served = Served(SHAPE, Part("sglang"), 0.5, 1024)
    use = serving_use(served, H100)
    assert use.weights == 2 * N and use.kv_cache > 0
    assert served.token_bytes == 2 * 2 * 28 * 2 * 128
    assert sequences(served, H100) == use.kv_cache // (served.token_bytes * 1024)
    assert use.kv_cache == 40 * GIB - 2 * N - int(2.5 * GIB), "its share, without weights, CUDA graphs and a prefill"
    assert serving_use(served, 4 * GIB).kv_cache == 0 and sequences(served, 4 * GIB) == 0
    bounded = replace(served, most=3)
    assert sequences(bounded, H100) == 3 and sequences(bounded, 4 * GIB) == 0
    few = replace(bounded, most=64, cache=1 * GIB)
    assert serving_use(few, H100).kv_cache == GIB
    assert sequences(few, H100) == (GIB - GIB // 4) // (few.token_bytes * few.sequence), "the prefix cache: a quarter"


def test_cache_heads_are_split_over_tensor_ranks() -> None:
    sizes = [Served(SHAPE, Part("vllm", tensor=t), 0.9, 1024).token_bytes for t in (1, 2, 4)]
    assert sizes[0] == 2 * sizes[1] == 2 * sizes[2]


def test_engine_divides_weights_and_layers_over_stages() -> None:
    split = Served(SHAPE, Part("sglang", tensor=2, pipeline=3), 0.9, 1024)
    assert serving_use(split, H100).weights == 2 * N // 6
    assert split.token_bytes == 2 * 2 * 1 * 128 * 10, "the longest of three stages has ten of 28 layers"
    assert replace(split, compute=4).token_bytes == 2 * split.token_bytes
