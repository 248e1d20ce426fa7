"""What an answer of the "reverse 4 digits" example is worth."""

from __future__ import annotations

from typing import Any


def reversed_digits(
    prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], **data: Any
) -> float:
    """1 for exactly the digits of the question in reverse, 0 otherwise."""
    return float(completions.strip() == data["answer"])
