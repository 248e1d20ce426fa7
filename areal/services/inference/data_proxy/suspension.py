"""When the engine makes no progress because it was told to: a call is not late for the time it was held still.

After a pause each call has its whole deadline again.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable


class Suspension:
    """Whether the engine is suspended, by our own controls and by what it says of itself when asked."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._ended = -math.inf
        self.active = False
        self.on_change: Callable[[], None] = lambda: None
        self.commands = 0  # how often ``set`` was called: an observation that began before the last one is stale

    def set(self, active: bool) -> None:
        """By a control of ours."""
        self.commands += 1
        self._change(active)

    def observe(self, paused: bool | None, *, asked_at: int) -> None:
        """What the engine said when it was asked at ``commands`` equal to ``asked_at``; None: it does not tell."""
        if paused is not None and asked_at == self.commands:
            self._change(paused)

    def _change(self, active: bool) -> None:
        if self.active and not active:
            self._ended = self._loop.time()
        changed, self.active = self.active != active, active
        if changed:
            self.on_change()

    def excuses(self, idle_s: float) -> bool:
        """Whether ``idle_s`` seconds of silence may be the pause's."""
        return self.active or self._loop.time() - self._ended < idle_s
