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
        self._scope = asyncio.timeout(None)
        self._timer: asyncio.TimerHandle | None = None
        self._last = 0.0

    def kick(self) -> None:
        self._last = self._loop.time()

    async def __aenter__(self) -> Watchdog:
        await self._scope.__aenter__()
        self.kick()
        self._timer = self._loop.call_later(self._idle_s(), self._look)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        await self._scope.__aexit__(kind, error, trace)

    def _look(self) -> None:
        now = self._loop.time()
        due = self._last + self._idle_s()
        if due <= now and not self._excused():
            self._scope.reschedule(now)
            return
        self._timer = self._loop.call_later(due - now if due > now else self._idle_s(), self._look)
