"""The reward of the reversing task, importable by the processes that compute rewards."""

from typing import Any


def reversed_digits(
    prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], **data: Any
) -> float:
    """1 where the answer is the digits reversed, and ended."""
    return float(completions.strip() == data["answer"] and completion_ids[-1] == 2)


def ended(prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], **data: Any) -> float:
    return float(completion_ids[-1] == 2)


def of_missing_column(
    prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], **data: Any
) -> float:
    return float(completions == data["solution"])
