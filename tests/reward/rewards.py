"""Reward functions for tests, as a user's module has them."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any


def length(prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], **data: Any) -> float:
    print("what a reward prints harms nobody")
    return len(completions) / data.get("scale", 1.0)


def raises(*args: Any, **data: Any) -> float:
    raise KeyError("answer")


def hangs(*args: Any, **data: Any) -> float:
    time.sleep(600)
    return 1.0


def dies_once(prompt: str, completions: str, prompt_ids: Any, completion_ids: Any, mark: str) -> float:
    if not Path(mark).exists():
        Path(mark).touch()
        os._exit(3)
    return 1.0


def not_finite(*args: Any, **data: Any) -> float:
    return float("nan")


def process_id(*args: Any, **data: Any) -> float:
    return float(os.getpid())


async def later(prompt: str, completions: str, prompt_ids: Any, completion_ids: Any, **data: Any) -> float:
    return 0.5


def reverse_reward(prompt: str, completions: str, prompt_ids: Any, completion_ids: Any, answer: str, **_: Any) -> float:
    return float(completions.strip() == answer)


def never_right(*args: Any, **data: Any) -> float:
    return 0.0


def tricky(prompt: str, *args: Any, **data: Any) -> float:
    """What it does is in the prompt: raise, hang, or be worth so much."""
    if prompt == "raises":
        raise KeyError("answer")
    if prompt == "hangs":
        time.sleep(600)
    return float(prompt)
