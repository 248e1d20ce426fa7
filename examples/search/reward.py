"""What an answer to a question is worth: exact match, and F1 of words, after SQuAD's normalization."""

from __future__ import annotations

import re
import string
from collections import Counter
from typing import Any

_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normal(text: str) -> list[str]:
    """Return the words, in lower case, without punctuation and articles."""
    return re.sub(r"\b(a|an|the)\b", " ", text.lower().translate(_PUNCTUATION)).split()


def exact_match(prompt: str, completions: str, answer: str, **row: Any) -> float:
    """1 if the words are those of the row's answer, else 0."""
    return float(normal(completions) == normal(answer))


def f1(prompt: str, completions: str, answer: str, **row: Any) -> float:
    """Return the harmonic mean of precision and recall of the answer's words."""
    given, right = normal(completions), normal(answer)
    shared = sum((Counter(given) & Counter(right)).values())
    return 2 * shared / (len(given) + len(right)) if shared else 0.0
