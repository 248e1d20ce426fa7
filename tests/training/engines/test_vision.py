"""Training on prompts with images: the outputs are those of transformers' own forward pass, and what the model cannot
see is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from areal.dataset.images import images_key
from areal.dataset.vision import load_processor
from areal.errors import UsageFault
from areal.rollout.staleness import EpisodeSpec, Rollout
from areal.training.batches import Batch, select
from areal.training.engines.fsdp import FSDPEngine
from areal.training.ranks import one_process
from areal.training.trainers.rollouts import images_of, to_batch
from tests.training.engines.models import config, sft, tokens
from tests.vision import MODEL, drawing, plain_logprobs, question

ALONE = one_process("cpu")
RED, BLUE = drawing("red"), drawing("blue")
ROWS = [(RED,), (BLUE,), (RED, BLUE), (RED,), ()]
IMAGES = {images_key(each): each for each in ROWS if each}


def rows() -> Batch:
    """A row for each of ``ROWS``, with an answer of two or three tokens, one of which is a placeholder."""
    processor = load_processor(str(MODEL))
    prompts = [processor.prompt(question(), images) for images in ROWS]
    answers = [[9, 2], [10, processor.token_id, 2], [9, 2], [11, 2], [12, 2]]
    whole = [[*prompt, *answer] for prompt, answer in zip(prompts, answers, strict=True)]
    width = max(map(len, whole))
    return {
        "input_ids": torch.tensor([[*row, *[0] * (width - len(row))] for row in whole]),
        "attention_mask": torch.tensor([[place < len(row) for place in range(width)] for row in whole]),
        "loss_mask": torch.tensor(
            [
                [len(prompt) <= place < len(row) for place in range(width)]
                for prompt, row in zip(prompts, whole, strict=True)
            ]
        ),
        "images": torch.tensor([images_key(each) for each in ROWS]),
    }


def engine(**changes: Any) -> FSDPEngine:
    return FSDPEngine(config(MODEL, **changes), ALONE, total_steps=4)


@pytest.fixture(scope="module")
def trained() -> FSDPEngine:
    made = engine()
    made.see_images(IMAGES, rows())
    return made


def test_image_row_logprobs_match_transformers(trained: FSDPEngine) -> None:
    batch = rows()
    found = trained.forward(batch, lambda outputs, micro: outputs.logprobs)
    for number, images in enumerate(ROWS[:1] + ROWS[2:4]):  # transformers takes a sampled placeholder for an image
        row = select(batch, [(0, 2, 3)[number]])
        length = int(row["attention_mask"].sum())
        ids = row["input_ids"][0, :length]
        plain = plain_logprobs(ids.tolist(), images).gather(1, ids[1:, None])[:, 0]
        mask = row["loss_mask"][0, 1:length]
        own = found[(0, 2, 3)[number], 1:length]
        torch.testing.assert_close(own[mask], plain[mask], atol=1e-5, rtol=1e-5)
    assert bool((found[1][batch["loss_mask"][1]] < 0).all())  # the sampled placeholder is a token


def test_tiled_image_logprobs_match_transformers(tmp_path: Path) -> None:
    shutil.copytree(MODEL, tmp_path / "tiles")
    for path in (tmp_path / "tiles").glob("*processor_config.json"):
        about = json.loads(path.read_text())
        about.get("image_processor", about).update(do_image_splitting=True, size={"longest_edge": 64})
        path.write_text(json.dumps(about))
    processor = load_processor(str(tmp_path / "tiles"))
    wide = drawing("red", size=(200, 120))
    prompt = processor.prompt(question(), [wide])
    assert prompt.count(processor.token_id) == processor.pixels([wide]).placeholders == 5 * 4
    ids = torch.tensor([[*prompt, 9, 2]])
    batch = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids, dtype=torch.bool),
        "loss_mask": torch.arange(ids.shape[1])[None] >= len(prompt),
        "images": torch.tensor([images_key([wide])]),
    }
    made = FSDPEngine(config(tmp_path / "tiles"), ALONE)
    made.see_images({images_key([wide]): (wide,)}, batch)
    found = made.forward(batch, lambda outputs, micro: outputs.logprobs)[0, len(prompt) :]
    plain = plain_logprobs(ids[0].tolist(), [wide], tmp_path / "tiles").gather(1, ids[0, 1:, None])[-2:, 0]
    torch.testing.assert_close(found, plain, atol=1e-5, rtol=1e-5)


def test_single_row_micro_batches_match_whole_gradient() -> None:
    from areal.api.cli_args import MicroBatchSpec

    norms = []
    for spec in (MicroBatchSpec(), MicroBatchSpec(n_mbs=5)):
        made = engine(mb_spec=spec)
        made.see_images(IMAGES, rows())
        norms.append(made.train_batch(rows(), sft, tokens).grad_norm)
    assert norms[1] == pytest.approx(norms[0], rel=1e-4)


@pytest.mark.parametrize("frozen", [False, True])
def test_update_changes_vision_tower_unless_frozen(frozen: bool) -> None:
    made = engine(freeze_vision_tower=frozen)
    made.see_images(IMAGES, rows())
    before = {name: tensor.clone() for name, tensor in made.named_tensors()}
    made.train_batch(rows(), sft, tokens)
    changed = {name for name, tensor in made.named_tensors() if not tensor.equal(before[name])}
    assert any("connector" in name for name in changed) and any("text_model" in name for name in changed)
    assert any("vision_model" in name for name in changed) is not frozen


def test_published_names_match_model_folder(trained: FSDPEngine) -> None:
    with safe_open(MODEL / "model.safetensors", "pt") as file:
        assert {name for name, _ in trained.named_tensors()} == set(file.keys())


def test_checkpoint_and_saved_model_hold_the_whole_model(trained: FSDPEngine, tmp_path: Path) -> None:
    trained.save_model(tmp_path / "model", str(MODEL))
    trained.save_checkpoint(tmp_path / "checkpoint")
    again = FSDPEngine(config(tmp_path / "model"), ALONE, total_steps=4)
    again.load_checkpoint(tmp_path / "checkpoint")
    again.see_images(IMAGES, rows())
    one, other = (each.forward(rows(), lambda outputs, micro: outputs.logprobs) for each in (trained, again))
    torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def test_placeholders_without_images_are_refused(trained: FSDPEngine) -> None:
    batch = rows()
    batch["images"][2] = 0
    with pytest.raises(UsageFault, match="row 2 of the batch has placeholders of images in its prompt, and no images"):
        trained.see_images(IMAGES, batch)
    del batch["images"]
    with pytest.raises(AssertionError, match="the column images of the batch is lost"):
        trained.forward(batch, lambda outputs, micro: outputs.logprobs)
    with pytest.raises(UsageFault, match="row 0 of the batch has placeholders"):
        trained.see_images({}, batch)
    trained.see_images(IMAGES, rows())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_lora": True}, "use_lora: adapters of vision-language models"),
        ({"is_critic": True}, "no AutoModelForTokenClassification of the model type idefics3"),
    ],
)
def test_unsupported_vision_setting_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageFault, match=message):
        engine(**changes)


def test_freezing_tower_of_text_model_is_refused(tmp_path: Path) -> None:
    from tests.training.engines.models import save_model

    with pytest.raises(UsageFault, match="freeze_vision_tower: LlamaForCausalLM has no vision tower"):
        FSDPEngine(config(save_model(tmp_path / "text"), freeze_vision_tower=True), ALONE)
    text = FSDPEngine(config(tmp_path / "text"), ALONE)
    with pytest.raises(UsageFault, match="is trained on prompts with images, and has no vision tower"):
        text.see_images(IMAGES, rows())


def episode(images: tuple[bytes, ...], number: int, keys: list[int] | None) -> Rollout:
    trajectory = {
        "input_ids": torch.ones(2, 3, dtype=torch.int64),
        "attention_mask": torch.ones(2, 3, dtype=torch.bool),
        "loss_mask": torch.tensor([[0, 0, 1]] * 2),
        "logprobs": torch.zeros(2, 3),
        "rewards": torch.zeros(2),
    }
    if keys is not None:
        trajectory["images"] = torch.tensor(keys)
    item = EpisodeSpec(number, {"images": list(images)}, None, f"task-{number}")
    return Rollout(item, trajectory, 0, 0)


def test_images_of_a_batch_are_read_from_its_rows_and_checked() -> None:
    red, blue = images_key([RED]), images_key([BLUE])
    rollouts = [episode((RED,), 0, [red, red]), episode((), 1, None)]
    assert images_of(rollouts) == {red: (RED,)}
    assert to_batch(rollouts)[0]["images"].tolist() == [red, red, 0, 0]
    with pytest.raises(UsageFault, match="its row of the data set has other images"):
        images_of([episode((RED,), 0, [blue, blue])])
