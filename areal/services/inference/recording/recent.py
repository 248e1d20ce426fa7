"""The newest turns of running conversations, in memory: what the next turn's prompt is made from.

Bounded by tokens, not by sessions: what falls out is read from disk again.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from dataclasses import dataclass

_MOST_TOKENS = 2**21


@dataclass(frozen=True)
class Known:
    """All tokens of a turn, prompt and answer, and the mark of their text (``conversation.text_mark``)."""

    tokens: array[int]
    text: tuple[int, bytes]


class RecentTurns:
    """By row id; the least used go first."""

    def __init__(self, most_tokens: int = _MOST_TOKENS) -> None:
        self._most = most_tokens
        self._held = 0
        self._turns: OrderedDict[int, Known] = OrderedDict()

    def get(self, row: int) -> Known | None:
        known = self._turns.get(row)
        if known is not None:
            self._turns.move_to_end(row)
        return known

    def put(self, row: int, known: Known) -> None:
        self._drop(row)
        self._turns[row] = known
        self._held += len(known.tokens)
        while self._held > self._most:
            self._drop(next(iter(self._turns)))

    def _drop(self, row: int) -> None:
        gone = self._turns.pop(row, None)
        self._held -= len(gone.tokens) if gone is not None else 0
