"""Mathematics: 1 where the answer is equal to the right one as mathematics (``math-verify``)."""

from __future__ import annotations

import logging
from typing import Any

from areal.reward.numbers import final_answer, same_answer


def math_verify_reward_fn(
    prompt: str,
    completions: str,
    prompt_ids: list[int] | None = None,
    completion_ids: list[int] | None = None,
    answer: str = "",
    **data: Any,
) -> float:
    """Expressions, fractions, sets, intervals. Where one side cannot be read as mathematics, as
    ``areal.reward.gsm8k`` does. Raises ImportError without math-verify."""
    from math_verify import parse, verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)
    right, said = parse(_delimited(str(answer)), parsing_timeout=None), parse(completions, parsing_timeout=None)
    if right and said:
        return float(verify(right, said, timeout_seconds=None))
    return float(same_answer(final_answer(completions), final_answer(str(answer))))


def _delimited(answer: str) -> str:
    """A bare formula, so that it is read as one."""
    answer = answer.rpartition("####")[2].strip()
    return answer if "$" in answer or "\\boxed" in answer else f"${answer}$"
