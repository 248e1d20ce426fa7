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
from areal.services.inference.engines.embedded.loading import inspect, load
from areal.services.inference.engines.embedded.settings import Settings
from areal.services.inference.engines.embedded.transformers_runner import TransformersRunner

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
    found = inspect(folder)
    assert found.config is None
    return Harness(TransformersRunner(folder, torch.float32, torch.device("cpu")))


@pytest.mark.parametrize("family", ["GPT2", "Gemma2", "Mistral", "Yarn"])
def test_logprobs_and_swap_of_other_architecture_match_plain_forward(tmp_path: Path, family: str) -> None:
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


def test_load_weights_of_another_shape_leaves_old_model_whole(tmp_path: Path) -> None:
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


def test_load_of_folder_that_lacks_weights_is_an_error(tmp_path: Path) -> None:
    make(tmp_path / "model", "GPT2")
    shutil.copytree(tmp_path / "model", tmp_path / "bare")
    (tmp_path / "bare" / "model.safetensors").unlink()
    with pytest.raises(ArealError, match="cannot load"):
        TransformersRunner(tmp_path / "bare", torch.float32, torch.device("cpu"))


def test_load_of_fallback_model_reports_stages(tmp_path: Path) -> None:
    make(tmp_path, "GPT2")
    stages: list[str] = []
    loaded = load(
        inspect(tmp_path),
        Settings(tmp_path, threads=1),
        lambda stage, done, total: stages.append(stage),
        lambda urgent: None,
        lambda error: None,
    )
    assert isinstance(loaded.engine, Engine)
    loaded.engine.close()
    assert stages == ["importing torch", "importing transformers", "loading weights", "warming up"]
    assert (set(loaded.end_tokens), loaded.engine.limits.max_length) == ({2}, 256)
