"""GSM8K: 1 where the final answer is the right number."""

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
    """``answer`` is the data set's: a solution that ends with ``#### 72``, or the number alone. Raises ValueError where
    it has no number, which no completion could match."""
    return float(same_number(final_answer(completions), right_number(answer)))
