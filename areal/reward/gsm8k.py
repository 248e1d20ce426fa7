"""GSM8K: 1 where the answer's final number is the right one."""

from __future__ import annotations

from typing import Any

from areal.reward.numbers import final_answer, same_answer


def gsm8k_reward_fn(
    prompt: str,
    completions: str,
    prompt_ids: list[int] | None = None,
    completion_ids: list[int] | None = None,
    answer: str = "",
    **data: Any,
) -> float:
    """``answer`` is the data set's: a solution that ends with ``#### 72``, or the number alone."""
    return float(same_answer(final_answer(completions), final_answer(str(answer))))
