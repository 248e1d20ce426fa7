"""Parts of streams that come soon after others are handed on together.

An event costs everyone on its way the same with one token as with several: it is parsed, written, and read and written
again by each relay. What comes within a window of what was handed on last waits for the window's end, which is one
moment for all streams: then relays read and write for all of them in one turn of their loop. A stream's beginning and
its end never wait, nor does a source that is slower than the window.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Window:
    """The timer of all streams. It runs only while something waits."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._loop = asyncio.get_running_loop()
        self._waiting: list[Callable[[], None]] = []
        self._timer: asyncio.TimerHandle | None = None

    def wait(self, action: Callable[[], None]) -> None:
        """Do ``action``, which raises nothing, at the window's end."""
        self._waiting.append(action)
        if self._timer is None:
            self._timer = self._loop.call_later(self.seconds, self.end)

    def end(self) -> None:
        """Now: nothing waits when it returns."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        waiting, self._waiting = self._waiting, []
        for action in waiting:
            action()
