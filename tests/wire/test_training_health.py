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


@given(
    st.lists(
        st.dictionaries(st.sampled_from(["grad_norm", "reward/mean", "loss"]), st.none() | st.floats() | st.text())
    )
)
def test_warnings_never_count_more_steps_than_exist(found: list[dict[str, Any]]) -> None:
    assert all(each.least <= each.steps <= len(found) for each in warnings_of(found))
