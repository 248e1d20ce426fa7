"""The numbers of docs/training.md's table "Numbers that differ from AReaL's", one test for each of its rows."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from areal.api.cli_args import (
    GenerationHyperparameters,
    GRPOConfig,
    NormConfig,
    PPOActorConfig,
    RejectionSamplingConfig,
)
from areal.api.io_struct import ModelResponse
from areal.rollout.tensors import RewardedResponse, response_rows
from areal.training.algorithms.actor import correction
from areal.training.algorithms.advantages import AuxiliaryOutputs, normalize, prepare
from tests.services.processes import REPOSITORY

PAGE = REPOSITORY / "docs" / "training.md"
BY_GROUP = NormConfig("group", std_level="group", eps=1e-12)


def normalized(
    rewards: list[float], groups: list[int], norm: NormConfig, samples: list[int] | None = None
) -> list[float]:
    values = torch.tensor(rewards)
    numbers = None if samples is None else torch.tensor(samples)
    return normalize(values, torch.ones_like(values), torch.tensor(groups), norm, samples=numbers).tolist()


def test_table_rows_match_tests() -> None:
    table = PAGE.read_text().split("Numbers that differ from AReaL's")[1].split("\n\n")[1]
    assert [row.split("|")[1].strip().replace("`", "") for row in table.splitlines()[2:]] == [
        "reward_norm, adv_norm by group",
        "the same with one sample",
        "by batch",
        "rejection_sampling.level: sequence",
        "rejection_sampling.agg: max",
        "the version of a token",
        "truncated answers",
        "eval_gconfig that leaves fields out",
    ]


def test_group_norm_counts_each_sample_once() -> None:
    short = normalized([1.0, 0.0, 0.0, 1.0, 3.0], [0, 0, 0, 1, 1], BY_GROUP)
    deviation = math.sqrt(1 / 3)  # of 1, 0, 0, unbiased
    assert short == pytest.approx(
        [2 / 3 / deviation, -1 / 3 / deviation, -1 / 3 / deviation, -math.sqrt(0.5), math.sqrt(0.5)]
    )
    # A sample of three turns is one of two samples: the mean of 1 and 0 is 0.5, that of the four rows would be 0.75.
    of_turns = normalized([1.0, 1.0, 1.0, 0.0], [0] * 4, NormConfig("group", std_level=None), [0, 0, 0, 1])
    assert of_turns == [0.5, 0.5, 0.5, -0.5]


def test_group_norm_of_one_sample_is_zero() -> None:
    assert normalized([5.0, 3.0], [0, 1], BY_GROUP) == [0.0, 0.0]


def test_batch_norm_covers_all_ranks() -> None:
    norm = NormConfig("batch", std_level="batch", eps=1e-12)
    whole = normalized([0.0, 1.0, 2.0, 3.0], [0, 0, 1, 1], norm)
    other = iter([torch.tensor([2.0, 5.0]), torch.tensor([2.0, 5.0]), torch.tensor([2.0, 2.5])])
    ones, groups = torch.ones(2), torch.tensor([0, 0])
    shared = normalize(torch.tensor([0.0, 1.0]), ones, groups, norm, reduce=lambda sums: sums + next(other))
    assert shared.tolist() == pytest.approx(whole[:2])


def weights(rejection: RejectionSamplingConfig, log_ratios: list[float]) -> Tensor:
    behavior = torch.full((1, len(log_ratios)), -2.0)
    mask = torch.ones_like(behavior)
    return correction(behavior + torch.tensor([log_ratios]), behavior, mask, rejection).weights[0]


def test_sequence_level_weighs_and_rejects_whole_sequence() -> None:
    def of(agg: Any, upper: float) -> list[float]:
        rejection = RejectionSamplingConfig(level="sequence", agg=agg, upper=upper)
        return weights(rejection, [0.0, math.log(4.0)]).tolist()

    assert of("mean", 5.0) == pytest.approx([2.0, 2.0])  # the geometric mean of 1 and 4
    assert of("sum", 5.0) == pytest.approx([4.0, 4.0])
    assert of("mean", 1.5) == [0.0, 0.0]


def test_agg_max_is_refused() -> None:
    with pytest.raises(ValueError, match="largest ratio"):
        RejectionSamplingConfig(level="sequence", agg="max")


def test_token_version_and_logprob_are_aligned() -> None:
    response = ModelResponse(
        input_tokens=[5, 6],
        output_tokens=[7, 8],
        output_logprobs=[-0.5, -0.25],
        output_versions=[3, 4],
        stop_reason="stop",
    )
    rows = response_rows([RewardedResponse(response, 1.0)])
    assert rows["input_ids"].tolist() == [[5, 6, 7, 8]]
    assert rows["versions"].tolist() == [[-1, -1, 3, 4]]
    assert rows["logprobs"].tolist() == [[0.0, 0.0, -0.5, -0.25]]


def test_truncation_is_taken_from_engine_not_length() -> None:
    batch = {
        "loss_mask": torch.tensor([[0, 1, 1, 1], [0, 1, 1, 0]]),
        "rewards": torch.tensor([1.0, 1.0]),
        "logprobs": torch.zeros(2, 4),
        "truncated": torch.tensor([False, True]),
    }
    config = PPOActorConfig(mask_truncated_completions=True)
    found = prepare(batch, torch.tensor([0, 1]), config, AuxiliaryOutputs(None, None, None))
    assert found["loss_mask"].tolist() == [[0, 1, 1, 1], [0, 0, 0, 0]]


def test_evaluation_inherits_unset_fields_from_training() -> None:
    gconfig = GenerationHyperparameters(n_samples=8, max_new_tokens=64, top_k=5)
    config = GRPOConfig(experiment_name="e", trial_name="t", gconfig=gconfig)
    assert config.eval_gconfig == gconfig.new(n_samples=1)
    given = GRPOConfig.completed({"gconfig": {"n_samples": 8, "top_k": 5}, "eval_gconfig": {"temperature": 0.6}})
    assert given["eval_gconfig"] == {"top_k": 5, "temperature": 0.6}
