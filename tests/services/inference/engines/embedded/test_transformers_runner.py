"""Architectures that the own decoder lacks give the same guarantees through transformers."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from areal.errors import ArealError
from areal.services.inference.engines.embedded.engine import Engine
from areal.services.inference.engines.embedded.loading import inspect_folder, load_model
from areal.services.inference.engines.embedded.transformers_runner import TransformersRunner
from areal.wire.processes import EmbeddedEngineConfig

from .support import VOCAB, Harness, gap, make_model


def make(folder: Path, family: str, seed: int = 0) -> Any:
    if family == "GPT2":
        torch.manual_seed(seed)
        library: Any = transformers
        shape = {"vocab_size": VOCAB, "n_positions": 256, "n_embd": 32, "n_layer": 2, "n_head": 2, "eos_token_id": 2}
        model = library.GPT2LMHeadModel(library.GPT2Config(**shape)).eval()
        model.save_pretrained(folder)
        return model
    if family == "Yarn":
        rope = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
        return make_model(folder, "Llama", seed=seed, rope_parameters=rope)
    return make_model(folder, family, seed=seed, sliding_window=8)


def start(folder: Path) -> Harness:
    found = inspect_folder(folder)
    assert found.config is None
    return Harness(TransformersRunner(folder, torch.float32, torch.device("cpu")))


@pytest.mark.parametrize("family", ["GPT2", "Gemma2", "Mistral", "Yarn"])
def test_other_architecture_matches_forward_also_after_swap(tmp_path: Path, family: str) -> None:
    old, new = make(tmp_path / "old", family, 1), make(tmp_path / "new", family, 2)
    harness = start(tmp_path / "old")
    try:
        before = harness.run([5, 6, 7], [11] * 20, list(range(3, 80)), max_new_tokens=12)
        assert max(gap(old, sequence) for sequence in before) < 1e-4
        harness.engine.load_weights(tmp_path / "new", 1)
        after = harness.run([5, 6, 7], [11] * 20, max_new_tokens=12)
        assert max(gap(new, sequence) for sequence in after) < 1e-4
        harness.engine.load_weights(tmp_path / "old" / "model.safetensors", 2)
        assert max(gap(old, sequence) for sequence in harness.run([5, 6, 7], max_new_tokens=12)) < 1e-4
    finally:
        harness.close()


def test_queue_longer_than_batch_matches_plain_forward(tmp_path: Path) -> None:
    model = make(tmp_path, "GPT2")
    harness = start(tmp_path)
    try:
        sequences = [harness.submit([3 + index, 4], max_new_tokens=1 + index % 5, seed=index) for index in range(20)]
        harness.wait(*sequences)
        assert max(gap(model, sequence) for sequence in sequences) < 1e-4
    finally:
        harness.close()


def test_load_of_mismatched_weights_keeps_old_model(tmp_path: Path) -> None:
    model = make(tmp_path / "old", "GPT2")
    other = make(tmp_path / "other", "Yarn")
    harness = start(tmp_path / "old")
    try:
        for path in (tmp_path / "other", tmp_path / "other" / "model.safetensors", tmp_path / "nowhere"):
            with pytest.raises(ArealError):
                harness.engine.load_weights(path, 1)
        (sequence,) = harness.run([5, 6, 7], max_new_tokens=8)
        assert gap(model, sequence) < 1e-4 < gap(other, sequence)
        assert sequence.versions == [0] * 8
    finally:
        harness.close()


def test_load_of_folder_without_weights_fails(tmp_path: Path) -> None:
    make(tmp_path / "model", "GPT2")
    shutil.copytree(tmp_path / "model", tmp_path / "bare")
    (tmp_path / "bare" / "model.safetensors").unlink()
    with pytest.raises(ArealError, match="cannot load"):
        TransformersRunner(tmp_path / "bare", torch.float32, torch.device("cpu"))


def test_load_of_fallback_model_reports_stages(tmp_path: Path) -> None:
    make(tmp_path, "GPT2")
    stages: list[str] = []
    loaded = load_model(
        inspect_folder(tmp_path),
        EmbeddedEngineConfig(model_path=str(tmp_path), threads=1),
        {},
        lambda stage, done, total: stages.append(stage),
        lambda urgent: None,
        lambda error: None,
    )
    assert isinstance(loaded.engine, Engine)
    loaded.engine.close()
    assert stages == ["importing torch", "importing transformers", "loading weights", "warming up"]
    assert (set(loaded.end_tokens), loaded.engine.limits.max_length) == ({2}, 256)


_TINY: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0,
}  # fmt: skip
_EXPERTS = {"num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2}
_BAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_expand": 2, "mamba_chunk_size": 4, "attn_layer_indices": [1]}
_MAMBA2 = {"num_heads": 8, "head_dim": 8, "expand": 2, "state_size": 16, "n_groups": 1, "chunk_size": 4}
_FAST: dict[str, dict[str, Any]] = {
    "Bamba": _BAMBA, "Bloom": {}, "Cohere2": {}, "Gemma3Text": {}, "GPT2": {}, "Mamba": {}, "Mamba2": _MAMBA2,
    "MiniMax": _EXPERTS, "OPT": {}, "Phi": {}, "Phi3": {}, "Rwkv": {},
}  # fmt: skip
_PLAIN = (
    "Apertus Arcee BioGpt BitNet Cohere DiffLlama Doge Ernie4_5 Exaone4 FalconMamba Gemma Gemma2 Glm Glm4 GPTBigCode "
    "GPTNeoX Granite Helium HunYuanDenseV1 Lfm2 Llama4Text Mpt Nemotron Olmo Olmo2 Olmo3 Persimmon SeedOss SmolLM3 "
    "StableLm Starcoder2 XGLM"
)
_MIXED = "GptOss GraniteMoe JetMoe Mixtral Qwen2Moe Qwen3Moe"
_SLOW: dict[str, dict[str, Any]] = {
    **{name: {} for name in _PLAIN.split()},
    **dict.fromkeys(_MIXED.split(), _EXPERTS),
    **{name: {"rotary_dim": 4} for name in ("GPTJ", "CodeGen")},
}


def _random(folder: Path, name: str, **changes: Any) -> Any:
    library: Any = transformers
    torch.manual_seed(0)
    model = library.AutoModelForCausalLM.from_config(getattr(library, f"{name}Config")(**{**_TINY, **changes})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        *(pytest.param(name, changes, id=name) for name, changes in _FAST.items()),
        *(pytest.param(name, changes, id=name, marks=pytest.mark.slow) for name, changes in _SLOW.items()),
    ],
)
def test_every_architecture_matches_plain_forward(tmp_path: Path, name: str, changes: dict[str, Any]) -> None:
    """Prompts in one part and in several, side by side, at several temperatures."""
    model = _random(tmp_path, name, **changes)
    harness = start(tmp_path)
    try:
        sequences = harness.run([5, 6, 7], list(range(3, 90)), [11], max_new_tokens=10)
        assert max(gap(model, sequence) for sequence in sequences) < 1e-3
    finally:
        harness.close()


@pytest.mark.parametrize("rope_type", ["longrope", "dynamic"])
def test_length_dependent_rope_is_served_up_to_its_length(tmp_path: Path, rope_type: str) -> None:
    factors = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4} if rope_type == "longrope" else {}
    rope = {"rope_type": rope_type, "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
    name, more = ("Phi3", {}) if rope_type == "longrope" else ("Llama", {"sliding_window": None})
    _random(tmp_path, name, rope_parameters={**rope, **factors}, original_max_position_embeddings=64, **more)
    assert TransformersRunner(tmp_path, torch.float32, torch.device("cpu")).max_positions == 64


def test_model_with_wrong_cache_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path, "GPT2")
    right = TransformersRunner._forward

    def shifted(self: TransformersRunner, row: int, tokens: torch.Tensor, start: int, *images: Any) -> torch.Tensor:
        logits = right(self, row, tokens, start, *images)
        return logits.roll(1) if start > 6 else logits

    monkeypatch.setattr(TransformersRunner, "_forward", shifted)
    with pytest.raises(ArealError, match=r"GPT2LMHeadModel cannot be served: .* nats off"):
        TransformersRunner(tmp_path, torch.float32, torch.device("cpu"))


def test_model_with_failing_cache_is_refused_with_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path, "GPT2")
    library: Any = transformers

    def forward(self: Any, input_ids: Any = None, use_cache: bool = False, **options: Any) -> Any:
        raise AttributeError("no such cache")

    monkeypatch.setattr(library.GPT2LMHeadModel, "forward", forward)
    with pytest.raises(ArealError, match=r"GPT2LMHeadModel cannot be served: .*AttributeError: no such cache"):
        TransformersRunner(tmp_path, torch.float32, torch.device("cpu"))
