"""GRPO on the quickstart's task at temperatures other than 1: what is sampled at T has to be trained at T."""

from __future__ import annotations

import json
import statistics
from dataclasses import replace

import pytest

from tests.e2e.conftest import ROOT, Box

STEPS = 350


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.4])
def test_grpo_learns_at_every_temperature(box: Box, temperature: float, seed: int) -> None:
    box = replace(box, folder=ROOT)
    done = box.areal(
        *("train", "run", "--config", "examples/reverse_digits/grpo.yaml"),
        *(f"seed={seed}", f"gconfig.temperature={temperature}"),
        *("eval_gconfig={greedy: true, max_new_tokens: 8}", f"total_train_steps={STEPS}", "rollout.dump_to_file=false"),
        timeout=1700,
    )
    assert done.code == 0, done.text
    (metrics,) = box.home.rglob("metrics.jsonl")
    steps = [json.loads(line) for line in metrics.read_text().splitlines()]
    rewards = [step["reward/mean"] for step in steps if step["step"]]  # step 0 is an evaluation
    accuracy = steps[-1]["eval/reward/mean"]
    print(f"T {temperature} seed {seed}: {statistics.mean(rewards[:5]):.3f} -> {statistics.mean(rewards[-20:]):.3f}, ")
    print(f"greedy answers right: {steps[0]['eval/reward/mean']:.3f} -> {accuracy:.3f}")
    assert len(rewards) == STEPS
    assert (statistics.mean(rewards[-20:]) if temperature <= 1 else accuracy) >= 0.9
