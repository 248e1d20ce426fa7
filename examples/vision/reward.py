"""What an answer to a question about an image is worth."""

from __future__ import annotations

import re


def right_answer(prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], answer: str) -> float:
    """1 if the last word or number of the answer is the one of the row, else 0."""
    words = re.findall(r"\w+", completions.lower())
    return float(words[-1:] == [str(answer).strip().lower()])
