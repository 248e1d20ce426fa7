"""The reward of math problems: 1 if the final answer is mathematically equal to the reference."""

from __future__ import annotations

from typing import Any

from areal.reward.answers import final_answer, right_answer, same_expression
from areal.reward.notation import LONGEST, tokens


def math_verify_reward_fn(
    prompt: str,
    completions: str,
    prompt_ids: list[int] | None = None,
    completion_ids: list[int] | None = None,
    answer: Any = "",
    **data: Any,
) -> float:
    """Compare formulas, sets, intervals, units and choices. The size of texts bounds its work, not a clock: a busy
    machine changes no reward. Raises ImportError without mpmath, ValueError without an answer."""
    right = right_answer(answer)
    found = final_answer(completions, in_words=all(each.kind == "w" for each in tokens(right[:LONGEST])))
    return float(found is not None and same_expression(found, right))


class MathVerifyWorker:
    """AReaL's interface of ``math_verify_reward_fn``."""

    def verify(self, response: str, ground_truth: str) -> float:
        """Return 1 if the final answer of ``response`` equals ``ground_truth``, else 0."""
        return math_verify_reward_fn("", response, answer=ground_truth)


def get_math_verify_worker() -> MathVerifyWorker:
    return MathVerifyWorker()
