"""Stop strings in a stream of text, cut however the tokens cut it.

Text that could be the beginning of a stop string is held back until it is clear; a stop string, or a part of one
that then completes, is never emitted. Reading character by character defines the outcome, so it does not depend on
how the text was cut into deltas: the stop string that *ends* first wins, and of those that end together the longest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Scanned:
    """``text`` may be emitted now. ``stop`` is the stop string met; nothing after it counts."""

    text: str
    stop: str | None = None


class StopScanner:
    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def push(self, text: str) -> Scanned:
        if not self._stops:
            return Scanned(text)
        text = self._held + text
        met = self._first(text)
        if met is not None:
            start, stop = met
            self._held = ""
            return Scanned(text[:start], stop)
        keep = self._possible_beginning(text)
        self._held = text[len(text) - keep :] if keep else ""
        return Scanned(text[: len(text) - keep])

    def flush(self) -> str:
        """The held text, once no more comes: it was no stop string after all."""
        held, self._held = self._held, ""
        return held

    def _first(self, text: str) -> tuple[int, str] | None:
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if not found:
            return None
        _, start, stop = min(found)
        return start, stop

    def _possible_beginning(self, text: str) -> int:
        """Length of the longest end of ``text`` with which some stop string begins."""
        longest = min(len(text), max(map(len, self._stops)) - 1)
        for length in range(longest, 0, -1):
            tail = text[len(text) - length :]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0
