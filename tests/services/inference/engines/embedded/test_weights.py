"""Weight swaps: exact for what comes after, harmless when they fail, stamped on every token."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from areal.errors import ArealError, Conflict
from areal.services.inference.engines.embedded import runner
from areal.services.weight_transfer.memory import Image, TransferProgress, ends, layout_of

from .support import FAMILIES, Harness, gap, make_model

Start = Callable[..., Harness]


@pytest.fixture(params=[True, False], ids=["room", "no-room"])
def room(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether there is memory for new weights beside those in use."""
    if not request.param:
        monkeypatch.setattr(runner, "free_bytes", lambda device: 0)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.usefixtures("room")
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


@pytest.mark.usefixtures("room")
def test_staged_weights_are_not_served_until_load(tmp_path: Path, start: Start) -> None:
    old, new = (make_model(tmp_path / name, "Qwen2", seed=seed) for seed, name in enumerate(("old", "new")))
    harness = start(tmp_path / "old")
    harness.engine.stage_weights(tmp_path / "new", 7)
    (before,) = harness.run([5, 6, 7], max_new_tokens=10)
    harness.engine.load_staged(7)
    (after,) = harness.run([5, 6, 7], max_new_tokens=10)
    assert max(gap(old, before), gap(new, after)) < 1e-4
    assert (set(before.versions), set(after.versions)) == ({0}, {7})


def test_load_of_unstaged_version_is_refused(llama: tuple[Path, Any], tmp_path: Path, start: Start) -> None:
    harness = start(llama[0])
    with pytest.raises(Conflict, match="version 3 is not staged here: none is"):
        harness.engine.load_staged(3)
    harness.engine.stage_weights(llama[0], 2)
    with pytest.raises(Conflict, match="version 3 is not staged here: 2 is"):
        harness.engine.load_staged(3)
    harness.engine.stage_weights(llama[0], 3)
    harness.engine.forget_weights()
    with pytest.raises(Conflict, match="none is"):
        harness.engine.load_staged(3)
    make_model(tmp_path / "bad", seed=2)
    _with_a_nan_in_the_last_tensor(tmp_path / "bad")
    harness.engine.stage_weights(llama[0], 4)
    with pytest.raises(ArealError, match="not finite"):
        harness.engine.stage_weights(tmp_path / "bad", 5)
    with pytest.raises(Conflict, match="none is"):  # 4 made room
        harness.engine.load_staged(4)
    assert harness.engine.version == 0


@pytest.mark.usefixtures("room")
@pytest.mark.parametrize("breaks", [False, True], ids=["whole", "breaks"])
def test_incomplete_staged_weights_are_refused(tmp_path: Path, start: Start, breaks: bool) -> None:
    old, new = (make_model(tmp_path / name, "Qwen2", seed=seed) for seed, name in enumerate(("old", "new")))
    harness = start(tmp_path / "old")
    (tmp_path / "shared").mkdir()
    weights = list(new.state_dict().items())
    layout = layout_of(weights)
    image = Image(layout, tmp_path / "shared" / "model.safetensors")  # of zeros yet
    arrival = TransferProgress(ends(layout))
    refused: list[ArealError] = []

    def stage() -> None:
        try:
            harness.engine.stage_weights(tmp_path / "shared", 1, arrival)
        except ArealError as error:
            refused.append(error)

    staging = threading.Thread(target=stage, name="stage")
    staging.start()
    for name, tensor in weights[: len(weights) // 2 if breaks else None]:
        assert staging.is_alive()
        image.write(name, tensor)
        arrival.reach(ends(layout)[name])
    if breaks:
        arrival.fail("the trainer is gone")
    staging.join(30)
    if breaks:
        assert "did not arrive: the trainer is gone" in str(refused[0])
        with pytest.raises(Conflict):
            harness.engine.load_staged(1)
    else:
        harness.engine.load_staged(1)
    (sequence,) = harness.run([5, 6, 7], max_new_tokens=10)
    assert gap(old if breaks else new, sequence) < 1e-4
    harness.engine.forget_weights()
    image.remove()


def _written(folder: Path, model: Any) -> Image:
    folder.mkdir()
    held = model.state_dict()
    image = Image(layout_of(held.items()), folder / "model.safetensors")
    for name, tensor in held.items():
        image.write(name, tensor)
    return image


def _mappings(folder: Path) -> int:
    inode = str((folder / "model.safetensors").stat().st_ino)
    return sum(line.split()[4] == inode for line in Path("/proc/self/maps").read_text().splitlines())


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_shared_weights_are_mapped_once_while_in_use(tmp_path: Path, start: Start, family: str, tied: bool) -> None:
    models = [make_model(tmp_path / str(seed), family, seed=seed, tie_word_embeddings=tied) for seed in range(3)]
    harness = start(tmp_path / "0")
    turns = [tmp_path / "a", tmp_path / "b"]
    images = [_written(folder, models[0]) for folder in turns]
    for version in range(1, 6):
        image, model = images[version % 2], models[version % 3]
        assert image.try_lock()
        for name, tensor in model.state_dict().items():
            image.write(name, tensor)
        with pytest.raises(ArealError, match="is being written"):
            harness.engine.load_weights(turns[version % 2], version)
        image.unlock()
        harness.engine.load_weights(turns[version % 2], version)
        (sequence,) = harness.run([5, 6, 7], max_new_tokens=10)
        assert gap(model, sequence) < 1e-4
        assert not image.try_lock()
    assert [_mappings(folder) for folder in turns] == [2, 2]  # the writer's, and ours
    harness.engine.forget_weights()
    images[1].remove()  # a trainer that is gone: what we compute with stays
    (sequence,) = harness.run([5, 6, 7], max_new_tokens=10)
    assert gap(models[5 % 3], sequence) < 1e-4
    harness.engine.load_weights(tmp_path / "1", 9)
    (sequence,) = harness.run([5, 6, 7], max_new_tokens=10)
    assert gap(models[1], sequence) < 1e-4
    images[0].remove()


@pytest.mark.usefixtures("room")
def test_lent_weights_are_not_overwritten(tmp_path: Path, start: Start) -> None:
    models = [make_model(tmp_path / str(seed), seed=seed, tie_word_embeddings=True) for seed in range(3)]
    harness = start(tmp_path / "0")
    image = _written(tmp_path / "shared", models[1])
    before = image.body.clone()
    harness.engine.load_weights(tmp_path / "shared", 1)
    harness.engine.release_memory().result(30)
    assert image.try_lock()
    image.unlock()
    harness.engine.restore_memory().result(30)
    (sequence,) = harness.run([5, 6, 7], max_new_tokens=10)
    assert gap(models[1], sequence) < 1e-4
    harness.engine.load_weights(tmp_path / "shared", 2)
    harness.engine.load_weights(tmp_path / "2", 3)
    assert torch.equal(image.body, before)
    assert image.try_lock()
    (sequence,) = harness.run([5, 6, 7], max_new_tokens=10)
    assert gap(models[2], sequence) < 1e-4
    image.remove()


def test_shared_weights_with_nan_are_refused_and_returned(tmp_path: Path, start: Start) -> None:
    old, new = (make_model(tmp_path / str(seed), seed=seed) for seed in range(2))
    with torch.no_grad():
        new.model.layers[1].mlp.up_proj.weight[7, 3] = float("nan")
    harness = start(tmp_path / "0")
    image = _written(tmp_path / "shared", new)
    with pytest.raises(ArealError, match=r"layers\.1\.mlp\.up_proj\.weight holds values that are not finite"):
        harness.engine.stage_weights(tmp_path / "shared", 1)
    assert image.try_lock()
    (sequence,) = harness.run([5, 6, 7], max_new_tokens=10)
    assert gap(old, sequence) < 1e-4
    image.remove()


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
    ("harm", "message"),
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
def test_load_of_bad_folder_keeps_old_model(
    llama: tuple[Path, Any], tmp_path: Path, start: Start, room: None, harm: Callable[[Path], None], message: str
) -> None:
    folder, model = llama
    make_model(tmp_path / "new", seed=2)
    harm(tmp_path / "new")
    harness = start(folder)
    harness.engine.set_version(4).result(10)
    with pytest.raises(ArealError, match=message):
        harness.engine.load_weights(tmp_path / "new", 5)
    (sequence,) = harness.run([5, 6, 7], max_new_tokens=10)
    assert gap(model, sequence) < 1e-4
    assert sequence.versions == [4] * 10


def test_load_of_half_precision_folder_keeps_engine_dtype(tmp_path: Path, start: Start) -> None:
    make_model(tmp_path / "old", seed=1)
    make_model(tmp_path / "new", seed=2).to(torch.bfloat16).save_pretrained(tmp_path / "new")
    new = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "new", dtype=torch.float32)
    harness = start(tmp_path / "old")
    harness.engine.load_weights(tmp_path / "new", None)
    (sequence,) = harness.run([5, 6, 7], max_new_tokens=10)
    assert gap(new, sequence) < 1e-4
    assert sequence.versions == [0] * 10
