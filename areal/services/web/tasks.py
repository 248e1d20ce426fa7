"""Background tasks: named, and never dying unseen."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

_log = logging.getLogger(__name__)


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
