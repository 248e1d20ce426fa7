"""References of the tables in another dress, which are equal to them, and with one part changed, which are not."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator

import pytest

from areal.reward.math import math_verify_reward_fn
from tests.reward.test_equality import is_right, rows

TABLES = ("answers.tsv", "answers_hostile.tsv", "answers_benchmarks.tsv")
NOT_LATEX = re.compile(r"[$#\u4e00-\u9fff]|boxed|square")
REFERENCES = sorted({right for table in TABLES for _, right, _ in rows(table) if not NOT_LATEX.search(right)})
OPPOSITES = """increase/decrease profit/loss north/south east/west left/right clockwise/counterclockwise am/pm
    positive/negative odd/even true/false yes/no early/late before/after converges/diverges rational/irrational
    upward/downward maximum/minimum increasing/decreasing concave/convex above/below win/lose"""
UNITS = {
    "cm": "m",
    "kg": "g",
    "m": "km",
    "hours": "minutes",
    "seconds": "minutes",
    "dollars": "cents",
    "J": "N",
    "V": "A",
}
VALUE = r"\\[dt]?frac\{?\w+\}?\{?\w+\}?|\d[\d.,]*(?:\\sqrt\{?\d+\}?)?|\d*\\pi|[a-z]"


def is_formula(text: str) -> bool:
    return not re.search(r"[A-Za-z]{2}", re.sub(r"\\[A-Za-z]+", "", text))


def dressed(right: str) -> Iterator[str]:
    """Responses that give ``right`` in another notation."""
    inside = [right + ".", rf"\displaystyle {right}", rf"\!{right}\,", right.replace(r"\frac", r"\dfrac")]
    if "|" not in right:
        inside.append(f"{{{right}}}")
    if is_formula(right):
        yield from (rf"The answer is ${right}$.", rf"**Answer:** ${right}$", rf"Thus the final answer is \({right}\).")
        inside += [f"${right}$", rf" {right} \ "]
        if not re.search(r"left|right|sqrt\[|\\\\\[|[bB]ig|\|", right):
            inside.append(re.sub(r"([(\[])", r"\\left\1", re.sub(r"([)\]])", r"\\right\1", right)))
    if re.fullmatch(r"-?\d{4,9}", right):
        inside += [f"{int(right):,}".replace(",", each) for each in (",", "{,}", r",\!", r"\,", r"\ ")]
    if re.fullmatch(r"-?\d+(\.\d+)?", right):
        inside += [rf"\text{{{right}}}", rf"\mathbf{{{right}}}", f"x = {right}"]
        yield from (f"So the result is {right}.", f"#### {right}")
    if re.fullmatch(r"[A-Za-z][A-Za-z ]+", right):
        inside += [rf"\text{{{right}}}", rf"\textbf{{{right}}}"]
        yield f"The answer is {right}."
    inside += [right.replace(r"^\circ", each) for each in ("°", r"^{\circ}")] + [right.replace(r"\%", "%")]
    yield from (rf"Therefore\n\[ \boxed{{{each}}} \]" for each in inside)


def broken(right: str, choose: random.Random) -> Iterator[str]:
    """Answers that differ from ``right`` in one part."""
    digits = [each.start() for each in re.finditer(r"\d", right)] if not re.search(r"mod|\{\d,|\(-1\)\^", right) else []
    for at in choose.sample(digits, min(2, len(digits))):
        is_precise = len(re.sub(r"\A[0.]*|\.", "", re.findall(r"[\d.]*\Z", right[:at])[0])) > 4
        if not is_precise and not re.search(r"(?:binom.*|[cC]_\{?|sum.*)\Z", right[:at]):
            yield right[:at] + str((int(right[at]) + choose.randint(1, 9)) % 10) + right[at + 1 :]
    if re.fullmatch(VALUE, right) and not re.fullmatch(r"0*\.?0*(?:,.*)?", right):
        yield "-" + right
    if fraction := re.fullmatch(r"\\[dt]?frac\{(\w+)\}\{(\w+)\}", right):
        yield rf"\frac{{{fraction[2]}}}{{{fraction[1]}}}"
    for unit in re.finditer(rf"(?<=[ ~{{])(?:{'|'.join(UNITS)})(?=\}})", right):
        yield right[: unit.start()] + UNITS[unit[0]] + right[unit.end() :]
    for one, other in re.findall(r"(\w+)/(\w+)", OPPOSITES):
        for old, new in ((one, other), (other, one)):
            if "neither" not in right and re.search(rf"(?<!\\)\b{old}\b", right):
                yield re.sub(rf"(?<!\\)\b{old}\b", new, right)
    if pair := re.fullmatch(r"([(\[])([^()\[\]]+),([^()\[\]]+?)([)\]])", right):
        yield {"(": "[", "[": "("}[pair[1]] + right[1:]
        yield f"{pair[1]}{pair[3]},{pair[2]}{pair[4]}" if pair[2].strip() != pair[3].strip() else right
    letters = [each.start() for each in re.finditer(r"(?<![A-Za-z\\])[abmnpqrstxyz](?![A-Za-z])", right)]
    if len(letters) > 1 and is_formula(right):
        at = choose.choice(letters)
        yield right[:at] + "w" + right[at + 1 :]
    for old, new in ((r"\le ", r"\ge "), ("<", ">"), (r"\cup", r"\cap"), ("lfloor", "lceil")):
        yield right.replace(old, new).replace("rfloor", "rceil")


@pytest.mark.parametrize("part", range(4))
def test_reference_equals_itself_in_another_dress(part: int) -> None:
    for right in random.Random(32).sample(REFERENCES, 400)[part::4]:
        assert [each for each in dressed(right) if math_verify_reward_fn("q", each, answer=right) != 1.0] == [], right


@pytest.mark.parametrize("part", range(4))
def test_reference_with_a_part_changed_is_another_answer(part: int) -> None:
    choose = random.Random(33)
    for right in choose.sample(REFERENCES, 1200)[part::4]:
        assert [each for each in broken(right, choose) if each != right and is_right(each, right)] == [], right
