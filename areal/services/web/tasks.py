"""Background tasks: named, never dying unseen, and those that look after something now and then all at one time."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

_log = logging.getLogger(__name__)
_PHASE_S = random.uniform(0.0, 3600.0)  # of this process: others wake at other times


def until_beat(period_s: float) -> float:
    """How long to sleep for what is done every ``period_s``. All that a process does so happens at the same times, as
    far as periods go into each other: waking an idle process costs more than what it then does."""
    if period_s <= 0:
        return 0.0
    left_s = period_s - (asyncio.get_running_loop().time() - _PHASE_S) % period_s
    return left_s if left_s > period_s / 4 else left_s + period_s  # a timer rings a little early, too


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
    """Keep ``run()`` going beside the body. A failure is logged and the task starts again; leaving cancels it."""
    task = asyncio.create_task(_guarded(name, run, again_after_s), name=name)
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
