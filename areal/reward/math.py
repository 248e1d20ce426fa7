"""Mathematics: 1 where the final answer is equal to the right one as mathematics (``math-verify``)."""

from __future__ import annotations

import logging
from typing import Any

from areal.reward.answers import final_answer, right_answer, same_expression, same_number
from areal.reward.deadline import call_within

_log = logging.getLogger(__name__)
_DEADLINE_S = 10.0


def math_verify_reward_fn(
    prompt: str,
    completions: str,
    prompt_ids: list[int] | None = None,
    completion_ids: list[int] | None = None,
    answer: Any = "",
    **data: Any,
) -> float:
    """Expressions, fractions, sets, intervals; a number as in ``areal.reward.gsm8k``. An answer that takes math-verify
    over 10 s is wrong. Raises ImportError without math-verify, ValueError for a row without an answer."""
    right = right_answer(answer)
    said = final_answer(completions)
    if said is None:
        return 0.0
    if same_number(said, right):
        return 1.0
    try:
        return float(call_within(_DEADLINE_S, lambda: same_expression(said, right)))
    except TimeoutError:
        _log.warning(
            "%.80r could not be compared with %.80r within %g s: it is taken as wrong", said, right, _DEADLINE_S
        )
        return 0.0


class MathVerifyWorker:
    """AReaL's form of ``math_verify_reward_fn``."""

    def verify(self, response: str, ground_truth: str) -> float:
        """1 where the final answer of ``response`` is equal to ``ground_truth``, else 0."""
        return math_verify_reward_fn("", response, answer=ground_truth)


def get_math_verify_worker() -> MathVerifyWorker:
    return MathVerifyWorker()
