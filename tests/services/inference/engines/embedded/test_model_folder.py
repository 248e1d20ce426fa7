"""What is read from a model folder before anything is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from areal.errors import ArealError
from areal.services.inference.engines.embedded.loading import inspect_folder
from areal.services.inference.engines.embedded.model_folder import (
    INDEX,
    UnsupportedArchitecture,
    buffer_shapes,
    buffer_slices,
    end_tokens,
    is_finite,
    open_checkpoint,
    parse,
    read_config,
)

from .support import make_model

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 10,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}


def test_parse_of_minimal_llama_fills_defaults() -> None:
    config = parse(LLAMA)
    assert (config.kv_heads, config.head_dim, config.tied, config.qkv_bias, config.qk_norm) == (
        2,
        4,
        False,
        False,
        False,
    )
    assert (config.rope.theta, config.rope.type, config.dtype) == (10000.0, "default", "float32")


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0}, "dtype": "bfloat16"},
        {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}, "rope_theta": 5e5, "torch_dtype": "bfloat16"},
        {"rope_scaling": {"type": "llama3", "factor": 8.0}, "rope_theta": 5e5, "torch_dtype": "bfloat16"},
    ],
    ids=["new", "old", "oldest"],
)
def test_old_and_new_config_fields_parse_alike(changes: dict[str, Any]) -> None:
    config = parse({**LLAMA, **changes})
    assert (config.rope.theta, config.rope.type, config.rope.parameters["factor"]) == (5e5, "llama3", 8.0)
    assert config.dtype == "bfloat16"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, "gpt2"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantized"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4}}, "yarn"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial"),
        ({"model_type": "mistral", "sliding_window": 128}, "sliding"),
        ({"model_type": "qwen2", "sliding_window": 128, "use_sliding_window": True}, "sliding"),
    ],
)
def test_unsupported_architecture_error_names_part(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedArchitecture, match=message):
        parse({**LLAMA, **changes})


def test_parse_of_unused_sliding_window_is_supported() -> None:
    assert parse({**LLAMA, "model_type": "qwen2", "sliding_window": 128, "use_sliding_window": False}).qkv_bias


def test_missing_config_field_is_named() -> None:
    with pytest.raises(ArealError, match="hidden_size"):
        parse({key: value for key, value in LLAMA.items() if key != "hidden_size"})


@pytest.mark.parametrize(
    "changes", [{}, {"tie_word_embeddings": True}, {"model_type": "qwen3"}, {"attention_bias": True}]
)
def test_plan_of_each_shape_fills_every_buffer_once(changes: dict[str, Any]) -> None:
    config = parse({**LLAMA, **changes})
    rows: dict[str, list[int]] = {}
    for piece in buffer_slices(config):
        rows.setdefault(piece.target, []).extend(range(piece.start, piece.stop))
    assert {name: sorted(held) for name, held in rows.items()} == {
        name: list(range(shape[0])) for name, shape in buffer_shapes(config).items()
    }


def test_read_config_error_names_missing_folder_or_file(tmp_path: Path) -> None:
    with pytest.raises(ArealError, match="does not exist"):
        read_config(tmp_path / "none")
    with pytest.raises(ArealError, match=r"no config\.json"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ArealError, match="cannot read"):
        read_config(tmp_path)


def test_incomplete_shards_error_names_missing_file(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2)}, tmp_path / "one.safetensors")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}))
    with pytest.raises(ArealError, match=r"two\.safetensors"):
        open_checkpoint(tmp_path)


def test_duplicate_tensor_error_names_both_files(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2)}, tmp_path / "one.safetensors")
    save_file({"a": torch.zeros(2)}, tmp_path / "two.safetensors")
    with pytest.raises(ArealError, match=r"a is both in one\.safetensors and in two\.safetensors"):
        open_checkpoint(tmp_path)


def test_open_checkpoint_counts_bytes_by_dtype(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(3, 2), "b": torch.zeros(5, dtype=torch.bfloat16)}, tmp_path / "one.safetensors")
    assert open_checkpoint(tmp_path).size == 3 * 2 * 4 + 5 * 2


def test_inspect_rejects_folder_not_matching_config(tmp_path: Path) -> None:
    make_model(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**raw, "num_hidden_layers": 4}))
    with pytest.raises(ArealError, match=r"lacks model\.layers\.3\.input_layernorm\.weight; .* and \d+ more"):
        inspect_folder(tmp_path)


def test_inspect_of_other_architecture_leaves_it_to_transformers(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    folder = inspect_folder(tmp_path)
    assert folder.config is None
    assert "gpt2" in folder.reason


def test_end_tokens_of_all_files_are_joined(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 6]}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<end>"}}))
    added = [{"id": 7, "content": "<end>"}, {"id": 8, "content": "<pad>"}]
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))
    assert end_tokens(tmp_path, {"eos_token_id": 4}) == {4, 5, 6, 7}


def test_bare_folder_has_no_end_tokens(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("not json")
    assert end_tokens(tmp_path, {"eos_token_id": None}) == frozenset()


# -- values that are not finite


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("at", [0, 517, 1023])
def test_is_finite_detects_one_bad_value(dtype: torch.dtype, value: float, at: int) -> None:
    tensor = torch.full((1024,), 6e4, dtype=dtype)  # the sum of these overflows half precision
    assert is_finite(tensor)
    tensor[at] = value
    assert not is_finite(tensor.view(32, 32))


def test_is_finite_accepts_integers_and_empty_tensors() -> None:
    assert is_finite(torch.arange(5))
    assert is_finite(torch.empty(0))
