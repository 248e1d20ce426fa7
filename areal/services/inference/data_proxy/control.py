"""The control routes of a data proxy: pause, versions, memory and address of its engine. All need the admin key.

One control runs at a time. A pause that fails, or whose client disconnects, is undone: nobody would end it. While
memory is released the proxy is not ready and refuses calls, so that they go to other replicas.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from typing import Any

from areal.services.http.auth import Access
from areal.services.http.client import HttpClient
from areal.services.http.errors import ApiError, bad_request
from areal.services.http.messages import AnyResponse, Request, Response, read_object
from areal.services.http.service import Handler, Service, json_response
from areal.services.inference.data_proxy.engine_state import EngineWatch, PauseState, WeightTracker, api_error
from areal.services.inference.engines import open_engine
from areal.services.inference.engines.base import EngineError, TokenEngine
from areal.services.inference.router.registry import worker_base_url
from areal.services.inference.versions import check_grows, read_version

_BODY_BYTES = 64 * 1024
CONTROL_PATHS = (
    "/pause_generation",
    "/continue_generation",
    "/release_memory_occupation",
    "/resume_memory_occupation",
    "/set_version",
)


class EngineControl:
    """``in_flight`` counts the running model calls; ``tracker`` knows whether the engine has the weights to serve."""

    def __init__(
        self,
        engine: TokenEngine,
        watch: EngineWatch,
        pause: PauseState,
        in_flight: Callable[[], int],
        tracker: WeightTracker,
    ) -> None:
        self._engine = engine
        self._watch = watch
        self._pause = pause
        self._in_flight = in_flight
        self._tracker = tracker
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
        return self._pause.active

    @property
    def losses(self) -> int:
        """How often an engine was lost so far."""
        return self._watch.losses

    async def probe(self) -> None:
        """Find out now whether the engine is there."""
        await self._watch.confirm()

    @property
    def engine_is_available(self) -> bool:
        return self._watch.state.not_ready is None and not self.memory_released

    @property
    def not_ready(self) -> str | None:
        """Why no call is served now."""
        released = "the engine's memory is released" if self.memory_released else None
        return released or self._watch.state.not_ready or self._tracker.reason

    def engine_changed(self) -> None:
        """Another engine answers from now on: it has none of the earlier one's weight updates."""
        self._watch.losses += 1

    def check_serving(self) -> None:
        """Raises 503 while the engine's memory is released, or its weights are outdated."""
        if self.memory_released:
            message = "the engine's memory is released"
            raise ApiError(503, message, code="memory_released", headers={"Retry-After": "1"})
        if (behind := self._tracker.reason) is not None:
            raise ApiError(503, behind, code="weights_behind", headers={"Retry-After": "1"})

    async def pause(self, request: Request) -> Response:
        await request.read(_BODY_BYTES)
        async with self.exclusively():
            was_paused = self._pause.active
            self._pause.set(True)  # first: no deadline may end while the engine pauses
            try:
                await self._engine.pause()
            except BaseException:
                if not was_paused:
                    await self._undo_pause()
                raise
        return json_response({"status": "ok", "paused": True, "version": await self._engine.version()})

    async def _undo_pause(self) -> None:
        """Resume although the pause failed, or its client disconnected: the engine may have received it."""

        async def resume() -> None:
            with contextlib.suppress(EngineError):
                await self._engine.resume()
            self._pause.set(False)

        task = asyncio.create_task(resume(), name="undo-pause")
        self._cleanups.add(task)
        task.add_done_callback(self._cleanups.discard)
        await asyncio.shield(task)

    async def resume(self, request: Request) -> Response:
        await request.read(_BODY_BYTES)
        async with self.exclusively():
            await self._engine.resume()
            self._pause.set(False)
        return json_response({"status": "ok", "paused": False, "version": await self._engine.version()})

    async def set_version(self, request: Request) -> Response:
        """A version only grows, unless ``force`` sets it back."""
        version, force = read_version(await read_object(request, _BODY_BYTES))
        async with self.exclusively():
            check_grows(version, await self._engine.version(), force=force)
            await self._engine.set_version(version)
        return json_response({"status": "ok", "version": version})

    async def get_version(self, request: Request) -> Response:
        with engine_errors_as_api_errors():
            return json_response({"version": await self._engine.version()})

    async def release_memory(self, request: Request) -> Response:
        await request.read(_BODY_BYTES)
        async with self.exclusively():
            if not self.memory_released:
                self.memory_released = True  # no call may start meanwhile
                try:
                    if running := self._in_flight():
                        message = f"{running} calls are running: their cache cannot be released under them"
                        raise ApiError(409, message, code="requests_in_flight")
                    await self._engine.release_memory()
                except BaseException:
                    self.memory_released = False
                    raise
        return json_response({"status": "ok", "memory_released": True})

    async def restore_memory(self, request: Request) -> Response:
        await request.read(_BODY_BYTES)
        async with self.exclusively():
            await self._engine.restore_memory()
            self.memory_released = False
        return json_response({"status": "ok", "memory_released": False})

    async def swap_weights(self, swap: Callable[[], Awaitable[None]]) -> float:
        """Run ``swap`` while nothing is generated; returns the milliseconds that took. Generation resumes afterwards,
        whether it failed or not, unless somebody else paused it. It runs to its end even when the client disconnects:
        half a swap would be weights under another version. Raises EngineError."""
        between_steps = self._engine.capabilities.swaps_between_steps
        task = asyncio.create_task(self._swap_locked(swap, pausing=not between_steps), name="swap-weights")
        self._cleanups.add(task)
        task.add_done_callback(self._cleanups.discard)
        return await asyncio.shield(task)

    async def _swap_locked(self, swap: Callable[[], Awaitable[None]], *, pausing: bool) -> float:
        async with self.locked():
            was_paused, began = self._pause.active, time.monotonic()
            self._pause.set(True)
            try:
                if pausing:
                    await self._engine.pause()
                await swap()
            finally:
                if pausing and not was_paused:
                    await self._engine.resume()
                self._pause.set(was_paused)
            return (time.monotonic() - began) * 1e3

    @contextlib.asynccontextmanager
    async def exclusively(self) -> AsyncIterator[None]:
        """One control at a time; the probes show its effect at once. Raises ApiError."""
        with engine_errors_as_api_errors():
            async with self.locked():
                yield

    @contextlib.asynccontextmanager
    async def locked(self) -> AsyncIterator[None]:
        """As ``exclusively``; raises EngineError."""
        async with self._lock:
            yield
            await self._watch.refresh()


def refuse_controls(service: Service, why: str) -> None:
    """Add the same routes for an engine that cannot be controlled: each answers 400."""

    async def refused(request: Request) -> AnyResponse:
        raise ApiError(400, why, code="unsupported_by_engine")

    routes: list[tuple[str, str, Handler]]
    routes = [("POST", path, refused) for path in (*CONTROL_PATHS, "/configure_backend")]
    for method, path, handler in [*routes, ("GET", "/get_version", refused)]:
        service.route(method, path, handler, Access.ADMIN)


@contextlib.contextmanager
def engine_errors_as_api_errors() -> Iterator[None]:
    try:
        yield
    except EngineError as error:
        raise api_error(error) from error


class BackendRoute:
    """``/configure_backend``: another engine process of the same kind takes over while the data proxy runs."""

    def __init__(
        self,
        kind: str,
        engine: TokenEngine,
        control: EngineControl,
        http: HttpClient,
        headers: Mapping[str, str],
        url: str,
    ) -> None:
        self._kind = kind
        self.url = url  # of the current engine
        self._engine = engine
        self._control = control
        self._http = http
        self._headers = dict(headers)

    def add_to(self, service: Service) -> None:
        service.route("POST", "/configure_backend", self.configure, Access.ADMIN)

    async def configure(self, request: Request) -> Response:
        """Only a ready engine takes over. Running calls end at the engine where they started. Raises 400, 502."""
        given = (await read_object(request, _BODY_BYTES)).get("backend_addr")
        if not isinstance(given, str):
            raise bad_request("backend_addr must be the engine's address, host:port", param="backend_addr")
        try:
            url = worker_base_url(given)
        except ValueError as error:
            raise bad_request(str(error), param="backend_addr") from error
        state = await open_engine(self._kind, self._http, url, self._headers).state()
        if state.not_ready is not None:
            message = f"no {self._kind} engine is ready at {url}: {state.not_ready}"
            raise ApiError(502, message, code="engine_unavailable", param="backend_addr")
        async with self._control.exclusively():
            self._engine.point_to(url)
            self.url = url
            self._control.engine_changed()
        return json_response({"status": "ok", "backend_addr": url})
