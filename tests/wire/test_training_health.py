"""Warnings about a run, from its steps' numbers alone."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal.wire.training_health import NO_GRADIENT_STEPS, STILL_REWARD_STEPS, warnings_of


def steps(count: int, **numbers: Any) -> list[dict[str, Any]]:
    return [{"step": number + 1, **numbers} for number in range(count)]


def messages(found: list[dict[str, Any]]) -> list[str]:
    return [each.message for each in warnings_of(found)]


def test_run_whose_groups_are_all_alike_has_no_gradient() -> None:
    learning = [*steps(5, grad_norm=0.3), {"grad_norm": 0.1, "reward/mean": 0.5}]
    alike = [{"grad_norm": 0.0, "reward/mean": number / 100} for number in range(35)]

    assert messages(learning + alike) == ["no gradient: all groups alike for 35 steps"]
    assert messages(learning + alike[: NO_GRADIENT_STEPS - 1]) == []
    assert messages([*alike, {"grad_norm": 0.1, "reward/mean": 0.5}]) == []


def test_supervised_run_without_gradient_has_no_groups() -> None:
    assert messages(steps(12, grad_norm=0.0, loss=1.0)) == ["no gradient: all are zero for 12 steps"]


def test_reward_that_does_not_move_is_told_with_its_value() -> None:
    assert messages(steps(STILL_REWARD_STEPS, **{"grad_norm": 0.5, "reward/mean": 0.125})) == [
        "the reward does not move: 0.125 for 30 steps"
    ]
    assert messages([*steps(40, **{"reward/mean": 0.5}), {"reward/mean": 0.6}]) == []
    assert messages(steps(40, **{"reward/mean": float("nan")})) == []


@pytest.mark.parametrize(("count", "due"), [(10, True), (11, False), (15, False), (20, True), (30, False), (40, True)])
def test_log_repeats_a_warning_each_time_that_its_steps_have_doubled(count: int, due: bool) -> None:
    assert [each.is_due for each in warnings_of(steps(count, grad_norm=0.0))] == [due]


@given(
    st.lists(
        st.dictionaries(st.sampled_from(["grad_norm", "reward/mean", "loss"]), st.none() | st.floats() | st.text())
    )
)
def test_any_numbers_give_warnings_that_count_no_more_steps_than_there_are(found: list[dict[str, Any]]) -> None:
    assert all(each.least <= each.steps <= len(found) for each in warnings_of(found))
