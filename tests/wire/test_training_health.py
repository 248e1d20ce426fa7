"""Warnings about a run, from its steps' numbers alone."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal.wire.training_health import NO_GRADIENT_STEPS, STILL_REWARD_STEPS, warnings_of


def steps(count: int, **numbers: Any) -> list[dict[str, Any]]:
    return [{"step": number + 1, **numbers} for number in range(count)]


def messages(found: list[dict[str, Any]]) -> list[str]:
    return [each.message for each in warnings_of(found)]


def test_run_with_equal_rewards_in_all_groups_has_no_gradient() -> None:
    learning = [*steps(5, grad_norm=0.3), {"grad_norm": 0.1, "reward/mean": 0.5}]
    alike = [{"grad_norm": 0.0, "reward/mean": number / 100} for number in range(35)]

    assert messages(learning + alike) == ["no gradient: all groups alike for 35 steps"]
    assert messages(learning + alike[: NO_GRADIENT_STEPS - 1]) == []
    assert messages([*alike, {"grad_norm": 0.1, "reward/mean": 0.5}]) == []


def test_supervised_run_without_gradient_mentions_no_groups() -> None:
    assert messages(steps(12, grad_norm=0.0, loss=1.0)) == ["no gradient: all are zero for 12 steps"]


def test_constant_reward_is_reported_with_value() -> None:
    assert messages(steps(STILL_REWARD_STEPS, **{"grad_norm": 0.5, "reward/mean": 0.125})) == [
        "the reward does not move: 0.125 for 30 steps"
    ]
    assert messages([*steps(40, **{"reward/mean": 0.5}), {"reward/mean": 0.6}]) == []
    assert messages(steps(40, **{"reward/mean": float("nan")})) == ["reward/mean is NaN at step 40"]


RIGHT_OR_WRONG = {"grad_norm": 0.5, "reward/min": 0.0, "reward/max": 1.0}


def rewarded(means: Iterable[float], noise: float, seed: int) -> list[dict[str, Any]]:
    draw = random.Random(seed)
    return [RIGHT_OR_WRONG | {"reward/mean": min(max(mean + draw.gauss(0, noise), 0.0), 1.0)} for mean in means]


@given(mean=st.floats(0.0, 0.75), noise=st.floats(0.001, 0.06), count=st.integers(200, 600), seed=st.integers(0, 99))
def test_noisy_flat_reward_is_reported(mean: float, noise: float, count: int, seed: int) -> None:
    (found,) = messages(rewarded([mean] * count, noise, seed))
    assert found.startswith("the reward does not move: ") and found.endswith(f" for {count} steps")


@given(
    first=st.floats(0.0, 0.8),
    gain=st.floats(0.2, 1.0),
    begins=st.floats(0.0, 0.5),
    noise=st.floats(0.0, 0.2),
    count=st.integers(100, 600),
    seed=st.integers(0, 99),
)
def test_learning_run_has_no_flat_reward_warning(
    first: float, gain: float, begins: float, noise: float, count: int, seed: int
) -> None:
    def mean(place: float) -> float:  # flat, then rising, in its last tenth flat again
        return first + gain * min(max(place - begins, 0.0) / (0.9 - begins), 1.0)

    means = [min(mean(number / count), 0.97) for number in range(count)]
    assert messages(rewarded(means, max(noise, 0.001), seed)) == []


@given(noise=st.floats(0.001, 0.05), count=st.integers(100, 600), seed=st.integers(0, 99))
def test_run_solved_from_start_has_no_warning(noise: float, count: int, seed: int) -> None:
    assert messages(rewarded([0.97] * count, noise, seed)) == []


def test_reward_at_maximum_for_many_steps_is_solved() -> None:
    learnt = [RIGHT_OR_WRONG | {"reward/mean": number / 100} for number in range(100)]
    solved = [RIGHT_OR_WRONG | {"reward/mean": 1.0, "reward/min": 1.0}] * 200
    assert messages(learnt + solved) == []
    assert messages(solved) == ["the reward does not move: 1 for 200 steps"]  # a constant reward


def test_reward_rising_and_falling_back_has_moved() -> None:
    there = [number / 200 for number in range(100)]
    rules = [each.rule for each in warnings_of(rewarded([*there, *reversed(there)], 0.01, 1))]
    assert rules == ["reward-collapse"]


@pytest.mark.parametrize(("count", "due"), [(10, True), (11, False), (15, False), (20, True), (30, False), (40, True)])
def test_log_repeats_warning_when_its_steps_double(count: int, due: bool) -> None:
    held = {each.rule for each in warnings_of(steps(count - 1, grad_norm=0.0))}
    assert [each.is_due(held) for each in warnings_of(steps(count, grad_norm=0.0))] == [due]


@pytest.mark.parametrize(
    "found",
    [
        [{"approx_kl": 0.003}] * 20 + [{"approx_kl": 0.5}] + [{"approx_kl": 0.003}] * 20,
        [{"loss": 1.0}] * 20 + [{"loss": math.nan}] * 3 + [{"loss": 1.0}] * 20,
        rewarded([*[number / 100 for number in range(100)], *[0.1] * 60], 0.01, 1),
    ],
    ids=["kl-spike", "not-finite", "reward-collapse"],
)
def test_log_reports_lasting_warning_once(found: list[dict[str, Any]]) -> None:
    reported, held = [], set[str]()
    for count in range(1, len(found) + 1):
        now = warnings_of(found[:count])
        reported += [each.rule for each in now if each.is_due(held)]
        held = {each.rule for each in now}
    assert len(reported) == 1


def by_name(values: Iterable[float | None], name: str = "approx_kl") -> list[dict[str, Any]]:
    return [{"step": number, name: value} for number, value in enumerate(values, 1)]


@pytest.mark.parametrize(
    ("values", "step"),
    [
        ([0.01] * 10 + [0.11], 11),
        ([0.01] * 9 + [5.0], None),  # nine steps do not say what is usual
        ([0.01] * 9 + [None, 5.0], None),
        ([0.02] * 10 + [0.199], None),  # ten times the median are 0.2
        ([0.02] * 10 + [0.201], 11),
        ([0.001] * 10 + [0.099], None),  # at most 0.1
        ([0.001] * 10 + [0.101], 11),
        ([-0.5] * 10 + [2.0], None),  # k1 is signed: its size counts
        ([0.01] * 10 + [-2.0], None),
        ([0.01] * 10 + [0.5] + [0.01] * 9, 11),
        ([0.01] * 10 + [0.5] + [0.01] * 10, None),  # the last ten steps
        ([0.01] * 10 + [0.5, 0.6, 0.01], 12),  # the newest
        ([1.0] * 60 + [0.01] * 26 + [4.0], 87),  # the median of fifty steps
        ([1.0] * 60 + [0.01] * 25 + [4.0], None),
    ],
)
@pytest.mark.parametrize("name", ["approx_kl", "ref_kl", "mismatch_kl"])
def test_kl_spike_is_above_a_tenth_and_ten_times_the_median_of_fifty_steps(
    values: list[float | None], step: int | None, name: str
) -> None:
    found = [(each.rule, each.step, each.is_error) for each in warnings_of(by_name(values, name))]
    assert found == ([] if step is None else [("kl-spike", step, False)])


def test_kl_spike_without_number_of_its_step_has_no_place() -> None:
    found = [{"ref_kl": 0.03}] * 12 + [{"ref_kl": 1.5}]
    assert messages(found) == ["ref_kl is 1.5, where 0.03 is usual"]


def ranged(values: Iterable[float], low: float = 0.0, high: float = 1.0) -> list[dict[str, Any]]:
    return [{**each, "reward/min": low, "reward/max": high} for each in by_name(values, "reward/mean")]


def around(mean: float, noise: float, count: int) -> list[float]:
    """Values on both sides of a mean in turn, with a variance of ``noise ** 2``."""
    return [mean + (noise if number % 2 else -noise) for number in range(count)]


@pytest.mark.parametrize(
    ("found", "collapses"),
    [
        (ranged([0.5] * 80 + around(0.21, 0.001, 10)), False),  # 0.29 of the range
        (ranged([0.5] * 80 + around(0.19, 0.001, 10)), True),
        (ranged([0.5] * 80 + around(-0.09, 0.001, 10), -1.0, 1.0), False),
        (ranged([0.5] * 80 + around(-0.11, 0.001, 10), -1.0, 1.0), True),
        (ranged([0.5] * 80 + [0.1] * 5 + [0.5] * 5), False),  # the mean of ten steps
        (ranged([0.5] * 29 + [0.1] * 10), False),  # too few
        (ranged([0.5] * 30 + [0.1] * 10), True),
        (ranged(around(0.8, 0.2, 80) + around(0.25, 0.2, 10)), False),  # 0.3 and three errors of 0.089
        (ranged(around(0.8, 0.2, 80) + around(0.2, 0.2, 10)), True),
        (ranged([0.8] * 190 + [0.1] * 10), False),  # of more steps, the mean of a tenth
        (ranged([0.8] * 180 + [0.1] * 20), True),
        (ranged([0.1] * 60 + [0.8] * 10 + [0.1] * 30), True),  # its best need not be its beginning
        (ranged([0.5] * 80 + [0.1] * 10, 1.0, 1.0), False),  # no sample differs
        (by_name([0.5] * 80 + [0.1] * 10, "reward/mean"), False),
    ],
)
def test_collapse_is_a_fall_by_three_tenths_of_the_range_beyond_the_noise(
    found: list[dict[str, Any]], collapses: bool
) -> None:
    due = [each for each in warnings_of(found) if each.rule == "reward-collapse"]
    assert [(each.step, each.is_error) for each in due] == ([(len(found), True)] if collapses else [])


def test_collapse_is_reported_with_both_rewards() -> None:
    (found,) = warnings_of(ranged([0.1] * 30 + [0.75] * 30 + [0.125] * 10))
    assert found.message == "the reward has collapsed: 0.125, where it was 0.75"


@pytest.mark.parametrize(
    ("found", "count"),
    [
        (by_name([0.5] * 29, "reward/mean"), None),
        (by_name([0.4] + [0.5, 0.5 + 9e-10] * 15, "reward/mean"), 30),
        (by_name([0.5, 0.5 + 2e-9] * 15, "reward/mean"), None),
        (ranged([0.899] * 30), 30),  # nine tenths of the range are solved
        (ranged([0.901] * 30), None),
        (ranged([0.799] * 30, -1.0), 30),
        (ranged([0.801] * 30, -1.0), None),
        (ranged(around(0.5, 0.01, 99)), None),
        (ranged(around(0.5, 0.01, 100)), 100),
        (ranged(around(0.5, 0.16, 200)), 200),  # three errors of sqrt(2 * 0.16**2 / 49)
        (ranged(around(0.5, 0.17, 200)), None),
        (ranged(around(0.5, 0.01, 150) + around(0.59, 0.01, 50)), 200),
        (ranged(around(0.5, 0.01, 150) + around(0.41, 0.01, 50)), 200),
        (ranged(around(0.5, 0.01, 150) + around(0.6, 0.01, 50)), None),
        (ranged(around(0.5, 0.01, 50) + around(0.6, 0.01, 100) + around(0.5, 0.01, 50)), None),
        (ranged(around(0.5, 0.01, 150) + around(0.6, 0.01, 50), -1.0), 200),
        (ranged(around(0.97, 0.01, 200)), None),
        (by_name(around(0.5, 0.01, 200), "reward/mean"), None),  # the range is not known
        (ranged([*around(0.5, 0.01, 199), math.nan]), None),
    ],
)
def test_reward_is_flat_if_constant_or_its_quarters_agree(found: list[dict[str, Any]], count: int | None) -> None:
    flat = [(each.steps, each.step) for each in warnings_of(found) if each.rule == "flat-reward"]
    assert flat == ([] if count is None else [(count, len(found) - count + 1)])


@pytest.mark.parametrize(
    ("found", "counts"),
    [
        ([*steps(20, grad_norm=0.1), *steps(9, grad_norm=0.0)], []),
        ([*steps(20, grad_norm=0.1), *steps(10, grad_norm=0.0)], [10]),
        ([*steps(5, grad_norm=0.1), *steps(9, **{"groups/without_spread": 1.0})], []),
        ([*steps(5, grad_norm=0.1), *steps(12, **{"groups/without_spread": 1.0})], [12]),
        ([*steps(20, **{"groups/without_spread": 0.96})], []),
        ([*steps(5, grad_norm=0.0), *steps(11, grad_norm=0.0, **{"groups/without_spread": 1.0})], [16]),
    ],
)
def test_ten_steps_without_gradient_or_spread_are_a_warning(found: list[dict[str, Any]], counts: list[int]) -> None:
    found = [{**each, "step": number} for number, each in enumerate(found, 1)]
    due = [(each.steps, each.step) for each in warnings_of(found) if each.rule == "no-spread"]
    assert due == [(count, len(found) - count + 1) for count in counts]


@pytest.mark.parametrize(("ago", "holds"), [(0, True), (9, True), (10, False)])
@pytest.mark.parametrize(("value", "word"), [(math.nan, "NaN"), (-math.inf, "infinite")])
def test_number_that_is_not_finite_is_reported_for_ten_steps(ago: int, holds: bool, value: float, word: str) -> None:
    found = steps(30, loss=1.0)
    found[-1 - ago]["loss"] = value
    assert messages(found) == ([f"loss is {word} at step {30 - ago}"] if holds else [])


@given(
    st.lists(
        st.dictionaries(st.sampled_from(["grad_norm", "reward/mean", "loss"]), st.none() | st.floats() | st.text())
    )
)
def test_warnings_never_count_more_steps_than_exist(found: list[dict[str, Any]]) -> None:
    assert all(each.least <= each.steps <= len(found) for each in warnings_of(found))
