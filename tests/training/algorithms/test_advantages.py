"""Rewards, their normalization over groups and ranks, and estimation over tokens and turns against the recursion."""

import math
import statistics
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from areal.api.cli_args import NormConfig, PPOActorConfig
from areal.training.algorithms.advantages import (
    KLController,
    clipped_share,
    gae_by_token,
    gae_by_turn,
    kl_estimate,
    longest_turns,
    normalize,
    shape_rewards,
    token_rewards,
)

OVERLONG: dict[str, Any] = {"overlong_reward_penalty": True, "overlong_tokens": 4, "max_new_tokens": 10}


def test_shaped_scales_after_bias_and_clips_last() -> None:
    config = PPOActorConfig(reward_scaling=10, reward_bias=-0.5, reward_clip=20)
    got = shape_rewards(torch.tensor([1.0, 0.0, 9.0]), torch.zeros(3), config)
    assert got.tolist() == [5.0, -5.0, 20.0]
    assert clipped_share(torch.tensor([1.0, 0.0, 9.0, -2.0]), config) == 0.5
    assert clipped_share(torch.tensor([2.5, -1.5]), config) == 0.0  # at the bound


def test_overlong_penalty_is_proportional_to_excess() -> None:
    config = PPOActorConfig(**OVERLONG, overlong_penalty_factor=2.0)
    got = shape_rewards(torch.ones(4), torch.tensor([6, 7, 8, 10]), config)
    assert got.tolist() == [1.0, 0.5, 0.0, -1.0]


def dapo_punishment(length: int, longest: int, buffer: int) -> float:
    """R_length of DAPO (arXiv 2503.14476, eq. 13), case by case."""
    if length <= longest - buffer:
        return 0.0
    if length <= longest:
        return ((longest - buffer) - length) / buffer
    return -1.0


@pytest.mark.parametrize("factor", [0.0, 0.5, 1.0])
def test_overlong_penalty_is_added_before_bias_scale_and_clip(factor: float) -> None:
    config = PPOActorConfig(
        **OVERLONG, reward_scaling=10, reward_bias=-0.5, reward_clip=12, overlong_penalty_factor=factor
    )
    lengths = [0, 6, 7, 9, 10, 11]
    got = shape_rewards(torch.ones(6), torch.tensor(lengths), config)
    want = [max(-12.0, (1.0 + factor * dapo_punishment(length, 10, 4) - 0.5) * 10) for length in lengths]
    assert got.tolist() == pytest.approx(want)


def test_overlong_penalty_without_limit_is_an_error() -> None:
    with pytest.raises(ValueError, match="max_new_tokens"):
        shape_rewards(torch.ones(1), torch.ones(1), PPOActorConfig(overlong_reward_penalty=True, overlong_tokens=4))


@pytest.mark.parametrize(("longest", "buffer"), [(20, 4), (9, 1), (4, 1)])
def test_overlong_penalty_begins_at_a_fifth_before_the_limit_by_default(longest: int, buffer: int) -> None:
    config = PPOActorConfig(overlong_reward_penalty=True, max_new_tokens=longest)
    lengths = list(range(longest + 2))
    got = shape_rewards(torch.zeros(len(lengths)), torch.tensor(lengths), config)
    assert got.tolist() == pytest.approx([dapo_punishment(length, longest, buffer) for length in lengths])


def test_kl_estimates_of_single_tokens_follow_their_formulas() -> None:
    logprobs, reference = torch.tensor([-1.0, -1.0]), torch.tensor([-3.0, 0.0])
    assert kl_estimate(logprobs, reference).tolist() == [2.0, -1.0]
    assert kl_estimate(logprobs, reference, "k2").tolist() == [2.0, 0.5]
    third = [math.exp(-2) - 1 + 2, math.exp(1) - 1 - 1]
    assert kl_estimate(logprobs, reference, "k3").tolist() == pytest.approx(third)


def test_kl_estimators_converge_to_divergence() -> None:
    generator = torch.Generator().manual_seed(0)
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.4, 0.4, 0.2])
    drawn = torch.multinomial(p, 200_000, replacement=True, generator=generator)
    exact = (p * (p / q).log()).sum()
    for estimator in ("k1", "k3"):
        assert kl_estimate(p.log()[drawn], q.log()[drawn], estimator).mean() == pytest.approx(exact.item(), abs=2e-3)
    assert (kl_estimate(p.log()[drawn], q.log()[drawn], "k2") >= 0).all()


def test_token_reward_is_on_last_generated_token() -> None:
    mask = torch.tensor([[0, 1, 1, 0], [0, 0, 0, 0], [0, 1, 0, 1]])
    got = token_rewards(torch.tensor([2.0, 3.0, 4.0]), mask, torch.full((3, 4), 0.5))
    assert got.tolist() == [[0, -0.5, 1.5, 0], [0, 0, 0, 0], [0, -0.5, 0, 3.5]]


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_estimate_is_finite_for_distant_reference(estimator) -> None:
    for away in (40.0, 1e4):
        logprobs = torch.tensor([-away - 1.0], requires_grad=True)
        kl_estimate(logprobs, torch.tensor([-1.0]), estimator).sum().backward()
        assert logprobs.grad is not None and torch.isfinite(logprobs.grad).all()
        assert (logprobs.grad < 0).all() or estimator == "k1"


GRPO = NormConfig("group", std_level="group")  # arXiv 2402.03300
DR_GRPO = NormConfig("group", std_level=None)  # arXiv 2503.20783
RLOO = NormConfig("group", mean_leave1out=True, std_level=None)

REWARDS = torch.tensor([1.0, 0.0, 0.0, 5.0, 7.0, 3.0])
GROUPS = torch.tensor([4, 4, 4, 9, 9, 2])
ONES = torch.ones(6)


def test_grpo_normalises_ragged_groups_separately() -> None:
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


def test_rloo_subtracts_mean_of_other_samples() -> None:
    got = normalize(REWARDS, ONES, GROUPS, RLOO)
    torch.testing.assert_close(got, torch.tensor([1.0, -0.5, -0.5, -2.0, 2.0, 0.0]))


def test_equal_rewards_of_a_group_give_no_advantage() -> None:
    assert normalize(torch.full((4,), 0.1), torch.ones(4), torch.zeros(4, dtype=torch.long), GRPO).abs().max() < 1e-9


@pytest.mark.parametrize("how", [GRPO, DR_GRPO, RLOO, NormConfig("batch", mean_leave1out=True, std_level=None)])
def test_single_sample_of_several_turns_has_no_advantage(how: NormConfig) -> None:
    rewards, samples = torch.tensor([0.0, 0.0, 3.0]), torch.tensor([5, 5, 5])
    got = normalize(rewards, torch.ones(3), torch.zeros(3, dtype=torch.long), how, samples=samples)
    assert got.tolist() == [0.0, 0.0, 0.0]


def test_batch_of_one_value_has_no_advantage() -> None:
    got = normalize(torch.tensor([4.0]), torch.ones(1), torch.zeros(1, dtype=torch.long), NormConfig("batch"))
    assert got.tolist() == [0.0]


def test_values_that_are_not_centred_are_divided_by_their_deviation() -> None:
    values, mask = torch.tensor([[1.0, 2.0, 9.0], [3.0, 9.0, 4.0]]), torch.tensor([[1, 1, 0], [1, 0, 1]])
    groups = torch.zeros(2, dtype=torch.long)
    biased = NormConfig(None, std_level="batch", std_unbiased=False)
    for how, deviation in ((biased, statistics.pstdev), (NormConfig(None), statistics.stdev)):
        got = normalize(values, mask, groups, how)
        torch.testing.assert_close(got, values * mask / (deviation([1.0, 2.0, 3.0, 4.0]) + 1e-5))


def test_small_differences_of_a_group_are_kept() -> None:
    got = normalize(torch.tensor([0.0, 1e-6]), torch.ones(2), torch.zeros(2, dtype=torch.long), GRPO)
    half = 5e-7 / (5e-7 * 2**0.5 + 1e-5)
    assert got.tolist() == pytest.approx([-half, half], rel=1e-3)


def test_masked_tokens_are_not_counted_and_get_no_value() -> None:
    values = torch.tensor([[1.0, 100.0], [3.0, 5.0]])
    mask = torch.tensor([[1, 0], [1, 1]])
    got = normalize(values, mask, torch.zeros(2, dtype=torch.long), NormConfig("batch", std_level="batch"))
    assert got[0, 1] == 0
    torch.testing.assert_close(got[mask.bool()], torch.tensor([-2.0, 0.0, 2.0]) / (2.0 + 1e-5))


@given(
    st.lists(
        st.lists(st.tuples(st.floats(-100, 100, width=32), st.integers(1, 4)), min_size=1, max_size=5),
        min_size=1,
        max_size=4,
    ),
    st.sampled_from([GRPO, DR_GRPO, RLOO, NormConfig("batch", std_level="batch"), NormConfig("batch", True, "group")]),
)
def test_multi_turn_sample_has_same_advantage_as_single_row(groups, how: NormConfig) -> None:
    samples = [(reward, turns, group) for group, members in enumerate(groups) for reward, turns in members]
    rewards, turns, numbers = (torch.tensor(column) for column in zip(*samples, strict=True))
    whole = normalize(rewards, torch.ones(len(samples)), numbers, how)
    rows = torch.repeat_interleave(torch.arange(len(samples)), turns)
    got = normalize(rewards[rows], torch.ones(len(rows)), numbers[rows], how, samples=rows)
    torch.testing.assert_close(got, whole[rows], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("mean", ["batch", None])
def test_group_of_equal_rewards_has_zero_group_advantage(mean: Any) -> None:
    rewards, groups = torch.tensor([1.0, 1.0, 0.1 + 0.2, 0.3, 0.0, 1.0]), torch.tensor([0, 0, 1, 1, 2, 2])
    got = normalize(rewards, torch.ones(6), groups, NormConfig(mean, std_level="group"))
    assert got[:4].tolist() == [0.0] * 4 and got[4:].abs().max() < 3


def test_longest_answer_is_per_turn() -> None:
    mask = torch.tensor([[0, 1, 1, 0, 1, 1, 1], [0, 1, 0, 0, 0, 0, 0]])
    turns = torch.tensor([[-1, 0, 0, -1, 1, 1, 1], [-1, 0, -1, -1, -1, -1, -1]])
    assert longest_turns(mask, turns).tolist() == [3, 1]
    assert longest_turns(mask, None).tolist() == [5, 1]


def test_turn_rewards_are_compared_with_other_samples() -> None:
    rewards = torch.tensor([0.0, 0.0, 3.0, 5.0])  # a sample of three turns, and one of one
    same, samples = torch.zeros(4, dtype=torch.long), torch.tensor([7, 7, 7, 2])
    got = normalize(rewards, torch.ones(4), same, RLOO, samples=samples)
    torch.testing.assert_close(got, torch.tensor([-5.0, -5.0, -2.0, 4.0]))
    centred = normalize(rewards, torch.ones(4), same, DR_GRPO, samples=samples)
    torch.testing.assert_close(centred, torch.tensor([-3.0, -3.0, 0.0, 2.0]))  # the mean of 1 and 5
    deviation = ((9 + 9 + 0) / 3 + 4) ** 0.5
    scaled = normalize(rewards, torch.ones(4), same, GRPO, samples=samples)
    torch.testing.assert_close(scaled, centred / (deviation + 1e-5))


@pytest.mark.parametrize("how", [GRPO, DR_GRPO, RLOO, NormConfig("batch", std_level="batch")])
def test_fully_masked_group_gets_zeros(how: NormConfig) -> None:
    mask = torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0, 1.0])
    got = normalize(REWARDS, mask, GROUPS, how)
    assert got.isfinite().all() and got[3:5].tolist() == [0.0, 0.0]
    assert not normalize(REWARDS, torch.zeros(6), GROUPS, how).any()


@given(
    st.lists(st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=5), min_size=2, max_size=6),
    st.sampled_from(["batch", "group", None]),
    st.sampled_from(["batch", "group", None]),
)
def test_normalisation_is_independent_of_rank_split(groups, mean, std) -> None:
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


def _reference(rewards, values, mask, discount, lam, bootstrap):
    steps = [t for t, active in enumerate(mask) if active]
    out = [0.0] * len(mask)
    carried, upcoming = 0.0, bootstrap
    for t in reversed(steps):
        delta = rewards[t] + discount * upcoming - values[t]
        carried = delta + discount * lam * carried
        out[t], upcoming = carried, values[t]
    return out


_ROW = st.lists(
    st.tuples(st.floats(-5, 5, width=32), st.floats(-5, 5, width=32), st.booleans()), min_size=1, max_size=8
)


@given(_ROW, st.floats(0, 1), st.floats(0, 1), st.floats(-3, 3, width=32))
def test_gae_by_token_follows_recursion(row, discount, lam, bootstrap) -> None:
    rewards, values, mask = (torch.tensor([[item[n] for item in row]], dtype=torch.float32) for n in range(3))
    got = gae_by_token(rewards, values, mask, discount=discount, gae_lambda=lam, bootstrap=torch.tensor([bootstrap]))
    want = _reference(rewards[0].tolist(), values[0].tolist(), mask[0].tolist(), discount, lam, bootstrap)
    assert got.advantages[0].tolist() == pytest.approx(want, rel=1e-4, abs=1e-3)
    torch.testing.assert_close(got.returns, (got.advantages + values) * mask)


def test_gae_by_turn_has_one_advantage_per_turn() -> None:
    turns = torch.tensor([[-1, 0, 0, -1, 1, 1, -1]])
    mask = (turns >= 0).float()
    rewards = torch.tensor([[0, 0, 1.0, 0, 0, 2.0, 0]])
    values = torch.tensor([[9, 0.5, 7, 9, 0.25, 7, 9]])
    got = gae_by_turn(rewards, values, mask, turns, discount=0.9, gae_lambda=0.8)
    second = 2.0 - 0.25
    first = 1.0 + 0.9 * 0.25 - 0.5 + 0.9 * 0.8 * second
    torch.testing.assert_close(got.advantages, torch.tensor([[0, first, first, 0, second, second, 0]]))
    torch.testing.assert_close(got.returns[0, 1:3], torch.tensor([first + 0.5] * 2))


def test_gae_by_turn_of_single_turn_is_reward_minus_value() -> None:
    turns = torch.tensor([[-1, 0, 0]])
    rewards, values = torch.tensor([[0, 0.5, 1.0]]), torch.tensor([[9.0, 0.25, 7.0]])
    got = gae_by_turn(rewards, values, (turns >= 0).float(), turns, discount=0.9, gae_lambda=0.8)
    torch.testing.assert_close(got.advantages, torch.tensor([[0, 1.25, 1.25]]))


def test_gae_by_turn_without_generation_is_zero() -> None:
    turns = torch.full((2, 3), -1)
    got = gae_by_turn(torch.zeros(2, 3), torch.ones(2, 3), torch.zeros(2, 3), turns, discount=1.0, gae_lambda=1.0)
    assert got.advantages.abs().sum() == 0


def test_kl_coefficient_follows_ziegler_et_al() -> None:
    controller = KLController(target=0.1, horizon=100)
    coefficient = 1.0
    for kl in (0.05, 0.11, 0.2, 0.1, -0.3):
        error = max(-0.2, min(0.2, (kl - 0.1) / 0.1))
        coefficient *= 1 + error * 16 / 100
        controller.update(kl, 16)
        assert controller.factor == pytest.approx(coefficient)


def test_kl_coefficient_stays_positive_beyond_horizon() -> None:
    controller = KLController(target=0.1, horizon=1)
    controller.update(0.0, 16)
    assert controller.factor == pytest.approx(0.8)
    controller.update(9.0, 16)
    assert controller.factor == pytest.approx(0.8 * 1.2)


def test_kl_coefficient_without_target_is_constant() -> None:
    controller = KLController()
    controller.update(5.0, 1000)
    assert controller.factor == 1.0
