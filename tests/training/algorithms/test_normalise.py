"""Groups as they are, ranks as they come."""

import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from areal.api.cli_args import NormConfig
from areal.training.algorithms.advantages import normalize

GRPO = NormConfig("group", std_level="group")  # arXiv 2402.03300
DR_GRPO = NormConfig("group", std_level=None)  # arXiv 2503.20783
RLOO = NormConfig("group", mean_leave1out=True, std_level=None)

REWARDS = torch.tensor([1.0, 0.0, 0.0, 5.0, 7.0, 3.0])
GROUPS = torch.tensor([4, 4, 4, 9, 9, 2])
ONES = torch.ones(6)


def test_grpo_ragged_groups_are_normalised_each_over_its_own_members() -> None:
    got = normalize(REWARDS, ONES, GROUPS, GRPO).tolist()
    for members in ([0, 1, 2], [3, 4]):
        values = [REWARDS[i].item() for i in members]
        for i in members:
            want = (REWARDS[i].item() - statistics.mean(values)) / (statistics.stdev(values) + 1e-5)
            assert got[i] == pytest.approx(want, abs=1e-6)
    assert got[5] == 0.0


def test_dr_grpo_only_centres() -> None:
    got = normalize(REWARDS, ONES, GROUPS, DR_GRPO)
    torch.testing.assert_close(got, torch.tensor([2 / 3, -1 / 3, -1 / 3, -1.0, 1.0, 0.0]))


def test_rloo_compares_each_with_the_mean_of_the_others() -> None:
    got = normalize(REWARDS, ONES, GROUPS, RLOO)
    torch.testing.assert_close(got, torch.tensor([1.0, -0.5, -0.5, -2.0, 2.0, 0.0]))


def test_equal_rewards_of_a_group_give_no_advantage() -> None:
    assert normalize(torch.full((4,), 0.1), torch.ones(4), torch.zeros(4, dtype=torch.long), GRPO).abs().max() < 1e-9


def test_masked_tokens_neither_count_nor_get_a_value() -> None:
    values = torch.tensor([[1.0, 100.0], [3.0, 5.0]])
    mask = torch.tensor([[1, 0], [1, 1]])
    got = normalize(values, mask, torch.zeros(2, dtype=torch.long), NormConfig("batch", std_level="batch"))
    assert got[0, 1] == 0
    torch.testing.assert_close(got[mask.bool()], torch.tensor([-2.0, 0.0, 2.0]) / (2.0 + 1e-5))


@given(
    st.lists(st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=5), min_size=2, max_size=6),
    st.sampled_from(["batch", "group", None]),
    st.sampled_from(["batch", "group", None]),
)
def test_any_split_over_ranks_gives_the_values_of_one_rank(groups, mean, std) -> None:
    how = NormConfig(mean, std_level=std)
    values = torch.tensor([value for group in groups for value in group])
    ids = torch.tensor([number for number, group in enumerate(groups) for _ in group])
    whole = normalize(values, torch.ones_like(values), ids, how)
    half = len(groups) // 2
    ranks = [ids < half, ids >= half]

    # Each rank's reductions, in order, are recorded and then answered with the sum of both.
    asked: list[list[torch.Tensor]] = []
    answers: list[torch.Tensor] = []
    while True:
        asked = []
        outs = []
        for rank in ranks:
            mine: list[torch.Tensor] = []

            def reduce(sums: torch.Tensor, mine: list[torch.Tensor] = mine) -> torch.Tensor:
                mine.append(sums)
                return answers[len(mine) - 1] if len(mine) <= len(answers) else sums

            outs.append(normalize(values[rank], torch.ones_like(values[rank]), ids[rank], how, reduce))
            asked.append(mine)
        assert len(asked[0]) == len(asked[1])
        if len(answers) == len(asked[0]):
            break
        answers.append(asked[0][len(answers)] + asked[1][len(answers)])
    torch.testing.assert_close(torch.cat(outs), whole, rtol=1e-4, atol=1e-4)
