"""Reward functions for tests, in a module such as a user writes."""

from __future__ import annotations

import functools
import os
import sys
import time
from pathlib import Path
from typing import Any


def length(prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], **data: Any) -> float:
    print("the output of a reward is ignored")
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


def past_float(*args: Any, **data: Any) -> int:
    return 10**400


def past_float32(*args: Any, **data: Any) -> float:
    return -1e39


def process_id(*args: Any, **data: Any) -> float:
    return float(os.getpid())


async def later(prompt: str, completions: str, prompt_ids: Any, completion_ids: Any, **data: Any) -> float:
    return 0.5


def reverse_reward(prompt: str, completions: str, prompt_ids: Any, completion_ids: Any, answer: str, **_: Any) -> float:
    return float(completions.strip() == answer)


def never_right(*args: Any, **data: Any) -> float:
    return 0.0


def tricky(prompt: str, *args: Any, **data: Any) -> Any:
    """Raise, hang, or return a generator or a number, as the prompt asks."""
    if prompt == "yields":
        return (each for each in (1.0,))
    if prompt == "raises":
        raise KeyError("answer")
    if prompt == "hangs":
        time.sleep(600)
    return float(prompt)


class Scorer:
    """An object whose methods are rewards."""

    def __init__(self, scale: float = 1.0) -> None:
        self.scale = scale
        self.calls = 0

    def method(self, prompt: str, completions: str, prompt_ids: Any, completion_ids: Any, answer: str = "") -> float:
        self.calls += 1
        return self.scale * len(completions)

    @classmethod
    def of_class(cls, prompt: str, completions: str, *_: Any, **data: Any) -> float:
        return cls.of_nothing(completions)

    @staticmethod
    def of_nothing(completions: str, *_: Any, **data: Any) -> float:
        return float(len(completions))

    def __call__(self, prompt: str, completions: str, prompt_ids: Any, completion_ids: Any, **data: Any) -> float:
        return self.scale * len(completions)

    async def later(self, prompt: str, completions: str, prompt_ids: Any, completion_ids: Any) -> float:
        return self.scale


class AsyncScorer:
    async def __call__(self, prompt: str, completions: str, prompt_ids: Any, completion_ids: Any, **_: Any) -> float:
        return 0.25


def scaled(scale: float, prompt: str, completions: str, *_: Any, **data: Any) -> float:
    return scale * len(completions)


def doubled(function: Any) -> Any:
    @functools.wraps(function)
    def twice(*args: Any, **kwargs: Any) -> float:
        return 2.0 * float(function(*args, **kwargs))

    return twice


@doubled
def decorated(prompt: str, completions: str, *_: Any) -> float:
    return float(len(completions))


# Each takes the arguments and the columns of a row that its parameters name.


def only_some(completions: str, answer: str) -> float:
    return float(completions == answer)


def in_another_order(answer: str, completions: str, prompt: str, prompt_ids: Any) -> float:
    return float(completions == answer and prompt == "q")


def by_keyword(*, completion_ids: list[int], scale: float = 2.0, **data: Any) -> float:
    return len(completion_ids) * scale if "messages" in data and data["prompt"] == "q" else -1.0


def no_extra(prompt: str, completions: str, prompt_ids: Any, completion_ids: Any, answer: str) -> float:
    return float(completions == answer)


def other_names(question: str, text: str, a: Any, b: Any, answer: str) -> float:
    return float(text == answer and question == "q")


def exits(*args: Any, **data: Any) -> float:
    sys.exit("no such unit")


def interrupts(*args: Any, **data: Any) -> float:
    raise KeyboardInterrupt


def tells_all(*args: Any, **data: Any) -> float:
    raise ValueError("x" * 5000)


def of_own_class_if_long(prompt: str, completions: str) -> float:
    class Reward(float):
        pass

    return Reward(4.0) if len(completions) > 3 else 3.0


def asks(*args: Any, **data: Any) -> float:
    return float(input())
