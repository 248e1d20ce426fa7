"""Rewards of the benchmarks' tasks."""

from __future__ import annotations

from typing import Any


def share_of_sevens(
    prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], **data: Any
) -> float:
    """Anything can learn it, from random weights on: each token of the answer should be a 7."""
    return completions.count("7") / max(1, len(completion_ids))


def share_of_sevens_said(
    prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], **data: Any
) -> float:
    """The same of what was said, so that nothing is won by a longer answer: its end token does not count."""
    return completions.count("7") / max(1, len(completions))
