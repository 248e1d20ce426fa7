"""The control routes of a data proxy: pause, versions and memory of its engine. All need the admin key.

One control runs at a time. A pause that fails, or whose caller leaves, is taken back: nobody would end it. While
memory is released the proxy is not ready and refuses calls, so that they go elsewhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

from areal.services.inference.data_proxy.engine_watch import EngineWatch
from areal.services.inference.data_proxy.published import Standing
from areal.services.inference.data_proxy.suspension import Suspension
from areal.services.inference.engines.base import (
    EngineError,
    EngineRefused,
    EngineUnavailable,
    EngineUnsupported,
    TokenEngine,
)
from areal.services.inference.versions import check_grows, read_version
from areal.services.web.access import Access
from areal.services.web.body import read_body, read_object
from areal.services.web.errors import ApiError
from areal.services.web.server import AnyResponse, Request, Response
from areal.services.web.service import Handler, Service, json_response

_BODY_BYTES = 64 * 1024
CONTROL_PATHS = (
    "/pause_generation",
    "/continue_generation",
    "/release_memory_occupation",
    "/resume_memory_occupation",
    "/set_version",
)


class EngineControl:
    """``in_flight`` counts the model calls that run now; ``standing`` tells whether the engine has the weights that it
    is to serve."""

    def __init__(
        self,
        engine: TokenEngine,
        watch: EngineWatch,
        suspension: Suspension,
        in_flight: Callable[[], int],
        standing: Standing,
    ) -> None:
        self._engine = engine
        self._watch = watch
        self._suspension = suspension
        self._in_flight = in_flight
        self._standing = standing
        self._lock = asyncio.Lock()
        self._cleanups: set[asyncio.Task[Any]] = set()
        self.memory_released = False

    def add_to(self, service: Service) -> None:
        handlers = (self.pause, self.resume, self.release_memory, self.restore_memory, self.set_version)
        for path, handler in zip(CONTROL_PATHS, handlers, strict=True):
            service.route("POST", path, handler, Access.ADMIN)
        service.route("GET", "/get_version", self.get_version, Access.ADMIN)

    @property
    def paused(self) -> bool:
        return self._suspension.active

    @property
    def losses(self) -> int:
        """Of engines, so far."""
        return self._watch.losses

    async def look(self) -> None:
        """Find out now whether the engine is there."""
        await self._watch.confirm()

    @property
    def engine_is_there(self) -> bool:
        return self._watch.state.not_ready is None and not self.memory_released

    @property
    def not_ready(self) -> str | None:
        """Why no call is served now."""
        released = "the engine's memory is released" if self.memory_released else None
        return released or self._watch.state.not_ready or self._standing.reason

    def engine_changed(self) -> None:
        """Another engine answers from now on: what the one before had taken, it has not."""
        self._watch.losses += 1

    def admitting(self, handler: Handler) -> Handler:
        """A model route that refuses calls while the engine's memory is released, or its weights are old ones."""

        async def admitted(request: Request) -> AnyResponse:
            if self.memory_released:
                message = "the engine's memory is released"
                raise ApiError(503, message, code="memory_released", headers={"Retry-After": "1"})
            if (behind := self._standing.reason) is not None:
                raise ApiError(503, behind, code="weights_behind", headers={"Retry-After": "1"})
            return await handler(request)

        return admitted

    async def pause(self, request: Request) -> Response:
        await read_body(request, _BODY_BYTES)
        async with self.exclusively():
            was_paused = self._suspension.active
            self._suspension.set(True)  # before: the deadline must not fall into the pausing
            try:
                await self._engine.pause()
            except BaseException:
                if not was_paused:
                    await self._take_back()
                raise
        return json_response({"status": "ok", "paused": True, "version": await self._engine.version()})

    async def _take_back(self) -> None:
        """Resume though the pause failed, or its caller left: the engine may have got it."""

        async def resume() -> None:
            with contextlib.suppress(EngineError):
                await self._engine.resume()
            self._suspension.set(False)

        task = asyncio.create_task(resume(), name="take-back-pause")
        self._cleanups.add(task)
        task.add_done_callback(self._cleanups.discard)
        await asyncio.shield(task)

    async def resume(self, request: Request) -> Response:
        await read_body(request, _BODY_BYTES)
        async with self.exclusively():
            await self._engine.resume()
            self._suspension.set(False)
        return json_response({"status": "ok", "paused": False, "version": await self._engine.version()})

    async def set_version(self, request: Request) -> Response:
        """A version only grows, unless ``force`` sets it back."""
        version, force = read_version(await read_object(request, _BODY_BYTES))
        async with self.exclusively():
            check_grows(version, await self._engine.version(), force=force)
            await self._engine.set_version(version)
        return json_response({"status": "ok", "version": version})

    async def get_version(self, request: Request) -> Response:
        with control_errors():
            return json_response({"version": await self._engine.version()})

    async def release_memory(self, request: Request) -> Response:
        await read_body(request, _BODY_BYTES)
        async with self.exclusively():
            if not self.memory_released:
                await self._release()
        return json_response({"status": "ok", "memory_released": True})

    async def _release(self) -> None:
        self.memory_released = True  # no call may begin meanwhile
        try:
            if running := self._in_flight():
                message = f"{running} calls are running: their cache cannot be released under them"
                raise ApiError(409, message, code="requests_in_flight")
            await self._engine.release_memory()
        except BaseException:
            self.memory_released = False
            raise

    async def restore_memory(self, request: Request) -> Response:
        await read_body(request, _BODY_BYTES)
        async with self.exclusively():
            await self._engine.restore_memory()
            self.memory_released = False
        return json_response({"status": "ok", "memory_released": False})

    async def swapped(self, swap: Callable[[], Awaitable[None]]) -> float:
        """Run ``swap`` while nothing is generated: for how many milliseconds that was. Calls go on afterwards, whatever
        became of it, unless they had been paused by somebody else. It runs to its end also where the caller leaves:
        half of it would be weights under another's version. Raises EngineError."""
        between_steps = self._engine.capabilities.swaps_between_steps
        task = asyncio.create_task(self._swapped(swap, pausing=not between_steps), name="swap-weights")
        self._cleanups.add(task)
        task.add_done_callback(self._cleanups.discard)
        return await asyncio.shield(task)

    async def _swapped(self, swap: Callable[[], Awaitable[None]], *, pausing: bool) -> float:
        async with self.alone():
            was_paused, began = self._suspension.active, time.monotonic()
            self._suspension.set(True)
            try:
                if pausing:
                    await self._engine.pause()
                await swap()
            finally:
                if pausing and not was_paused:
                    await self._engine.resume()
                self._suspension.set(was_paused)
            return (time.monotonic() - began) * 1e3

    @contextlib.asynccontextmanager
    async def exclusively(self) -> AsyncIterator[None]:
        """One at a time; afterwards the probes tell of it at once."""
        with control_errors():
            async with self.alone():
                yield

    @contextlib.asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        """As ``exclusively``, with the engine's own errors."""
        async with self._lock:
            yield
            await self._watch.refresh()


def refuse_controls(service: Service, why: str) -> None:
    """The same routes before something that cannot be controlled: 400 each."""

    async def refused(request: Request) -> AnyResponse:
        raise ApiError(400, why, code="unsupported_by_engine")

    routes: list[tuple[str, str, Handler]]
    routes = [("POST", path, refused) for path in (*CONTROL_PATHS, "/configure_backend")]
    for method, path, handler in [*routes, ("GET", "/get_version", refused)]:
        service.route(method, path, handler, Access.ADMIN)


@contextlib.contextmanager
def control_errors() -> Iterator[None]:
    try:
        yield
    except EngineUnsupported as error:
        raise ApiError(400, str(error), code="unsupported_by_engine") from error
    except EngineRefused as error:
        raise ApiError(400, str(error), code=error.code or "engine_refused") from error
    except EngineUnavailable as error:
        raise ApiError(503, str(error), code="engine_unavailable") from error
    except EngineError as error:
        raise ApiError(502, str(error), code="engine_failed") from error
