"""A vision-language model: its tokens have the log-probabilities of transformers' own forward pass with the images."""

from __future__ import annotations

import asyncio
import copy
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from areal.dataset.vision import load_processor
from areal.services.http.errors import ApiError
from areal.services.inference.engines.embedded.loading import LoadedModel, inspect_folder, load_model
from areal.services.inference.engines.embedded.requests import make_sequences, read_images
from areal.services.inference.engines.embedded.scheduler import TokenSequence
from areal.wire.processes import EmbeddedEngineConfig
from areal.wire.sampling import SamplingParams
from tests.vision import MODEL, drawing, in_base64, plain_logprobs, plain_model, question

RED, BLUE = drawing("red"), drawing("blue")


@pytest.fixture(scope="module")
def loaded() -> Iterator[LoadedModel]:
    settings = EmbeddedEngineConfig(model_path=str(MODEL), threads=1, prefill_tokens=6)  # prompts are cut in parts
    found = load_model(inspect_folder(MODEL), settings, {}, lambda *_: None, lambda _: None, lambda _: None)
    assert found.images is not None, found.no_images
    yield found
    found.engine.close()


def prompt(*images: bytes) -> list[int]:
    return load_processor(str(MODEL)).prompt(question(), images)


def sample(loaded: LoadedModel, tokens: list[int], *images: bytes, **sampling: Any) -> list[TokenSequence]:
    """The choices for one prompt, sampled to their end."""
    pixels = asyncio.run(read_images([in_base64(each) for each in images], [tokens], loaded))
    settings = SamplingParams(**{"max_new_tokens": 6, "ignore_eos": True, "seed": 3, **sampling})
    sequences = make_sequences([tokens], settings, loaded, pixels=pixels)
    loaded.engine.submit(sequences).result()
    while not all(each.finish for each in sequences):
        loaded.engine.stats().result()  # returns between two steps
    return sequences


def gap(sequence: TokenSequence, *images: bytes, folder: Path = MODEL) -> float:
    """How far the engine's log-probabilities are from those of transformers."""
    tokens = [*sequence.prompt, *sequence.output]
    plain = plain_logprobs(tokens, images, folder)[len(sequence.prompt) - 1 :]
    own = plain.gather(1, torch.tensor(sequence.output)[:, None])[:, 0]
    return float((own - torch.tensor(sequence.logprobs)).abs().max())


def test_image_prompt_logprobs_match_transformers(loaded: LoadedModel) -> None:
    for images in ((RED,), (BLUE,), (RED, BLUE)):
        (one, other) = sample(loaded, prompt(*images), *images, n=2)
        assert max(gap(one, *images), gap(other, *images)) < 1e-4


def test_different_images_give_different_answers(loaded: LoadedModel) -> None:
    tokens = prompt(RED)
    (red,), (blue,), (again,) = (sample(loaded, tokens, image, max_new_tokens=1) for image in (RED, BLUE, RED))
    assert abs(red.logprobs[0] - again.logprobs[0]) < 1e-6
    assert gap(blue, BLUE) < 1e-4 < gap(blue, RED)


def test_prompt_without_its_images_is_text(loaded: LoadedModel) -> None:
    (sequence,) = sample(loaded, [5, 6, 7, 8])
    assert len(sequence.output) == 6


def test_sampled_placeholder_is_not_an_image(loaded: LoadedModel) -> None:
    pushed = {load_processor(str(MODEL)).token_id: 100.0}
    (sequence,) = sample(loaded, prompt(RED), RED, logit_bias=pushed, max_new_tokens=3)
    assert set(sequence.output) == set(pushed)
    assert all(logprob < 0 for logprob in sequence.logprobs)


def test_swapped_weights_change_image_embeddings(loaded: LoadedModel, tmp_path: Path) -> None:
    tokens = prompt(RED)
    sample(loaded, tokens, RED)
    other = copy.deepcopy(plain_model(MODEL))
    with torch.no_grad():
        for parameter in other.model.vision_model.parameters():
            parameter.mul_(1.5)
    other.save_pretrained(tmp_path)
    shutil.copy(MODEL / "processor_config.json", tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODEL / name, tmp_path)
    loaded.engine.load_weights(tmp_path / "model.safetensors", 1)
    (sequence,) = sample(loaded, tokens, RED)
    loaded.engine.load_weights(MODEL / "model.safetensors", 2)
    assert gap(sequence, RED, folder=tmp_path) < 1e-4 < gap(sequence, RED)


@pytest.mark.parametrize(
    ("images", "prompts", "message"),
    [
        (["!"], 1, "image_data has no such images: images[0] is not in base64"),
        ([in_base64(RED[:60])], 1, "image_data has no such images: images[0] cannot be decoded"),
        ([in_base64(RED)], 2, "goes with one prompt, not 2"),
        ([in_base64(RED)] * 2, 1, "stands for 8 tokens 4, and the prompt has 4"),
        ([in_base64(RED)] * 17, 1, "images has 17 images, and a prompt may have 16"),
    ],
)
def test_images_not_matching_prompt_are_refused_by_name(
    loaded: LoadedModel, images: Any, prompts: int, message: str
) -> None:
    with pytest.raises(ApiError) as refused:
        asyncio.run(read_images(images, [prompt(RED)] * prompts, loaded))
    assert message in refused.value.message and refused.value.param == "image_data"
