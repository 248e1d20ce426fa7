"""The reward of GSM8K: 1 if the final answer equals the reference number, else 0."""

from __future__ import annotations

from typing import Any

from areal.reward.answers import final_answer, right_number, same_number


def gsm8k_reward_fn(
    prompt: str,
    completions: str,
    prompt_ids: list[int] | None = None,
    completion_ids: list[int] | None = None,
    answer: Any = "",
    **data: Any,
) -> float:
    """``answer`` is the column of the data set: a solution that ends with ``#### 72``, or only the number. Raises
    ValueError if it has no number, because no completion could match it."""
    return float(same_number(final_answer(completions), right_number(answer)))
