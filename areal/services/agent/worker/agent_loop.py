"""The event loop for the agent's code, in its own thread. An agent that blocks the loop stops its own turns, but not
the worker's health routes, which report it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import AsyncIterator, Coroutine
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import areal
from areal.client.loop_thread import cancel_all
from areal.services.http.service import Metrics
from areal.services.http.tasks import background

T = TypeVar("T")
_BEAT_S = 1.0
_BLOCKED_S = 5.0
_END_S = 3.0  # for cancelled tasks to end
_LIBRARIES = (sys.prefix, sys.base_prefix, str(Path(areal.__file__).parent), "<frozen")
_log = logging.getLogger(__name__)


def is_own_code(file: str) -> bool:
    """Return whether a file belongs to the agent, not to a library, Python or AReaL."""
    return not file.startswith(_LIBRARIES)


def place_of(thread: threading.Thread) -> str:
    """Return the line that the thread executes: the innermost line of the agent's own code, else the innermost."""
    frames, frame = [], sys._current_frames().get(thread.ident or 0)
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    own = [each for each in frames if is_own_code(each.f_code.co_filename)]
    where = next(iter(own or frames), None)
    return f"{where.f_code.co_filename}:{where.f_lineno}, {where.f_code.co_name}" if where is not None else "its end"


class AgentLoop:
    """An event loop on a daemon thread. It runs while the context ``opened`` is entered on the worker's loop."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._stopping = False
        self._beat = self._asked = time.monotonic()
        self._reported = False
        self._thread = threading.Thread(target=self._main, name="agent", daemon=True)

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a task on the loop, from any thread. Cancelling the future cancels the task."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        return await asyncio.wrap_future(self.start(work))

    @contextlib.asynccontextmanager
    async def opened(self, metrics: Metrics) -> AsyncIterator[None]:
        self._blocks = metrics.counter("areal_agent_loop_blocked_total", "Times that the agent blocked its event loop.")
        self._thread.start()
        try:
            async with background("agent-watch", self._watch):
                yield
        finally:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.run(_end_others()), _END_S)
            self._stopping = True
            self._loop.call_soon_threadsafe(self._loop.stop)

    def _main(self) -> None:
        asyncio.set_event_loop(self._loop)
        # A child process that the agent forks has a copy of this loop. If it returned to the loop, it would consume
        # the events of this process, so it exits there.
        os.register_at_fork(after_in_child=lambda: self._loop.call_soon(os._exit, 1))
        while not self._stopping:
            try:
                self._loop.run_forever()
            except BaseException:  # noqa: BLE001 - the boundary to user code: SystemExit in a task leaves the loop
                _log.exception("a task of the agent would end the worker; it goes on")

    # Detection of a blocked loop.

    @property
    def blocked(self) -> str | None:
        """Where and for how long the agent has been blocking its loop; None if it does not."""
        silent = time.monotonic() - self._asked
        if self._beat >= self._asked or silent < _BLOCKED_S:
            return None
        task = self.current_task
        during = f" in {task.get_name()}" if task is not None else ""
        return f"the agent blocks its event loop for {silent:.0f} s{during}: {place_of(self._thread)}"

    @property
    def current_task(self) -> asyncio.Task[Any] | None:
        return asyncio.current_task(self._loop)

    async def _watch(self) -> None:
        while True:
            if self._beat >= self._asked:
                if self._reported:
                    _log.warning("the agent's event loop goes on")
                self._reported = False
                self._asked = time.monotonic()
                self._loop.call_soon_threadsafe(self._answer)
            elif not self._reported and (found := self.blocked):
                _log.error("%s; what takes long without await belongs on a thread, or into a plain function", found)
                self._reported = True
                self._blocks.inc()
            await asyncio.sleep(_BEAT_S)

    def _answer(self) -> None:
        self._beat = time.monotonic()


async def _end_others() -> None:
    await cancel_all()
    await asyncio.get_running_loop().shutdown_asyncgens()
