"""Background tasks: named, restarted after a failure, and periodic ones that all wake at the same time."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import AsyncIterator, Callable, Coroutine
from types import TracebackType
from typing import Any, TypeVar

_log = logging.getLogger(__name__)
IDLE_S = 2.0  # the period of checks in an idle process, where waking up is most of the CPU time
_PHASE_S = random.uniform(0.0, 3600.0)  # random, so that processes do not wake all at once


def until_beat(period_s: float) -> float:
    """Return the seconds to sleep for a task that runs every ``period_s``. Periodic tasks of a process wake at the same
    times if their periods divide each other: waking an idle process costs more than the tasks."""
    if period_s <= 0:
        return 0.0
    left_s = period_s - (asyncio.get_running_loop().time() - _PHASE_S) % period_s
    return left_s if left_s > period_s / 4 else left_s + period_s  # timers fire a little early


async def happens(event: asyncio.Event, within_s: float) -> bool:
    """Return True once ``event`` is set, False after ``within_s`` seconds."""
    try:
        async with asyncio.timeout(within_s):
            return await event.wait()
    except TimeoutError:
        return False


async def _guarded(name: str, run: Callable[[], Coroutine[Any, Any, None]], again_after_s: float) -> None:
    while True:
        try:
            await run()
            return
        except Exception:  # noqa: BLE001 - a process boundary: a background loop must outlive its own faults
            _log.exception("background task %s failed; it starts again in %.1f s", name, again_after_s)
        await asyncio.sleep(again_after_s)


@contextlib.asynccontextmanager
async def background(
    name: str, run: Callable[[], Coroutine[Any, Any, None]], *, again_after_s: float = 1.0
) -> AsyncIterator[None]:
    """Run ``run()`` while the block runs. After a failure, which is logged, it starts again; leaving the block cancels
    it."""
    task = asyncio.create_task(_guarded(name, run, again_after_s), name=name)
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


_T = TypeVar("_T")
_running: set[asyncio.Task[Any]] = set()


async def uninterrupted(work: Coroutine[Any, Any, _T], name: str) -> _T:
    """Run ``work`` to its end even if the caller is cancelled."""
    task = asyncio.create_task(work, name=name)
    _running.add(task)
    task.add_done_callback(_running.discard)
    return await asyncio.shield(task)


# A deadline on progress. Every ``kick`` restarts it at the cost of reading the clock once.


class Watchdog:
    """Raises TimeoutError in its body after ``idle_s`` seconds without a ``kick``, unless ``suspended()`` is true then.

    ``idle_s`` is called at each check, so that a changed limit applies to running calls too.
    """

    def __init__(self, idle_s: Callable[[], float], *, suspended: Callable[[], bool] = lambda: False) -> None:
        self._idle_s = idle_s
        self._suspended = suspended
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._last = 0.0
        self._expired = False

    def kick(self, ago_s: float = 0.0) -> None:
        """Note progress made ``ago_s`` seconds ago."""
        self._last = self._loop.time() - ago_s

    async def __aenter__(self) -> Watchdog:
        task = asyncio.current_task()
        assert task is not None, "a watchdog guards the body of a task"
        self._task = task
        self._cancelling = task.cancelling()
        self.kick()
        self._timer = self._loop.call_later(self._idle_s(), self._check)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Convert the cancellation to TimeoutError if only this watchdog caused it, as ``asyncio.timeout`` does."""
        if self._timer is not None:
            self._timer.cancel()
        del self._suspended  # it may refer to this watchdog: the cycle would keep the call in memory until a collection
        if self._expired and self._task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            raise TimeoutError from error

    def _check(self) -> None:
        self._timer = None
        now = self._loop.time()
        due = self._last + self._idle_s()
        if due <= now and not self._suspended():
            self._expired = True
            self._task.cancel()
            return
        due = self._last + self._idle_s()  # ``suspended`` may have found progress
        self._timer = self._loop.call_later(due - now if due > now else self._idle_s(), self._check)
