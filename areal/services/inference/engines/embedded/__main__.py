"""``python -m areal.services.inference.engines.embedded --model-path DIR``

The process answers /health with its stage from the start, since a thread loads the model, and /ready with 200 once it
serves. A model that cannot be served, or a step that fails, ends the process with one line on stderr and exit status 1,
for its supervisor to restart it.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NoReturn

from areal.errors import ArealError
from areal.http import tracing
from areal.hub import model_folder
from areal.services.http.process import ServeOptions, exit_on_failure, read_config, serve_options
from areal.services.inference.engines.embedded.loading import (
    LoadedModel,
    ModelFolder,
    adapter_folders,
    inspect_folder,
    load_model,
)
from areal.wire.processes import EmbeddedEngineConfig
from areal.wire.stage import report_stage

# A step is many short operations that release the GIL. The engine's thread must not wait the default 5 ms to get it
# back.
_SWITCH_INTERVAL_S = 0.0005
_M_ARENA_MAX = -8  # from glibc's <malloc.h>
_SERVING = "serving"
_log = logging.getLogger("areal.services.inference.engines.embedded")


def main() -> None:
    use_one_heap()
    config = read_config(EmbeddedEngineConfig, "areal-embedded-engine")
    serving, lora = serve_options(config), adapter_folders(config.lora)
    report_stage("reading config")
    folder = inspect_folder(model_folder(config.model_path))
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    from areal.services.http.serve import run_loop

    run_loop(lambda: run(folder, config, lora, serving), serving.log_level)


def use_one_heap() -> None:
    """Limit glibc to one heap, before any thread starts. With one heap per thread, replaced weights go back to the
    system, and the next ones cost a page fault per page again."""
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)  # only glibc has it
    if set_option is not None:
        set_option(_M_ARENA_MAX, 1)


class StartupStage:
    """The startup stage, for probes and the stage file. The loading thread sets it."""

    name = "starting"
    done: int | None = None
    total: int | None = None
    _reported = -1.0

    def report(self, name: str, done: int | None = None, total: int | None = None) -> None:
        share = done / total if done is not None and total else 0.0
        changed = name != self.name
        self.name, self.done, self.total = name, done, total
        if changed or share == 1.0 or share - self._reported >= 0.01:  # written per percent, not per tensor
            self._reported = share
            report_stage(name, done=done, total=total)

    def not_ready(self) -> str | None:
        return None if self.name == _SERVING else self.name

    def details(self) -> dict[str, object]:
        return {"stage": self.name, "done": self.done, "total": self.total}


async def run(
    folder: ModelFolder, config: EmbeddedEngineConfig, lora: Mapping[str, Path], serving: ServeOptions
) -> None:
    """Serve until a stop signal. Raises ArealError if the model cannot be loaded or a step fails."""
    from areal.services.http.serve import serve
    from areal.services.http.service import Service
    from areal.services.inference.engines.embedded.app import EngineRoutes
    from areal.services.inference.engines.embedded.requests import Streams

    stage, streams = StartupStage(), Streams(asyncio.get_running_loop())
    failed: Future[None] = _uncancellable()
    loading = _in_thread(lambda: load_model(folder, config, lora, stage.report, streams.progress, failed.set_exception))
    routes = EngineRoutes(streams)
    service = Service(
        "engine",
        key=serving.key,
        loopback=serving.loopback,
        not_ready=stage.not_ready,
        details=lambda: {**stage.details(), "model_path": str(folder.path), **routes.details()},
    )
    routes.add_to(service)

    async def abort_paused(loaded: LoadedModel) -> None:
        """Abort requests that a pause holds, which would block a drain forever."""
        await service.lifetime.wait_draining()
        loaded.engine.abort_if_paused()

    async def run_engine() -> None:
        loaded = await asyncio.wrap_future(loading)
        routes.serve_with(loaded)
        stage.report(_SERVING)
        _log.info("serving: %s", loaded.description)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(abort_paused(loaded), name="abort-paused")
            await asyncio.wrap_future(failed)

    tasks = [
        asyncio.create_task(serve(service, serving), name="serve"),
        asyncio.create_task(run_engine(), name="engine"),
    ]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    if loading.done() and loading.exception() is None:
        loading.result().engine.close()
    for outcome in outcomes:
        if isinstance(outcome, BaseException) and not isinstance(outcome, asyncio.CancelledError):
            while isinstance(outcome, BaseExceptionGroup):
                outcome = outcome.exceptions[0]
            raise outcome if isinstance(outcome, ArealError) else ArealError(f"the engine failed: {outcome!r}")


def _in_thread(work: Callable[[], LoadedModel]) -> Future[LoadedModel]:
    """Run ``work`` in a daemon thread, for which a stopping process does not wait."""
    future: Future[LoadedModel] = _uncancellable()

    def body() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 (the boundary of the thread: the loop raises it)
            future.set_exception(error)

    threading.Thread(target=body, name="load", daemon=True).start()
    return future


def _uncancellable() -> Future[Any]:
    """Return a future that its thread can set, even after its waiter was cancelled."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return future


def exit_process(status: int) -> NoReturn:
    """Exit with ``status``. While the model is loading the interpreter's own exit would abort the process, since it
    cannot unwind the loading thread's native code."""
    if any(thread.daemon for thread in threading.enumerate()):
        tracing.end()
        logging.shutdown()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


if __name__ == "__main__":
    exit_process(exit_on_failure(main))
