"""An event loop on its own thread, for synchronous callers. It uses uvloop if that is installed."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

_STOP_S = 10.0


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


class LoopThread:
    """An event loop on a daemon thread. ``close``, from any other thread, cancels the running tasks."""

    def __init__(self, name: str) -> None:
        self._loop = _new_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._closing = threading.Lock()
        self._thread.start()

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        return self._loop

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
            self._loop.run_until_complete(cancel_all())
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
        finally:
            self._loop.close()

    def start(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        try:
            self._check()
        except RuntimeError:
            work.close()
            raise
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _check(self) -> None:
        if threading.current_thread() is self._thread:
            raise RuntimeError("this call blocks: from a coroutine, use the async client")
        if not self._thread.is_alive():
            raise RuntimeError("the client is closed")

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run ``work`` and return its result. An interrupt of the caller (Ctrl-C) cancels ``work``."""
        future = self.start(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def call(self, function: Callable[[], T]) -> T:
        """Run a synchronous function as a callback of the loop, and return its result."""
        self._check()
        future: concurrent.futures.Future[T] = concurrent.futures.Future()

        def work() -> None:
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)
                if not isinstance(error, Exception):
                    raise

        self._loop.call_soon_threadsafe(work)
        return future.result()

    def close(self) -> None:
        with self._closing:
            if self._thread.is_alive():
                self._loop.call_soon_threadsafe(self._loop.stop)
                self._thread.join(_STOP_S)


async def cancel_all() -> None:
    """Cancel all other tasks of this loop, and wait for them."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
