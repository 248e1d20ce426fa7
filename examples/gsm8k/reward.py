"""What an answer to a question of GSM8K is worth."""

from __future__ import annotations

from areal.reward.math import math_verify_reward_fn


def right_number(prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], answer: str) -> float:
    """1 if the final answer is mathematically equal to the one after `####` of the row, else 0."""
    return math_verify_reward_fn(prompt, completions, answer=answer)
