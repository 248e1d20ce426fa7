"""The guessing game as an environment with gymnasium's interface: find a number from 1 to 7 with three guesses."""

from __future__ import annotations

import random
from typing import Any

LOW, HIGH, GUESSES = 1, 7, 3
START, LOWER, HIGHER, FOUND = "?", "<", ">", "!"


class GuessNumber:
    """An observation is what the player sees: ``?`` at the start, then ``<`` (the number is lower), ``>`` or ``!``.
    An action is the player's text. The reward is 1 for finding the number, else 0."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        """``options``: ``number``, else one is drawn."""
        given = (options or {}).get("number")
        self._number = given if given is not None else random.Random(seed).randint(LOW, HIGH)
        self._left = GUESSES
        return START, {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """An action that is not a number ends the game."""
        self._left -= 1
        if not action.strip().isdigit():
            return FOUND, 0.0, True, False, {"problem": f"{action!r} is not a number"}
        guess = int(action)
        if guess == self._number:
            return FOUND, 1.0, True, False, {}
        return (HIGHER if guess < self._number else LOWER), 0.0, False, self._left == 0, {}

    def close(self) -> None:
        pass
