"""Weight swaps: exact for what comes after, harmless when they fail, stamped on every token."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from areal.errors import ArealError

from .support import FAMILIES, Harness, gap, make_model

Start = Callable[..., Harness]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_load_weights_between_requests_serves_new_model(tmp_path: Path, start: Start, family: str, tied: bool) -> None:
    make_model(tmp_path / "old", family, seed=1, tie_word_embeddings=tied)
    new = make_model(tmp_path / "new", family, seed=2, tie_word_embeddings=tied)
    harness = start(tmp_path / "old")
    harness.run([5, 6, 7], max_new_tokens=4)
    harness.engine.load_weights(tmp_path / "new", 3)
    (sequence,) = harness.run([5, 6, 7], max_new_tokens=10)
    assert gap(new, sequence) < 1e-4
    assert sequence.versions == [3] * 10


def test_load_weights_under_running_request_stamps_each_token(tmp_path: Path, start: Start) -> None:
    old, new = (make_model(tmp_path / name, "Qwen3", seed=seed) for seed, name in enumerate(("old", "new")))
    harness = start(tmp_path / "old")
    running = harness.submit([5, 6, 7], max_new_tokens=120)
    harness.wait(running, tokens=5)
    harness.engine.pause().result(10)
    before = running.produced
    harness.engine.load_weights(tmp_path / "new", 1)
    late = harness.submit([8, 9], max_new_tokens=10)
    harness.engine.resume()
    harness.wait(running, late)
    assert running.versions == [0] * before + [1] * (120 - before)
    assert gap(new, late) < 1e-4
    running.output, running.logprobs = running.output[:before], running.logprobs[:before]
    assert gap(old, running) < 1e-4


def _without_a_tensor(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors")


def _with_one_tensor_more(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.3.mlp.up_proj.weight"] = torch.zeros(48, 32)
    save_file(tensors, folder / "model.safetensors")


def _with_a_wrong_shape(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = torch.zeros(33)
    save_file(tensors, folder / "model.safetensors")


def _with_a_nan_in_the_last_tensor(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][3] = float("nan")
    save_file(tensors, folder / "model.safetensors")


def _torn(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def _not_safetensors(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"no weights at all")


def _gone(folder: Path) -> None:
    shutil.rmtree(folder)


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (_without_a_tensor, r"lacks model\.layers\.1\.mlp\.up_proj\.weight"),
        (_with_one_tensor_more, r"does not have: model\.layers\.3\.mlp\.up_proj\.weight"),
        (_with_a_wrong_shape, r"model\.norm\.weight is \[33\], config\.json makes it \[32\]"),
        (_with_a_nan_in_the_last_tensor, r"model\.norm\.weight holds values that are not finite"),
        (_torn, r"cannot read .*model\.safetensors"),
        (_not_safetensors, r"cannot read .*model\.safetensors"),
        (_gone, r"holds no weights"),
    ],
)
def test_load_weights_of_bad_folder_leaves_old_model_whole(
    llama: tuple[Path, Any], tmp_path: Path, start: Start, harm: Callable[[Path], None], said: str
) -> None:
    folder, model = llama
    make_model(tmp_path / "new", seed=2)
    harm(tmp_path / "new")
    harness = start(folder)
    harness.engine.set_version(4).result(10)
    with pytest.raises(ArealError, match=said):
        harness.engine.load_weights(tmp_path / "new", 5)
    (sequence,) = harness.run([5, 6, 7], max_new_tokens=10)
    assert gap(model, sequence) < 1e-4
    assert sequence.versions == [4] * 10


def test_load_weights_of_half_precision_folder_keeps_engine_dtype(tmp_path: Path, start: Start) -> None:
    make_model(tmp_path / "old", seed=1)
    make_model(tmp_path / "new", seed=2).to(torch.bfloat16).save_pretrained(tmp_path / "new")
    new = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "new", dtype=torch.float32)
    harness = start(tmp_path / "old")
    harness.engine.load_weights(tmp_path / "new", None)
    (sequence,) = harness.run([5, 6, 7], max_new_tokens=10)
    assert gap(new, sequence) < 1e-4
    assert sequence.versions == [0] * 10
