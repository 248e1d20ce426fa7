"""A deadline on progress: every ``kick`` starts it anew, and a kick costs one clock reading."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType


class Watchdog:
    """Raises TimeoutError in its body after ``idle_s`` seconds without a ``kick``, unless ``excused()`` then.

    ``idle_s`` is asked anew each time, so that a changed limit holds for running calls too.
    """

    def __init__(self, idle_s: Callable[[], float], *, excused: Callable[[], bool] = lambda: False) -> None:
        self._idle_s = idle_s
        self._excused = excused
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._last = 0.0
        self._expired = False

    def kick(self) -> None:
        self._last = self._loop.time()

    async def __aenter__(self) -> Watchdog:
        task = asyncio.current_task()
        assert task is not None, "a watchdog guards the body of a task"
        self._task = task
        self._cancelling = task.cancelling()
        self.kick()
        self._timer = self._loop.call_later(self._idle_s(), self._look)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """A cancellation is a timeout where it was ours alone, as ``asyncio.timeout`` has it."""
        if self._timer is not None:
            self._timer.cancel()
        if self._expired and self._task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            raise TimeoutError from error

    def _look(self) -> None:
        self._timer = None
        now = self._loop.time()
        due = self._last + self._idle_s()
        if due <= now and not self._excused():
            self._expired = True
            self._task.cancel()
            return
        self._timer = self._loop.call_later(due - now if due > now else self._idle_s(), self._look)
