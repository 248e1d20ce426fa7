"""Observes and controls a data proxy's engine: readiness, pauses, loaded weights, control routes.

A data proxy is ready when its engine is ready and has the published weights: those that a trainer published last, which
may differ from the weights the engine starts with. The published version is recorded in a file beside the model's
journals, which outlives every process. A data proxy that starts, or whose engine was restarted, is *behind* until its
engine has that version; meanwhile it is not ready and refuses calls. Weights of another base model are ignored.

One control runs at a time. A pause that fails, or whose client disconnects, is undone, since no client would resume the
engine. A failed resume, whether there or after a weight swap, is repeated until it succeeds. While memory is released
the proxy is not ready and refuses calls, so that they go to other replicas. If a data proxy is killed while it has
paused the engine itself, a file tells its successor that no client asked for the pause, and the successor resumes the
engine.

A weight swap with an unknown outcome leaves the engine paused, so that no token is recorded with a wrong version. The
running calls continue once the engine has loaded the published weights; new calls are refused meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

from areal.dataclasses import asdict, dataclass
from areal.errors import FieldName, Wording
from areal.files import parse_json, replace_file, stamp
from areal.services.http.auth import Access
from areal.services.http.errors import ApiError, bad_field, bad_request
from areal.services.http.messages import (
    AnyResponse,
    Request,
    Response,
    read_body,
    read_object,
    refuse_idempotency_key,
)
from areal.services.http.service import Service, json_response
from areal.services.http.tasks import uninterrupted
from areal.services.inference.data_proxy.engine_watch import EngineWatch, PauseState
from areal.services.inference.engines.base import (
    UNKNOWN_VERSION,
    EngineError,
    EngineRefused,
    EngineUnavailable,
    EngineUnsupported,
    TokenEngine,
)
from areal.services.inference.recorder.storage import PAUSING, PUBLISHED
from areal.wire.bodies import LeftWeights, SetVersion
from areal.wire.fields import read_fields
from areal.wire.notes import SERVES, note
from areal.wire.processes import DataProxyConfig
from areal.wire.routing import worker_base_url


def api_error(error: EngineError, *, retry: bool = False) -> ApiError:
    """Convert an engine's error for the client. ``retry``: tell the client to retry after 1 s if the engine is
    unavailable."""
    match error:
        case EngineUnsupported():
            return ApiError(400, str(error), code="unsupported_by_engine")
        case EngineRefused():
            message, param = str(error), error.param
            if param is not None and message.startswith(param):
                message = Wording(FieldName(param), message.removeprefix(param))
            return ApiError(400, message, code=error.code or "engine_refused", param=param)
        case EngineUnavailable():
            headers = {"Retry-After": "1"} if retry else {}
            return ApiError(503, str(error), code="engine_unavailable", headers=headers)
    return ApiError(502, str(error), code="engine_failed")


OWN_WEIGHTS = ""  # the pair name that stands for the weights that an engine starts with


@dataclass(frozen=True)
class PublishedWeights:
    """A published weight version. ``path``: the folder of the weights, if they are in one. ``gateway``: the
    weight-update gateway that transfers them while the trainer runs. ``base``: the model that the engine was started
    with. ``writer``: the job, or the folder of the run, that trained them."""

    pair: str
    version: int
    path: str | None = None
    gateway: str | None = None
    base: str | None = None
    writer: str | None = None

    @classmethod
    def read(cls, text: str) -> PublishedWeights | None:
        """Parse a record. Return None if it is malformed: a file of another release must not keep a model from
        serving."""
        try:
            return read_fields(cls, parse_json(text), lenient=True)
        except ValueError:
            return None


class WeightTracker:
    """Tracks the published weights and whether the engine has them. Without a folder, only this process knows them.
    ``on_change`` is called when an update fails, and when the engine has the published weights again; ``failed`` is set
    when an update fails."""

    def __init__(self, watch: EngineWatch, folder: Path | None, base: str | None) -> None:
        self._watch = watch
        self.file = folder / PUBLISHED if folder is not None else None
        self._base = base
        self._stamp: tuple[int, int, int] | None = None
        # Pair, version, and the engine's losses when it got them. There are two entries because an update's weights
        # count only once they are committed; until then the weights before them do.
        self._loaded: deque[tuple[str, int, int]] = deque(maxlen=2)
        self.published: PublishedWeights | None = None
        self._invalid_at: int | None = None  # the engine's losses when its weights were last declared invalid
        self.obstacle = ""  # why the engine could not load the published weights the last time
        self.not_kept = ""  # why the latest record of published weights could not be written
        self.lacks_room = False  # and whether for lack of room
        self.on_change: Callable[[], None] = lambda: None
        self.failed = asyncio.Event()
        self.reload()

    def reload(self) -> None:
        """Read the file again if it has changed. Every data proxy of the model writes it."""
        if self.file is None:
            return
        try:
            if (now := stamp(self.file)) is not None and now == self._stamp:
                return
            record = PublishedWeights.read(self.file.read_text())
        except OSError:
            now, record = None, None
        self._stamp = now
        self.published = record if record is not None and record.base == self._base else None

    def loaded(self, pair: str, version: int) -> None:
        """Note that the engine has these weights. The note is void once the engine is lost."""
        self._invalid_at = None
        now = pair, version, self._watch.losses
        if now in self._loaded:  # the oldest is forgotten first
            self._loaded.remove(now)
        self._loaded.append(now)

    def reloaded(self, pair: str, version: int) -> None:
        """Note that the engine has these weights again, and not those of an update that is not committed yet."""
        self._loaded.clear()
        self.loaded(pair, version)
        self.on_change()

    def has(self, pair: str, version: int) -> bool:
        """Return whether the engine was given these weights, and has not been lost or invalidated since."""
        return (pair, version, self._watch.losses) in self._loaded

    @property
    def is_invalid(self) -> bool:
        """Whether the engine has weights of a failed update."""
        return self._invalid_at == self._watch.losses

    def invalidate(self) -> None:
        """Note that the engine has weights of a failed update. It is behind until it has loaded the published weights,
        or its own if none are published."""
        self._loaded.clear()
        self._invalid_at = self._watch.losses
        self.failed.set()
        self.on_change()

    @property
    def behind(self) -> PublishedWeights | None:
        """The published weights that the engine lacks; None if it has them. A version that the engine reports counts as
        loaded, except 0, which a fresh engine reports too."""
        record = self.published or (
            PublishedWeights(OWN_WEIGHTS, 0, self._base, None, self._base) if self.is_invalid else None
        )
        if record is None or self.has(record.pair, record.version):
            return None
        state = self._watch.state
        if not self.is_invalid and state.not_ready is None and state.version == record.version > 0:
            self.loaded(record.pair, record.version)
            return None
        return record

    @property
    def reason(self) -> str | None:
        """Why the engine's weights do not allow serving now; None if they do."""
        if (record := self.behind) is None:
            return None
        if record.pair == OWN_WEIGHTS:
            return f"an update failed, the engine goes back to its own weights. {self.obstacle}".rstrip()
        reason = (
            f"version {record.version} of the pair {record.pair!r} is published, and the engine does not have it yet"
        )
        return f"{reason}: {self.obstacle}" if self.obstacle else reason

    def commit(self, record: PublishedWeights) -> None:
        """Publish a version that every worker has received; the model serves it from now on. An engine that has been
        lost or has loaded other weights since it received the version is behind. Raises OSError."""
        is_news = record != self.published
        self._write(record)
        if is_news:
            by = f" of {record.writer}" if record.writer else ""
            note(os.environ, "Normal", SERVES, f"serves version {record.version}{by}", "data-proxy")

    def end(self, pair: str, left: LeftWeights | None) -> None:
        """Note that the trainer has ended. If it leaves the published weights in a folder, they are still served;
        otherwise an engine that starts serves its own weights. Raises OSError."""
        record = self.published
        if record is None or record.pair != pair:
            return
        if left is not None and left.version == record.version and Path(left.path).is_dir():
            self._write(PublishedWeights(pair, record.version, left.path, None, record.base, record.writer))
        else:
            if self.file is not None:
                self.file.unlink(missing_ok=True)
            self.published, self._stamp = None, None

    def record(
        self, pair: str, version: int, path: str | None, gateway: str | None, writer: str | None = None
    ) -> PublishedWeights:
        return PublishedWeights(pair, version, path, gateway, self._base, writer)

    def about(self) -> dict[str, object]:
        """Return the weights that the model serves: their folder (if they are in one), version and trainer."""
        record = self.published
        if record is None:
            return {"path": self._base, "version": None, "writer": None}
        return {"path": record.path, "version": record.version, "writer": record.writer}

    def _write(self, record: PublishedWeights) -> None:
        if self.file is not None:
            replace_file(self.file, json.dumps(asdict(record)).encode())
        self.published = record
        self.reload()


# Controls. All of their routes need the admin key.

_BODY_BYTES = 64 * 1024
_RESUME_PERIOD_S = 1.0
_CONTROL_PATHS = (
    "/pause_generation",
    "/continue_generation",
    "/release_memory_occupation",
    "/resume_memory_occupation",
    "/set_version",
    "/configure_backend",
)


@dataclass(eq=False)
class EngineControl:
    """The engine's controls and their routes. ``engine_at`` returns a client of an engine of the same kind at a URL;
    ``in_flight`` counts the running model calls."""

    _config: DataProxyConfig
    _engine: TokenEngine
    _engine_at: Callable[[str], TokenEngine]
    watch: EngineWatch
    _pause: PauseState
    _in_flight: Callable[[], int]
    _tracker: WeightTracker

    def __post_init__(self) -> None:
        self.engine_url = self._config.engine_url
        self._lock = asyncio.Lock()
        self._resume_due = asyncio.Event()  # set while the engine is paused because a resume failed
        self._held_at: int | None = None  # the engine's losses when a resume was skipped because of invalid weights
        self.memory_released = False
        self.on_change: Callable[[], None] = lambda: None  # called when the memory is released or restored

    def add_to(self, service: Service) -> None:
        memory = self.release_memory, self.restore_memory
        handlers = (self.pause, self.resume, *memory, self.set_version, self.configure_backend)
        for path, handler in zip(_CONTROL_PATHS, handlers, strict=True):
            service.route("POST", path, handler, Access.ADMIN)
        service.route("GET", "/get_version", self.get_version, Access.ADMIN)

    @property
    def paused(self) -> bool:
        return self._pause.active

    def _set_memory_released(self, released: bool) -> None:
        changed, self.memory_released = self.memory_released != released, released
        if changed:
            self.on_change()

    @property
    def engine_is_available(self) -> bool:
        return self.watch.state.not_ready is None and not self.memory_released

    @property
    def not_ready(self) -> str | None:
        """Why the data proxy is not ready now; None if it is."""
        released = "the engine's memory is released" if self.memory_released else None
        return released or self.watch.state.not_ready or self._tracker.reason

    def check_serving(self) -> None:
        """Raise 503 while the engine's memory is released or the engine lacks the published weights."""
        if self.memory_released:
            message = "the engine's memory is released"
            raise ApiError(503, message, code="memory_released", headers={"Retry-After": "1"})
        if (behind := self._tracker.reason) is not None:
            raise ApiError(503, behind, code="weights_behind", headers={"Retry-After": "1"})

    async def pause(self, request: Request) -> Response:
        await request.read(_BODY_BYTES)
        async with self.exclusively():
            was_paused = self._wants_pause
            self._pause.set(True)  # first, so that no deadline expires while the engine pauses
            try:
                if not was_paused:
                    self._mark(True)
                await self._engine.pause()
            except BaseException:
                if not was_paused:
                    await self._undo_pause()
                raise
            self._mark(False)
            self._resume_due.clear()
            self._held_at = None
        return json_response({"status": "ok", "paused": True, "version": self.watch.state.version})

    async def _undo_pause(self) -> None:
        """Resume the engine, since it may have received a pause that failed or whose client disconnected."""

        async def resume() -> None:
            with contextlib.suppress(EngineError):
                await self._resume()
            self._pause.set(self._resume_due.is_set() or self._is_held)

        await uninterrupted(resume(), "undo-pause")

    def _mark(self, pausing: bool) -> None:
        """Create or remove the file that marks a pause by the data proxy itself, without a client's request."""
        with contextlib.suppress(OSError):  # without the file, only a successor is affected
            if (file := self._pausing) is not None:
                file.touch() if pausing else file.unlink(missing_ok=True)

    @property
    def _pausing(self) -> Path | None:
        kept = self._tracker.file
        return kept.with_name(f"{PAUSING}{urlsplit(self.engine_url).netloc}") if kept is not None else None

    @property
    def _is_held(self) -> bool:
        """Whether the engine is paused until it has loaded valid weights."""
        return self._held_at == self.watch.losses

    @property
    def _wants_pause(self) -> bool:
        """Whether a client has paused the engine, so that only a client may resume it."""
        return self._pause.active and not self._resume_due.is_set() and not self._is_held

    async def _resume(self) -> None:
        """Resume the engine; if that fails, ``run`` repeats it. An engine with invalid weights is not resumed here, but
        by the swap that loads valid ones. Raises EngineError."""
        if self._tracker.is_invalid:
            self._held_at = self.watch.losses
            self._resume_due.clear()
            self._mark(False)  # the engine's version shows the failed update
            return
        self._held_at = None
        try:
            await self._engine.resume()
        except (EngineUnsupported, EngineRefused):  # the same request would fail again
            self._resume_due.clear()
            raise
        except EngineError:
            self._resume_due.set()
            raise
        self._resume_due.clear()
        self._mark(False)
        self._pause.set(False)

    async def run(self) -> None:
        """Repeat a resume that failed."""
        while True:
            await self._resume_due.wait()
            await asyncio.sleep(_RESUME_PERIOD_S)
            with contextlib.suppress(EngineError):
                async with self.locked():
                    if self._resume_due.is_set():  # no control has resumed or paused the engine meanwhile
                        await self._resume()

    async def resume(self, request: Request) -> Response:
        await request.read(_BODY_BYTES)
        async with self.exclusively():
            await self._resume()
            paused = self._is_held
        return json_response({"status": "ok", "paused": paused, "version": self.watch.state.version})

    async def set_version(self, request: Request) -> Response:
        """Set the weight version, which only grows unless ``force`` sets it back."""
        wanted = await read_body(request, SetVersion, _BODY_BYTES)
        if wanted.force:
            refuse_idempotency_key(request, "a late repetition with force would set the version back again")
        async with self.exclusively():
            if conflict := wanted.conflict(await self._engine.version(), "the engine"):
                raise ApiError(409, conflict, code="version_not_growing", param="version")
            await self._engine.set_version(wanted.version)
        return json_response({"status": "ok", "version": wanted.version})

    async def get_version(self, request: Request) -> Response:
        with engine_errors_as_api_errors():
            return json_response({"version": await self._engine.version()})

    async def release_memory(self, request: Request) -> Response:
        await request.read(_BODY_BYTES)
        async with self.exclusively():
            if not self.memory_released:
                self._set_memory_released(True)  # no call may start meanwhile
                try:
                    if running := self._in_flight():
                        message = f"{running} calls are running and need their cache: release memory after their end"
                        raise ApiError(409, message, code="requests_in_flight")
                    await self._engine.release_memory()
                except BaseException:
                    self._set_memory_released(False)
                    raise
        return json_response({"status": "ok", "memory_released": True})

    async def restore_memory(self, request: Request) -> Response:
        await request.read(_BODY_BYTES)
        async with self.exclusively():
            await self._engine.restore_memory()
            self._set_memory_released(False)
        return json_response({"status": "ok", "memory_released": False})

    async def configure_backend(self, request: Request) -> Response:
        """Replace the engine by another process, which must be ready and has none of the weight updates. Running calls
        finish on the engine where they started. Raises 400, 502."""
        given = (await read_object(request, _BODY_BYTES)).get("backend_addr")
        if not isinstance(given, str):
            raise bad_field("backend_addr", "must be the engine's address, host:port")
        try:
            url = worker_base_url(given)
        except ValueError as error:
            raise bad_request(str(error), param="backend_addr") from error
        reason = (await self._engine_at(url).state()).not_ready
        if reason is not None:
            message = f"no {self._config.engine} engine is ready at {url}: {reason}"
            raise ApiError(502, message, code="engine_unavailable", param="backend_addr")
        async with self.exclusively():
            self._engine.point_to(url)
            self.engine_url = url
            self.watch.losses += 1
        return json_response({"status": "ok", "backend_addr": url})

    async def swap_weights(self, swap: Callable[[], Awaitable[None]]) -> float:
        """Run ``swap`` while nothing is generated. Return the milliseconds that it took.

        Generation resumes afterwards unless it was paused before, even if the engine refused the new weights. After any
        other failure the engine's weights are unknown, and it resumes once it has loaded others. The swap completes
        even if the client disconnects: half a swap would leave weights under a wrong version. Raises EngineError.
        """
        pausing = not self._engine.capabilities.swaps_between_steps
        return await uninterrupted(self._swap_locked(swap, pausing=pausing), "swap-weights")

    async def _swap_locked(self, swap: Callable[[], Awaitable[None]], *, pausing: bool) -> float:
        async with self._lock:
            was_paused, began = self._wants_pause, time.monotonic()
            self._pause.set(True)
            try:
                if pausing:
                    if not was_paused:
                        self._mark(True)
                    await self._engine.pause()
                await self._swap(swap)
            finally:
                if (pausing or self._is_held) and not was_paused:
                    await self._resume()
                self._pause.set(was_paused or self._is_held)
            # The trainer does not wait for the poll, which may generate a token.
            self._poll = asyncio.create_task(self.watch.refresh(), name="poll-after-swap")
            return (time.monotonic() - began) * 1e3

    async def _swap(self, swap: Callable[[], Awaitable[None]]) -> None:
        try:
            await swap()
        except (EngineRefused, EngineUnsupported):  # the old weights are unchanged
            raise
        except BaseException:
            self._tracker.invalidate()
            raise

    async def take_over(self) -> None:
        """Continue after a data proxy that was killed. If the engine is in the middle of an update, which it reports as
        an unknown version, its weights are invalid. If only the data proxy had paused it, resume it. Raises
        EngineError."""
        async with self.locked():
            if await self._engine.version() == UNKNOWN_VERSION and not self._tracker.is_invalid:
                self._tracker.invalidate()
                if self._pause.active:
                    self._held_at = self.watch.losses
            elif self._pausing is not None and self._pausing.exists() and not self._resume_due.is_set():
                await self._resume()
            self._mark(False)

    @contextlib.asynccontextmanager
    async def exclusively(self) -> AsyncIterator[None]:
        """Run one control at a time, and poll the engine afterwards so that the effect is visible at once. Raises
        ApiError."""
        with engine_errors_as_api_errors():
            async with self.locked():
                yield

    @contextlib.asynccontextmanager
    async def locked(self) -> AsyncIterator[None]:
        """Run a block as ``exclusively`` does, but raise EngineError."""
        async with self._lock:
            yield
            await self.watch.refresh()


_NOT_OURS = "an external model is not ours to pause, to resize or to version"


def refuse_controls(service: Service) -> None:
    """Add the control routes for an external model: each responds 400."""

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
