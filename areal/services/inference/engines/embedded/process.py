"""The engine process: HTTP from the start, the model loaded beside it, and an end when either fails.

Loading runs in a thread of its own, so that probes see its stages. A load or a step that fails ends the process with
exit status 1, for the supervisor to start it again: an engine that lives but cannot compute is worse than none.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from areal.errors import ArealError
from areal.services.inference.engines.embedded.app import EngineRoutes
from areal.services.inference.engines.embedded.loading import Loaded, ModelFolder, load
from areal.services.inference.engines.embedded.settings import Settings
from areal.services.inference.engines.embedded.streams import Streams
from areal.services.web.lifetime import Lifetime
from areal.services.web.options import ServeOptions
from areal.services.web.serve import serve
from areal.services.web.service import Service
from areal.services.web.stage import report_stage

logger = logging.getLogger(__name__)
SERVING = "serving"


class Stage:
    """What the process does now, for probes and for whoever reads the stage file. Set by the loading thread."""

    def __init__(self) -> None:
        self.name, self.done, self.total = "starting", None, None
        self._reported = -1.0

    name: str
    done: int | None
    total: int | None

    def report(self, name: str, done: int | None = None, total: int | None = None) -> None:
        share = done / total if done is not None and total else 0.0
        changed = name != self.name
        self.name, self.done, self.total = name, done, total
        if changed or share == 1.0 or share - self._reported >= 0.01:  # a file a hundredth, not one a tensor
            self._reported = share
            report_stage(name, done=done, total=total)

    def not_ready(self) -> str | None:
        return None if self.name == SERVING else self.name

    def details(self) -> dict[str, Any]:
        return {"stage": self.name, "done": self.done, "total": self.total}


async def run(folder: ModelFolder, settings: Settings, serving: ServeOptions) -> None:
    """Serve until told to stop. Raises ArealError when the model cannot be loaded or a step fails."""
    stage, streams = Stage(), Streams(asyncio.get_running_loop())
    failed: Future[None] = _uncancellable()
    loading = _in_thread(lambda: load(folder, settings, stage.report, streams.progress, failed.set_exception))
    routes = EngineRoutes(streams)
    service = Service(
        "engine",
        key=serving.key,
        loopback=serving.loopback,
        not_ready=stage.not_ready,
        details=lambda: {**stage.details(), "model_path": str(folder.path), **routes.details()},
    )
    routes.add_to(service)

    async def living() -> None:
        loaded = await asyncio.wrap_future(loading)
        routes.serve_with(loaded)
        stage.report(SERVING)
        logger.info("serving: %s", loaded.description)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(_let_go(loaded, service.lifetime), name="let-go")
            await asyncio.wrap_future(failed)

    tasks = [asyncio.create_task(serve(service, serving), name="serve"), asyncio.create_task(living(), name="living")]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    if loading.done() and loading.exception() is None:
        loading.result().engine.close()
    for outcome in outcomes:
        if isinstance(outcome, BaseException) and not isinstance(outcome, asyncio.CancelledError):
            raise _as_error(outcome)


async def _let_go(loaded: Loaded, lifetime: Lifetime) -> None:
    """Requests frozen by a pause would hold a drain up for ever."""
    await lifetime.wait_draining()
    loaded.engine.let_go_if_paused()


def _in_thread(work: Callable[[], Loaded]) -> Future[Loaded]:
    """A daemon thread: a process told to stop does not wait for a load."""
    future: Future[Loaded] = _uncancellable()

    def body() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 (the boundary of the thread: the loop raises it)
            future.set_exception(error)

    threading.Thread(target=body, name="load", daemon=True).start()
    return future


def _uncancellable() -> Future[Any]:
    """The thread that sets it must find it open, whoever stopped waiting."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return future


def _as_error(error: BaseException) -> ArealError:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error if isinstance(error, ArealError) else ArealError(f"the engine failed: {error!r}")
