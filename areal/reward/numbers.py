"""The number that a text gives as its answer, without any library: enough for GSM8K.

Looked for in this order: the last ``\\boxed{...}``, what follows the last ``####``, the last number of the text.
"""

from __future__ import annotations

import re
from fractions import Fraction

_NUMBER = re.compile(r"-?\$?\d[\d,]*(?:\.\d+)?(?:\s*/\s*\d[\d,]*)?")
_TOLERANCE = Fraction(1, 10**6)


def final_answer(text: str) -> str | None:
    """The text of the answer; None where there is none."""
    if (boxed := last_boxed(text)) is not None:
        return boxed
    if "####" in text:
        return text.rpartition("####")[2].strip() or None
    found = _NUMBER.findall(text)
    return found[-1] if found else None


def last_boxed(text: str) -> str | None:
    """The inside of the last ``\\boxed{...}`` whose braces close."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth, at = 0, start + len("\\boxed")
    for position in range(at, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return text[at + 1 : position].strip()
    return None


def as_number(text: str | None) -> Fraction | None:
    """The first number in ``text``, with thousands separators, a dollar sign, or as a fraction."""
    found = _NUMBER.search(text or "")
    if found is None:
        return None
    try:
        return Fraction(re.sub(r"[$,\s]", "", found[0]))
    except (ValueError, ZeroDivisionError):
        return None


def same_answer(said: str | None, right: str | None) -> bool:
    """As numbers where both are, as text otherwise."""
    if said is None or right is None:
        return False
    mine, theirs = as_number(said), as_number(right)
    if mine is None or theirs is None:
        return said.strip() == right.strip()
    return abs(mine - theirs) <= _TOLERANCE * max(Fraction(1), abs(theirs))
