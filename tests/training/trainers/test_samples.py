"""Samples of several turns in the batch of a step: their numbers, and their rewards."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from areal.api.cli_args import NormConfig, PPOActorConfig
from areal.rollout.staleness import EpisodeSpec, Rollout
from areal.training.algorithms.advantages import AuxiliaryOutputs, prepare
from areal.training.trainers.ppo import has_reward_spread
from areal.training.trainers.rollouts import sample_rewards, to_batch


def trajectory(rewards: list[float], samples: list[int] | None = None, given: list[float] | None = None) -> Any:
    size = len(rewards)
    columns = {
        "input_ids": torch.arange(3).expand(size, 3),
        "attention_mask": torch.ones(size, 3, dtype=torch.bool),
        "loss_mask": torch.tensor([[0, 1, 1]]).expand(size, 3),
        "logprobs": torch.full((size, 3), -1.0),
        "rewards": torch.tensor(rewards),
    }
    if samples is not None:
        columns["sample_ids"] = torch.tensor(samples, dtype=torch.int32)
    if given is not None:
        columns["original_rewards"] = torch.tensor(given)
    return columns


# Three games of one prompt: won in the first turn, lost in three turns, won in two.
GAMES = trajectory([1.0, 0.0, 0.0, 0.0, 1.0, 1.0], [0, 1, 1, 1, 4, 4], [1.0, 0.0, 0.0, 0.0, 0.0, 1.0])


@pytest.mark.parametrize(
    ("given", "rewards"),
    [
        (GAMES, [1.0, 0.0, 1.0]),
        (trajectory([0.9, 1.0, 0.0], [3, 3, 1], [0.0, 1.0, 0.0]), [0.0, 1.0]),  # before the discount
        (trajectory([1.0, 1.0, 0.0], [0, 0, 1]), [1.0, 0.0]),
        (trajectory([0.5, 0.25, 0.0]), [0.5, 0.25, 0.0]),
        (trajectory([0.81, 0.9, 1.0], [0, 0, 0], [0.0, 0.0, 1.0]), [1.0]),
    ],
)
def test_sample_reward_is_computed(given: Any, rewards: list[float]) -> None:
    assert sample_rewards(given).tolist() == rewards


@pytest.mark.parametrize(
    ("given", "differ"),
    [
        (GAMES, True),
        (trajectory([0.81, 0.9, 1.0, 1.0], [0, 0, 0, 1], [0.0, 0.0, 1.0, 1.0]), False),  # both were won
        (trajectory([0.0, 0.0, 0.0], [0, 0, 1]), False),
        (trajectory([1.0, 0.0]), True),
        (trajectory([0.0, 1.0], [0, 0], [0.0, 1.0]), True),  # the turns of the only sample
    ],
)
def test_dynamic_sampling_keeps_groups_with_reward_spread(given: Any, differ: bool) -> None:
    assert has_reward_spread(given) is differ


def rollout(columns: Any) -> Rollout:
    return Rollout(EpisodeSpec(0, {}, None, "0"), columns, head_version=0, tail_version=0)


def test_samples_are_numbered_across_batch_and_counted_once() -> None:
    batch, groups = to_batch([rollout(GAMES), rollout(trajectory([2.0, 0.0], [0, 1]))])
    assert groups.tolist() == [0, 0, 0, 0, 0, 0, 1, 1]
    assert batch["sample_ids"].tolist() == [0, 1, 1, 1, 2, 2, 3, 4]
    norm = NormConfig(mean_level="group", std_level=None)
    got = prepare(batch, groups, PPOActorConfig(kl_ctl=0.0, reward_norm=norm, adv_norm=None), AuxiliaryOutputs())
    third = 1 / 3
    assert got["shaped_rewards"].tolist() == pytest.approx(
        [third, -2 * third, -2 * third, -2 * third, third, third, 1.0, -1.0]
    )


def test_single_row_samples_need_no_sample_ids() -> None:
    batch, _ = to_batch([rollout(trajectory([1.0, 0.0])), rollout(trajectory([1.0, 0.0], [0, 1]))])
    assert "sample_ids" not in batch
    alone, _ = to_batch([rollout(trajectory([1.0, 0.0], [0, 0]))])
    assert "sample_ids" not in alone, "the turns of a group's only sample are compared with each other"
