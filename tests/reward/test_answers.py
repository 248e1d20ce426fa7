"""Which answers are right."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal.reward.gsm8k import gsm8k_reward_fn
from areal.reward.math import math_verify_reward_fn
from areal.reward.numbers import as_number, last_boxed

GOLD = "Natalia sold 48/2 = 24 clips in May.\n#### 1,072"


@pytest.mark.parametrize(
    ("said", "reward"),
    [
        ("The answer is \\boxed{1072}.", 1.0),
        ("so \\boxed{\\$1,072} altogether", 1.0),
        ("1072.0", 1.0),
        ("first 5, then 1072", 1.0),
        ("#### 1072", 1.0),
        ("The answer is \\boxed{1072}, not 3", 1.0),
        ("1073", 0.0),
        ("no idea", 0.0),
        ("", 0.0),
        ("\\boxed{", 0.0),
    ],
)
def test_gsm8k_answer(said: str, reward: float) -> None:
    assert gsm8k_reward_fn("q", said, [], [], answer=GOLD) == reward


@pytest.mark.parametrize(
    ("said", "answer", "reward"),
    [
        ("\\boxed{\\frac{1}{2}}", "0.5", 1.0),
        ("$x = 3$", "3", 1.0),
        ("\\boxed{4}", "5", 0.0),
        ("the answer is 1072", GOLD, 1.0),
    ],
)
def test_math_answer(said: str, answer: str, reward: float) -> None:
    assert math_verify_reward_fn("q", said, [], [], answer=answer) == reward


@given(st.text(), st.text(alphabet=st.characters(exclude_characters="{}")))
def test_last_boxed_is_found_whatever_is_around(before: str, inside: str) -> None:
    assert last_boxed(f"{before}\\boxed{{{inside}}} end") == inside.strip()


@given(st.integers(-(10**9), 10**9))
def test_number_is_read_with_or_without_separators(value: int) -> None:
    assert as_number(f"{value:,}") == as_number(str(value)) == value


@given(st.text(alphabet="0123456789,./$- \\boxed{}#"))
def test_no_text_breaks_the_reward(text: str) -> None:
    assert gsm8k_reward_fn("q", text, [], [], answer=text) in (0.0, 1.0)
