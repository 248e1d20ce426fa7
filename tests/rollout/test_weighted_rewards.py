"""Several rewards of one answer."""

from __future__ import annotations

from typing import Any

import pytest

from areal.errors import UsageFault
from areal.rollout.rlvr import RowReward

LENGTH, RIGHT = f"{__name__}:length", f"{__name__}:right"


def length(prompt: str, completions: str, prompt_ids: Any, completion_ids: Any, **data: Any) -> float:
    return float(len(completions))


def right(prompt: str, completions: str, prompt_ids: Any, completion_ids: Any, answer: str, **data: Any) -> float:
    if completions == "raise":
        raise ValueError("no reward")
    return float(completions == answer)


async def test_rewards_are_added_up_by_their_weights() -> None:
    rewards = RowReward([LENGTH, RIGHT], 30.0, [0.5, 2.0])
    row = {"answer": "yes"}
    assert await rewards("q", "yes", [1], [2], row) == 0.5 * 3 + 2.0
    found = await rewards.each("q", [1], [("no", [2]), ("raise", [3]), ("yes", [4])], row)
    assert (found[0], found[2]) == (1.0, 3.5)
    assert isinstance(found[1], Exception)  # of one function: the answer has no reward


async def test_rewards_without_weights_count_alike() -> None:
    assert await RowReward([LENGTH, RIGHT], 30.0)("q", "yes", [1], [2], {"answer": "yes"}) == 4.0
    assert await RowReward(LENGTH, 30.0)("q", "yes", [1], [2], {}) == 3.0


@pytest.mark.parametrize(
    ("functions", "weights", "said"),
    [
        ([LENGTH, RIGHT], [1.0], "reward_weights has 1 numbers, and reward_fn 2 functions"),
        ([LENGTH], [float("nan")], "must be finite"),
        ([LENGTH, LENGTH], None, "functions of one name"),
        ([], None, "reward_fn 0 functions"),
    ],
)
def test_weights_that_do_not_fit_are_told(functions: list[Any], weights: list[float] | None, said: str) -> None:
    with pytest.raises(UsageFault, match=said):
        RowReward(functions, 30.0, weights)


def test_row_without_a_column_that_one_of_them_needs_is_told_before_anything_is_sampled() -> None:
    with pytest.raises(UsageFault, match="answer"):
        RowReward([LENGTH, RIGHT]).check({"question": "?"})
