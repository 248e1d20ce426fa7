"""What an answer to a question of GSM8K is worth."""

from __future__ import annotations

from typing import Any

from areal.reward.math import math_verify_reward_fn


def right_number(prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], **row: Any) -> float:
    """1 if the final answer is mathematically equal to the one after `####` of the row, else 0."""
    return math_verify_reward_fn(prompt, completions, answer=row["answer"])
