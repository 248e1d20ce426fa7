"""The statistics of a job's own evaluation: those of ``areal eval``."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from areal.api.cli_args import EvaluatorConfig
from areal.rollout.evaluation import PromptScores, pass_estimate, reward_estimate
from areal.training.trainers.rollouts import Validation

REWARDS = [(1.0, 0.0), (1.0, 1.0), (0.0, 0.0), (0.5, 1.0), (0.0, 1.0)]


def group(rewards: tuple[float, ...], truncated: bool = False) -> Any:
    mask = torch.ones(len(rewards), 4, dtype=torch.int64)
    mask[:, :2] = 0
    cut = torch.tensor([truncated] * len(rewards))
    return SimpleNamespace(trajectory={"rewards": torch.tensor(rewards), "loss_mask": mask, "truncated": cut})


def test_validation_intervals_match_evaluation() -> None:
    validation = Validation(EvaluatorConfig(pass_threshold=0.5, confidence=0.9), samples=2)
    validation.add([group(each) for each in REWARDS[:2]])
    validation.add([group(each, truncated=True) for each in REWARDS[2:]])
    found = validation.metrics(prompts=6)
    scores = [PromptScores(str(number), number, each) for number, each in enumerate(REWARDS)]
    for k in (1, 2):
        estimate = pass_estimate(scores, k, 0.5, 0.9)
        assert estimate is not None
        names = ("mean", "low", "high")
        expected = (estimate.value, estimate.low, estimate.high)
        assert [found[f"pass@{k}/{name}"] for name in names] == pytest.approx(expected)
    reward = reward_estimate(scores, 0.9)
    names = ("mean", "low", "high")
    assert [found[f"reward/{name}"] for name in names] == pytest.approx([reward.value, reward.low, reward.high])
    assert (found["rollouts"], found["failed"]) == (10, 2)
    assert [found["length/mean"], found["length/truncated"]] == pytest.approx([2, 0.6])
    line = validation.summary(found)
    assert "pass@1 0.6000 (" in line and "10 samples, 2 failed" in line


def test_validation_of_one_prompt_has_no_interval() -> None:
    validation = Validation(EvaluatorConfig(), samples=1)
    assert math.isnan(validation.metrics(3)["reward/mean"]) and validation.metrics(3)["failed"] == 3
    validation.add([group((1.0,))])
    assert "reward/low" not in validation.metrics(1)
    assert validation.metrics(1)["pass@1/mean"] == 1
