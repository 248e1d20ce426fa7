"""Parameters are counted as transformers makes the model, on torch's meta device."""

from __future__ import annotations

from typing import Any

import pytest

from areal.errors import UsageFault
from areal.estimate.shapes import FAMILIES, shape_of

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

SMALL = {
    "vocab_size": 320,
    "hidden_size": 48,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MOE = {**SMALL, "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "num_local_experts": 5}
MOE |= {"shared_expert_intermediate_size": 40, "head_dim": 8}
CASES: list[tuple[str, dict[str, Any]]] = [
    *((kind, MOE if kind.endswith("moe") or kind == "mixtral" else SMALL) for kind in FAMILIES),
    ("llama", {**SMALL, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    ("qwen3", {**SMALL, "attention_bias": True, "head_dim": 16}),
    ("qwen3", {**SMALL, "tie_word_embeddings": True, "num_key_value_heads": 6}),
    ("qwen2_moe", {**MOE, "mlp_only_layers": [0], "decoder_sparse_step": 1}),
    ("qwen3_moe", {**MOE, "decoder_sparse_step": 2}),
    ("gemma3_text", {**SMALL, "tie_word_embeddings": False}),
]


def meta(kind: str, settings: dict[str, Any], loader: str = "AutoModelForCausalLM") -> tuple[Any, dict[str, Any]]:
    config = transformers.AutoConfig.for_model(kind, **settings)
    with torch.device("meta"):
        model = getattr(transformers, loader).from_config(config)
    return model, config.to_dict()


@pytest.mark.parametrize(
    ("kind", "settings"), CASES, ids=[f"{number}-{kind}" for number, (kind, _) in enumerate(CASES)]
)
def test_model_parameters_are_counted_exactly(kind: str, settings: dict[str, Any]) -> None:
    model, config = meta(kind, settings)
    assert shape_of(config, "config.json").parameters == sum(each.numel() for each in model.parameters())


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_parameters_of_a_critic_are_counted_exactly(kind: str) -> None:
    model, config = meta(kind, {**SMALL, "num_labels": 1}, "AutoModelForTokenClassification")
    assert shape_of(config, "config.json").critic_parameters == sum(each.numel() for each in model.parameters())


LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@pytest.mark.parametrize(
    "targets", [(), ("all-linear",), ("q_proj", "v_proj", "down_proj"), *((each,) for each in LINEAR)]
)
def test_adapter_parameters_match_peft(targets: tuple[str, ...]) -> None:
    peft = pytest.importorskip("peft")
    model, config = meta("qwen2", {**SMALL, "head_dim": 16})
    modules = list(targets if targets and targets[0] in LINEAR else LINEAR)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=modules))
    trained = sum(each.numel() for each in adapted.parameters() if each.requires_grad)
    assert shape_of(config, "config.json").adapters(4, targets) == trained


def test_known_models_have_their_published_sizes() -> None:
    qwen = {"model_type": "qwen2", "vocab_size": 151936, "hidden_size": 1536, "intermediate_size": 8960}
    qwen |= {"num_hidden_layers": 28, "num_attention_heads": 12, "num_key_value_heads": 2, "tie_word_embeddings": True}
    assert shape_of(qwen, "Qwen2.5-1.5B").parameters == 1_543_714_304
    llama = {"model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336}
    llama |= {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8}
    assert shape_of(llama, "Llama-3.1-8B").parameters == 8_030_261_248


def test_active_expert_parameters_are_of_selected_experts() -> None:
    shape = shape_of({**MOE, "model_type": "mixtral"}, "config.json")
    whole = shape_of({**MOE, "model_type": "mixtral", "num_experts_per_tok": 5}, "config.json")
    assert whole.active - shape.active == shape.layers * 3 * shape.mlp(shape.width)
    assert shape.expert_parameters == shape.layers * 5 * shape.mlp(shape.width)
    sparse = shape_of({**MOE, "model_type": "qwen3_moe", "decoder_sparse_step": 2}, "config.json")
    assert sparse.expert_parameters == 1 * 5 * 3 * 48 * 24, "the second of three layers"
    assert shape_of({**SMALL, "model_type": "llama"}, "config.json").expert_parameters == 0


def test_adapters_of_experts_and_of_other_layers_are_refused() -> None:
    with pytest.raises(UsageFault, match="adapters of experts are not estimated"):
        shape_of({**MOE, "model_type": "mixtral"}, "config.json").adapters(4, ())
    with pytest.raises(UsageFault, match="adapters of lm_head, embed are not estimated") as caught:
        shape_of({**SMALL, "model_type": "llama"}, "config.json").adapters(4, ("lm_head", "q_proj", "embed"))
    assert caught.value.hint == f"target_modules of {', '.join(LINEAR)}"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "model_type '' cannot be counted"),
        ({"model_type": "mamba"}, "model_type 'mamba' cannot be counted"),
        ({"model_type": "llama", "hidden_size": 8, "num_attention_heads": 2}, "num_hidden_layers"),
        ({**SMALL, "model_type": "llama", "vocab_size": "many"}, "vocab_size must be a positive number"),
        ({**SMALL, "model_type": "llama", "num_hidden_layers": 0}, "num_hidden_layers must be a positive number"),
        ({**SMALL, "model_type": "llama", "hidden_size": 5}, "head_dim must be a positive number, and is 0"),
        ({**SMALL, "model_type": "llama", "num_hidden_layers": 65537}, "num_hidden_layers must be at most 65536"),
        ({**SMALL, "model_type": "llama", "vocab_size": 2**31 + 1}, "vocab_size must be at most 2147483648"),
        ({**SMALL, "model_type": "llama", "vocab_size": True}, "vocab_size must be a positive number"),
        ({**SMALL, "model_type": "mixtral", "num_hidden_layers": 10**11}, "num_hidden_layers must be at most 65536"),
        ({**SMALL, "model_type": "qwen3_moe", "mlp_only_layers": 5}, "mlp_only_layers must be a list"),
        (
            {**SMALL, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 9},
            "a token cannot have 9 of 4 experts",
        ),
    ],
)
def test_unsupported_or_incomplete_config_is_refused_by_name(config: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageFault, match=message):
        shape_of(config, "the/config.json")
