"""What an answer to a task is worth."""

from __future__ import annotations

import re
from typing import Any


def last_number(prompt: str, completions: str, answer: str, **row: Any) -> float:
    """1 if the last number of the answer is that of the row, else 0."""
    numbers = re.findall(r"-?\d+(?:\.\d+)?", completions.replace(",", ""))
    return float(bool(numbers) and numbers[-1] == answer)
