"""Rewards that need no code of one's own: ``--reward exact`` and ``--reward number``.

A reward is a function of an example's fields and of ``completion``, the text of the answer; it takes the keywords that
it needs, among them ``prompt``, ``messages``, ``completion`` and ``completions`` (the same, under a usual name), and of
a single turn ``prompt_ids`` and ``completion_ids``.
"""

from __future__ import annotations

from areal.reward.answers import final_answer, right_number, same_number


def exact(completion: str, answer: object) -> float:
    """1 for the very answer, but for space around it."""
    return float(completion.strip() == str(answer).strip())


def number(completion: str, answer: object) -> float:
    """1 when the final answer is the number of the example's, as in GSM8K. Answers that are not in digits, such as
    ``\\boxed{\\frac{36}{2}}``, need math-verify."""
    return float(same_number(final_answer(completion), right_number(answer)))


BUILT_IN = {"exact": "areal.collect.scoring:exact", "number": "areal.collect.scoring:number"}
