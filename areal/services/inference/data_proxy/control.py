"""The engine as the data proxy sees and controls it: readiness, pauses, the weights that it has, its control routes.

A data proxy is ready when its engine is, and when the engine has the weights that the model serves: those that a
trainer published last, which need not be those that it starts with. A published version is a file beside the model's
journals and survives every process. A data proxy that starts, or whose engine was restarted, is *behind* until its
engine has that version; meanwhile it is neither ready nor serving. Weights of another base model are ignored.

One control runs at a time. A pause that fails, or whose client disconnects, is undone: nobody would end it. While
memory is released the proxy is not ready and refuses calls, so that they go to other replicas.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from areal.files import replace_file
from areal.services.http.auth import Access
from areal.services.http.errors import ApiError, bad_request
from areal.services.http.messages import AnyResponse, Request, Response, read_object
from areal.services.http.process import report_stage
from areal.services.http.service import Service, json_response
from areal.services.http.tasks import uninterrupted, until_beat
from areal.services.inference.engines.base import (
    EngineError,
    EngineRefused,
    EngineState,
    EngineUnavailable,
    EngineUnsupported,
    TokenEngine,
)
from areal.services.inference.recorder.storage import PUBLISHED
from areal.services.inference.versions import check_grows, read_version
from areal.wire.fields import read_fields
from areal.wire.processes import DataProxyConfig
from areal.wire.routing import worker_base_url


def api_error(error: EngineError, *, retry: bool = False) -> ApiError:
    """An engine's failure as the client's error. ``retry``: the client may try again at once."""
    match error:
        case EngineUnsupported():
            return ApiError(400, str(error), code="unsupported_by_engine")
        case EngineRefused():
            return ApiError(400, str(error), code=error.code or "engine_refused")
        case EngineUnavailable():
            headers = {"Retry-After": "1"} if retry else {}
            return ApiError(503, str(error), code="engine_unavailable", headers=headers)
    return ApiError(502, str(error), code="engine_failed")


class PauseState:
    """Whether the engine is paused, by our controls or by its own report. Paused time does not count against a call's
    deadline; after a pause each call has its whole deadline again."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._ended = -math.inf
        self.active = False
        self.on_change: Callable[[], None] = lambda: None
        self.commands = 0  # how often ``set`` was called: an observation that began before the last one is stale

    def set(self, active: bool) -> None:
        """Set the state by a control of ours."""
        self.commands += 1
        self._change(active)

    def observe(self, paused: bool | None, *, asked_at: int) -> None:
        """The engine's own report, requested when ``commands`` was ``asked_at``; None: it does not tell."""
        if paused is not None and asked_at == self.commands:
            self._change(paused)

    def _change(self, active: bool) -> None:
        if self.active and not active:
            self._ended = self._loop.time()
        changed, self.active = self.active != active, active
        if changed:
            self.on_change()

    def excuses(self, idle_s: float) -> bool:
        """Whether a pause may explain ``idle_s`` seconds of silence."""
        return self.active or self._loop.time() - self._ended < idle_s


_STARTING_PERIOD_S = 0.1
_DOWN_SHARE = 0.05  # of the time that the engine is down: polls become rarer, up to its usual period
_PERIOD_S = 1.0
_LOST_AFTER = 2
OWN_WEIGHTS = ""  # the pair of the weights that an engine starts with


class EngineWatch:
    """Polls engine health, more often at first while it is down, half as often while it is not ``busy``, and soon after
    ``suspect``. ``state`` is the newest answer; a single failed poll after good ones is ignored. ``on_progress`` is
    called when the engine reports more sampled tokens than before. ``losses``: how often the engine was lost or
    replaced, and with it every weight update since its start."""

    def __init__(
        self,
        ask: Callable[[], Awaitable[EngineState]],
        *,
        period_s: float = _PERIOD_S,
        pause: PauseState | None = None,
        on_progress: Callable[[], None] = lambda: None,
        busy: Callable[[], bool] = lambda: True,
    ) -> None:
        self._ask = ask
        self._on_progress = on_progress
        self._busy = busy
        self._suspected = asyncio.Event()
        self.on_change: Callable[[], None] = lambda: None
        self._period_s = period_s
        self._pause = pause
        self._failures = 0
        self.losses = 0
        self.state = EngineState(not_ready="the engine was not asked yet")

    async def run(self) -> None:
        report_stage("waiting for the engine")
        now = asyncio.get_running_loop().time
        well_at = now()
        while True:
            self._suspected.clear()
            await self.refresh()
            if self.state.not_ready is None and not self._failures:
                well_at = now()
                period_s = self._period_s if self._busy() else 2 * self._period_s
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(until_beat(period_s)):
                        await self._suspected.wait()
                    await asyncio.sleep(_STARTING_PERIOD_S)  # an engine that closes every connection is no reason
            else:
                await asyncio.sleep(self._down_pause_s(now() - well_at))

    def _down_pause_s(self, down_s: float) -> float:
        return max(_STARTING_PERIOD_S, min(self._period_s, down_s * _DOWN_SHARE))

    def suspect(self) -> None:
        """The engine closed a connection: poll soon."""
        self._suspected.set()

    async def refresh(self) -> None:
        """Poll now."""
        pause = self._pause
        asked_at = pause.commands if pause else 0
        answer, before = await self._ask(), self.state
        self._keep(answer)
        if replace(self.state, generated=before.generated) != before:
            self.on_change()
        if pause:  # a lost engine pauses nothing
            lost = self.state.not_ready is not None
            pause.observe(False if lost else answer.paused, asked_at=asked_at)

    async def confirm(self) -> None:
        """Poll until it is certain whether the engine is there."""
        await self.refresh()
        while self._failures and self.state.not_ready is None:
            await self.refresh()

    def _keep(self, answer: EngineState) -> None:
        was_ready = self.state.not_ready is None
        if answer.not_ready is None:
            self._failures = 0
            if answer.generated != self.state.generated:
                self._on_progress()
            self.state = answer
            if not was_ready:
                report_stage("serving")
            return
        self._failures += 1
        if not was_ready or self._failures >= _LOST_AFTER:
            self.losses += was_ready
            self.state = answer


@dataclass(frozen=True)
class PublishedWeights:
    """A published version. ``path``: the folder of its weights, if they are in one. ``gateway``: the weight-update
    gateway that transfers them while the trainer lives. ``base``: the model that the engine was started with."""

    pair: str
    version: int
    path: str | None = None
    gateway: str | None = None
    base: str | None = None

    @classmethod
    def read(cls, text: str) -> PublishedWeights | None:
        """Read a record; None for a malformed one: a file of another release must not keep a model from serving."""
        try:
            return read_fields(cls, json.loads(text), lenient=True)
        except ValueError:
            return None


class WeightTracker:
    """The published weights, and whether our engine has them. Without a folder only this process remembers them."""

    def __init__(self, watch: EngineWatch, folder: Path | None, base: str | None) -> None:
        self._watch = watch
        self.file = folder / PUBLISHED if folder is not None else None
        self._base = base
        self._stamp: tuple[int, int] | None = None
        # Pair, version and the engine's losses by then. Two: an update's weights count from its commit on, the weights
        # before them until then.
        self._loaded: deque[tuple[str, int, int]] = deque(maxlen=2)
        self.published: PublishedWeights | None = None
        self._invalid_at: int | None = None  # the engine's losses when its weights were last declared invalid
        self.obstacle = ""  # why the engine could not take the published weights the last time
        self.reload()

    def reload(self) -> None:
        """Read the file again if it changed: any data proxy of the model writes it."""
        if self.file is None:
            return
        try:
            found = self.file.stat()
            stamp = found.st_ino, found.st_mtime_ns
            if stamp == self._stamp:
                return
            record = PublishedWeights.read(self.file.read_text())
        except OSError:
            stamp, record = None, None
        self._stamp = stamp
        self.published = record if record is not None and record.base == self._base else None

    def loaded(self, pair: str, version: int) -> None:
        """Our engine has these weights, until it is lost."""
        self._invalid_at = None
        now = pair, version, self._watch.losses
        if now not in self._loaded:
            self._loaded.append(now)

    def invalidate(self) -> None:
        """Our engine has weights of an update that failed: it is behind until it has loaded the published weights, or
        without those its own."""
        self._loaded.clear()
        self._invalid_at = self._watch.losses

    @property
    def behind(self) -> PublishedWeights | None:
        """The published weights that our engine lacks. A version that the engine reports counts, except 0, which a
        fresh engine reports too."""
        is_invalid = self._invalid_at == self._watch.losses
        record = self.published or (
            PublishedWeights(OWN_WEIGHTS, 0, self._base, None, self._base) if is_invalid else None
        )
        if record is None or (record.pair, record.version, self._watch.losses) in self._loaded:
            return None
        state = self._watch.state
        if not is_invalid and state.not_ready is None and state.version == record.version > 0:
            self.loaded(record.pair, record.version)
            return None
        return record

    @property
    def reason(self) -> str | None:
        """The reason why nothing is served now, if there is one."""
        if (record := self.behind) is None:
            return None
        if record.pair == OWN_WEIGHTS:
            return f"an update failed, the engine goes back to its own weights. {self.obstacle}".rstrip()
        reason = (
            f"version {record.version} of the pair {record.pair!r} is published, and the engine does not have it yet"
        )
        return f"{reason}: {self.obstacle}" if self.obstacle else reason

    def commit(self, record: PublishedWeights) -> None:
        """Every worker has this version: the model serves it from now on. Raises OSError."""
        self._write(record)
        self.loaded(record.pair, record.version)

    def end(self, pair: str, left: Mapping[str, Any] | None) -> None:
        """The trainer is done. Weights that it leaves in a folder are served on; without them an engine that starts
        serves its own. Raises OSError."""
        record = self.published
        if record is None or record.pair != pair:
            return
        path = left.get("path") if left is not None and left.get("version") == record.version else None
        if isinstance(path, str) and Path(path).is_dir():
            self._write(PublishedWeights(pair, record.version, path, None, record.base))
        else:
            self.published, self._stamp = None, None
            if self.file is not None:
                self.file.unlink(missing_ok=True)

    def record(self, pair: str, version: int, path: str | None, gateway: str | None) -> PublishedWeights:
        return PublishedWeights(pair, version, path, gateway, self._base)

    def _write(self, record: PublishedWeights) -> None:
        self.published = record
        if self.file is None:
            return
        replace_file(self.file, json.dumps(asdict(record)).encode())
        self.reload()


# Controls. All of their routes need the admin key.

_T = TypeVar("_T")
_BODY_BYTES = 64 * 1024
_CONTROL_PATHS = (
    "/pause_generation",
    "/continue_generation",
    "/release_memory_occupation",
    "/resume_memory_occupation",
    "/set_version",
    "/configure_backend",
)


class EngineControl:
    """``engine_at`` is the client of an engine of our kind at a URL; ``in_flight`` counts the running model calls;
    ``tracker`` knows whether the engine has the weights to serve."""

    def __init__(
        self,
        config: DataProxyConfig,
        engine: TokenEngine,
        engine_at: Callable[[str], TokenEngine],
        watch: EngineWatch,
        pause: PauseState,
        in_flight: Callable[[], int],
        tracker: WeightTracker,
    ) -> None:
        self.engine_url = config.engine_url
        self._kind = config.engine
        self._engine = engine
        self._engine_at = engine_at
        self._watch = watch
        self._pause = pause
        self._in_flight = in_flight
        self._tracker = tracker
        self._lock = asyncio.Lock()
        self.memory_released = False

    def add_to(self, service: Service) -> None:
        memory = self.release_memory, self.restore_memory
        handlers = (self.pause, self.resume, *memory, self.set_version, self.configure_backend)
        for path, handler in zip(_CONTROL_PATHS, handlers, strict=True):
            service.route("POST", path, handler, Access.ADMIN)
        service.route("GET", "/get_version", self.get_version, Access.ADMIN)

    @property
    def paused(self) -> bool:
        return self._pause.active

    @property
    def losses(self) -> int:
        """The number of engines that were lost so far."""
        return self._watch.losses

    async def probe(self) -> None:
        """Find out now whether the engine is there."""
        await self._watch.confirm()

    @property
    def engine_is_available(self) -> bool:
        return self._watch.state.not_ready is None and not self.memory_released

    @property
    def not_ready(self) -> str | None:
        """The reason why no call is served now, if there is one."""
        released = "the engine's memory is released" if self.memory_released else None
        return released or self._watch.state.not_ready or self._tracker.reason

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

        await uninterrupted(resume(), "undo-pause")

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

    async def configure_backend(self, request: Request) -> Response:
        """Another engine process takes over, once it is ready; it has none of the earlier one's weight updates. Running
        calls end at the engine where they started. Raises 400, 502."""
        given = (await read_object(request, _BODY_BYTES)).get("backend_addr")
        if not isinstance(given, str):
            raise bad_request("backend_addr must be the engine's address, host:port", param="backend_addr")
        try:
            url = worker_base_url(given)
        except ValueError as error:
            raise bad_request(str(error), param="backend_addr") from error
        reason = (await self._engine_at(url).state()).not_ready
        if reason is not None:
            message = f"no {self._kind} engine is ready at {url}: {reason}"
            raise ApiError(502, message, code="engine_unavailable", param="backend_addr")
        async with self.exclusively():
            self._engine.point_to(url)
            self.engine_url = url
            self._watch.losses += 1
        return json_response({"status": "ok", "backend_addr": url})

    async def swap_weights(self, swap: Callable[[], Awaitable[None]]) -> float:
        """Run ``swap`` while nothing is generated; returns the milliseconds that took. Generation resumes afterwards,
        whether it failed or not, unless somebody else paused it. It runs to its end even when the client disconnects:
        half a swap would be weights under another version. Raises EngineError."""
        pausing = not self._engine.capabilities.swaps_between_steps
        return await uninterrupted(self._swap_locked(swap, pausing=pausing), "swap-weights")

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
        """The same as ``exclusively``; raises EngineError."""
        async with self._lock:
            yield
            await self._watch.refresh()


_NOT_OURS = "an external model is not ours to pause, to resize or to version"


def refuse_controls(service: Service) -> None:
    """Add the same routes for an external model: each answers 400."""

    async def refused(request: Request) -> AnyResponse:
        raise ApiError(400, _NOT_OURS, code="unsupported_by_engine")

    for path in _CONTROL_PATHS:
        service.route("POST", path, refused, Access.ADMIN)
    service.route("GET", "/get_version", refused, Access.ADMIN)


@contextlib.contextmanager
def engine_errors_as_api_errors() -> Iterator[None]:
    try:
        yield
    except EngineError as error:
        raise api_error(error) from error
