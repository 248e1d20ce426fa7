"""Company changes nothing: neither logprobs, nor greedy text, nor what a seed draws."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from areal.services.inference.engines.embedded.scheduler import SchedulerLimits

from .support import VOCAB, Harness, gap, make_model

Start = Callable[..., Harness]


def prompts(count: int, longest: int = 40) -> list[list[int]]:
    draw = random.Random(7)
    return [[draw.randrange(3, VOCAB) for _ in range(draw.randrange(1, longest))] for _ in range(count)]


def test_greedy_text_of_mixed_batch_equals_generate(tmp_path: Path, start: Start) -> None:
    model = make_model(tmp_path, "Qwen2")
    sequences = start(tmp_path).run(*prompts(12), max_new_tokens=15, temperature=0.0)
    for sequence in sequences:
        ids = torch.tensor([sequence.prompt])
        expected = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=15,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert sequence.output == expected[0, ids.shape[1] :].tolist()


def test_logprobs_of_queue_longer_than_batch_match_plain_forward(llama: tuple[Path, Any], start: Start) -> None:
    folder, model = llama
    harness = start(folder)
    lengths = [1 + index % 9 for index in range(40)]
    sequences = [
        harness.submit(prompt, max_new_tokens=length, seed=index)
        for index, (prompt, length) in enumerate(zip(prompts(40), lengths, strict=True))
    ]
    harness.wait(*sequences)
    assert [sequence.produced for sequence in sequences] == lengths
    assert max(gap(model, sequence) for sequence in sequences) < 1e-4
    stats = harness.engine.stats().result()
    assert (stats.running, stats.waiting, stats.kv_used) == (0, 0, 0)


def test_sequence_alone_and_in_company_draws_the_same(llama: tuple[Path, Any], start: Start) -> None:
    folder, _ = llama
    alone = start(folder).run([5, 6, 7], max_new_tokens=24, seed=11, top_p=0.9)[0]
    crowded = start(folder)
    company = [crowded.submit(prompt, max_new_tokens=9, seed=index) for index, prompt in enumerate(prompts(5))]
    same = crowded.submit([5, 6, 7], max_new_tokens=24, seed=11, top_p=0.9)
    company += [crowded.submit(prompt, max_new_tokens=30, temperature=0.0) for prompt in prompts(5)]
    crowded.wait(same, *company)
    assert same.output == alone.output
    assert torch.allclose(torch.tensor(same.logprobs), torch.tensor(alone.logprobs), atol=1e-4)


def test_different_seeds_and_choices_draw_differently(llama: tuple[Path, Any], start: Start) -> None:
    harness = start(llama[0])
    sequences = [
        harness.submit([5, 6, 7], seed=seed, index=index, max_new_tokens=20) for seed in (1, 2) for index in (0, 1)
    ]
    harness.wait(*sequences)
    assert len({tuple(sequence.output) for sequence in sequences}) == 4


def test_sequence_joining_running_batch_matches_forward(llama: tuple[Path, Any], start: Start) -> None:
    folder, model = llama
    harness = start(folder)
    first = harness.submit([5, 6, 7], max_new_tokens=100)
    harness.wait(first, tokens=3)
    joined = harness.submit(range(3, 30), max_new_tokens=4)
    harness.wait(first, joined)
    assert max(gap(model, first), gap(model, joined)) < 1e-4


@pytest.mark.parametrize("prefill_tokens", [1, 7, 64])
def test_prompt_computed_in_chunks_matches_plain_forward(
    llama: tuple[Path, Any], start: Start, prefill_tokens: int
) -> None:
    folder, model = llama
    harness = start(
        folder, limits=SchedulerLimits(max_rows=4, max_length=128, kv_tokens=512, prefill_tokens=prefill_tokens)
    )
    sequences = harness.run(*prompts(6, 60), max_new_tokens=8)
    assert max(gap(model, sequence) for sequence in sequences) < 1e-4


def test_preempted_sequences_end_unchanged(llama: tuple[Path, Any], start: Start) -> None:
    folder, model = llama
    penalised: dict[str, Any] = {"max_new_tokens": 80, "frequency_penalty": 0.5, "repetition_penalty": 1.2}
    roomy, tight = start(folder), start(folder, limits=SchedulerLimits(max_rows=8, max_length=128, kv_tokens=260))
    expected = [roomy.submit(prompt, seed=index, **penalised) for index, prompt in enumerate(prompts(4, 20))]
    sequences = [tight.submit(prompt, seed=index, **penalised) for index, prompt in enumerate(prompts(4, 20))]
    roomy.wait(*expected)
    tight.wait(*sequences)
    assert tight.engine.stats().result().preemptions > 0
    assert [sequence.output for sequence in sequences] == [sequence.output for sequence in expected]
    assert max(gap(model, sequence) for sequence in sequences) < 1e-4
