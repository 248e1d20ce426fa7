"""The name map: each weight of a Hugging Face model is in one of Megatron's, and comes back from any cut of it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from areal.errors import UsageFault
from areal.resources.backend import Part
from areal.training.engines.megatron.model import check, load
from areal.training.engines.megatron.names import (
    FAMILIES,
    Architecture,
    Weight,
    architecture,
    join,
    shard,
    split,
    unshard,
    weights,
)
from tests.training.engines.models import save_family

CLASSES = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "qwen3_moe": "Qwen3Moe"}


@pytest.fixture(scope="module", params=[(kind, tied) for kind in FAMILIES for tied in (False, True)])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    kind, tied = request.param
    return save_family(tmp_path_factory.mktemp("models") / kind, CLASSES[kind], tied=tied)


def read(folder: Path) -> tuple[Architecture, dict[str, torch.Tensor]]:
    from safetensors.torch import load_file
    from transformers import AutoConfig

    return architecture(AutoConfig.from_pretrained(folder)), load_file(folder / "model.safetensors")


@pytest.mark.parametrize("ranks", [1, 2])
def test_hugging_face_weights_round_trip(saved: Path, ranks: int) -> None:
    model, theirs = read(saved)
    back: dict[str, torch.Tensor] = {}
    for weight in weights(model):
        whole = join(weight, [theirs[name] for name in weight.hf_names])
        cut = [shard(weight, whole, rank, ranks) for rank in range(ranks)]
        if not weight.is_tied:
            again = unshard(weight, cut)
            assert torch.equal(again, whole)
            back |= dict(zip(weight.hf_names, split(weight, again), strict=True))
    assert set(back) == set(theirs)
    assert all(torch.equal(back[name], tensor) for name, tensor in theirs.items())


def test_megatron_names_are_unique(saved: Path) -> None:
    model, _ = read(saved)
    names = [weight.name for weight in weights(model)]
    assert len(set(names)) == len(names)
    assert {name for name in names if ".layers.1." not in name and "experts.1" not in name} >= {
        "embedding.word_embeddings.weight",
        "decoder.layers.0.self_attention.linear_qkv.weight",
        "decoder.layers.0.self_attention.linear_proj.weight",
        "decoder.layers.0.pre_mlp_layernorm.weight",
        "decoder.final_layernorm.weight",
        "output_layer.weight",
    }


def test_heads_of_group_are_adjacent() -> None:
    weight = Weight("qkv", ("q", "k", "v"), (8, 1), 0, "qkv", groups=2, head_size=1)
    q, k, v = torch.arange(4.0)[:, None], torch.tensor([[10.0], [11.0]]), torch.tensor([[20.0], [21.0]])
    assert join(weight, [q, k, v]).flatten().tolist() == [0, 1, 10, 20, 2, 3, 11, 21]


def test_mlp_shard_has_gate_before_up() -> None:
    weight = Weight("fc1", ("gate", "up"), (8, 1), 0, "gate_up")
    whole = join(weight, [torch.arange(4.0)[:, None], 10 + torch.arange(4.0)[:, None]])
    assert [shard(weight, whole, rank, 2).flatten().tolist() for rank in range(2)] == [[0, 1, 10, 11], [2, 3, 12, 13]]


@given(st.data())
def test_any_weight_split_round_trips(data: st.DataObject) -> None:
    ranks, width = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))
    groups, heads, size = (
        ranks * data.draw(st.integers(1, 2)),
        data.draw(st.integers(1, 3)),
        data.draw(st.integers(1, 3)),
    )
    rows = ranks * data.draw(st.integers(1, 3))
    weight, parts = data.draw(
        st.sampled_from(
            [
                (
                    Weight("qkv", ("q", "k", "v"), (groups * (heads + 2) * size, width), 0, "qkv", groups, size),
                    [torch.rand(count * size, width) for count in (groups * heads, groups, groups)],
                ),
                (Weight("fc1", ("g", "u"), (2 * rows, width), 0, "gate_up"), [torch.rand(rows, width) for _ in "gu"]),
                (Weight("proj", ("o",), (width, rows), 1), [torch.rand(width, rows)]),
                (Weight("norm", ("n",), (width,)), [torch.rand(width)]),
                (Weight("head", ("h",), (rows + 1, width), 0, padded=True), [torch.rand(rows + 1, width)]),
            ]
        )
    )
    whole = join(weight, parts)
    shards = [shard(weight, whole, rank, ranks) for rank in range(ranks)]
    assert len({tuple(each.shape) for each in shards}) == 1  # a collective takes them
    again = split(weight, unshard(weight, shards))
    assert all(torch.equal(part, other) for part, other in zip(parts, again, strict=True))


def about(kind: str = "llama", **changes: Any) -> Any:
    import transformers

    return getattr(transformers, f"{CLASSES.get(kind, kind)}Config")(**changes)


@pytest.mark.parametrize(
    ("changes", "reported"),
    [
        ({"attention_bias": True}, "no llama model with biases of the attention's output"),
        ({"mlp_bias": True}, "biases of the MLP"),
        ({"hidden_act": "gelu"}, "the activation gelu"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}, "rope of type linear"),
    ],
)
def test_options_computed_differently_by_megatron_are_refused(changes: dict[str, Any], reported: str) -> None:
    with pytest.raises(UsageFault, match=reported):
        architecture(about(**changes))


@pytest.mark.parametrize(
    ("kind", "changes", "reported"),
    [
        ("llama", {"quantization_config": {"quant_method": "fp8"}}, "no models with quantized weights"),
        ("qwen3_moe", {"num_experts_per_tok": 1, "norm_topk_prob": True}, "one expert for each token"),
    ],
)
def test_routing_differing_in_megatron_is_refused(kind: str, changes: dict[str, Any], reported: str) -> None:
    with pytest.raises(UsageFault, match=reported):
        architecture(about(kind, **changes))


def test_mismatched_weight_shapes_are_named() -> None:
    weight = Weight("qkv", ("q", "k", "v"), (16, 1), 0, "qkv", groups=4, head_size=2)
    for rows in ((4, 4, 4), (8, 4, 4)):  # the second has as many rows in all, and other heads
        parts = [torch.rand(count, 1) for count in rows]
        with pytest.raises(UsageFault, match=rf"needs \[16, 1\], and the folder has q \[{rows[0]}, 1\], k \[4, 1\]"):
            join(weight, parts)


def test_untied_head_of_tied_model_is_refused() -> None:
    tensors = {"lm_head.weight": torch.ones(1), "model.embed_tokens.weight": torch.zeros(1)}
    with pytest.raises(UsageFault, match=r"the folder has another lm_head\.weight"):
        load({}, architecture(about("qwen2", tie_word_embeddings=True)), None, tensors.__getitem__)


def test_unsupported_model_family_is_refused() -> None:
    with pytest.raises(UsageFault, match="the megatron engine has no gemma models: it has llama, qwen2"):
        architecture(about("Gemma"))


@pytest.mark.parametrize(
    ("part", "reported"),
    [
        (Part("megatron", tensor=3), "megatron:d1t3: megatron cannot share 4 attention heads over t3 evenly"),
        (Part("megatron", tensor=4), "2 key and value heads over t4"),
        (Part("megatron", pipeline=3), "4 layers over p3"),
        (Part("megatron", data=3, expert=3), "8 experts over e3"),
        (Part("megatron", expert=2), "1 ranks of a stage over e2 of t1"),
        (Part("megatron", data=2, expert=2, ffn_tensor=5), "2 ranks of a stage over e2 of t5"),
    ],
)
def test_layout_not_dividing_model_is_refused(part: Part, reported: str) -> None:
    sizes = {"hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 4}
    model = architecture(about("qwen3_moe", num_experts=8, moe_intermediate_size=8, intermediate_size=24, **sizes))
    with pytest.raises(UsageFault, match=reported):
        check(model, part)


def test_expert_layout_of_dense_model_is_refused() -> None:
    with pytest.raises(UsageFault, match="megatron:d2e2: the model has no experts to distribute"):
        check(architecture(about()), Part("megatron", data=2, expert=2))
