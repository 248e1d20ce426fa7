"""Runs a prepared call and answers it, whole or as a stream: under the deadline on progress, recorded before the last
byte, engine failures as what the caller is told.

A stream's events are written from within the loop's callback that read the engine's, without a task switch; a caller
that lags behind holds the engine's connection back.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence

from areal.services.inference.data_proxy.choice import Update
from areal.services.inference.data_proxy.fields import unsupported
from areal.services.inference.data_proxy.generation import Generator, OnUpdate
from areal.services.inference.data_proxy.prepared import Prepared
from areal.services.inference.engines.base import (
    EngineError,
    EngineRefused,
    EngineUnavailable,
    EngineUnsupported,
    Flow,
    OnFlow,
    PromptLogprobs,
)
from areal.services.web.errors import ApiError
from areal.services.web.server import Response, StreamResponse
from areal.services.web.watchdog import Watchdog

Record = Callable[[Prepared], Awaitable[None]]
"""Called once an answer is complete; what it raises is what the caller is told."""


class Answering:
    def __init__(self, generator: Generator, record: Record) -> None:
        self._generator = generator
        self._record = record

    async def whole(self, prepared: Prepared) -> Response:
        async with self._watched(prepared) as watchdog:
            await self._run(prepared, watchdog, lambda update: None)
        body = prepared.shape.whole()
        return Response(body=body, content_type="application/json", headers=prepared.headers())

    async def scores(self, prompts: Sequence[Sequence[int]], top: int, adapter: str | None) -> list[PromptLogprobs]:
        """Of each prompt. Raises ApiError."""
        try:
            with _engine_errors():
                return await self._generator.scores(prompts, top, adapter)
        except EngineUnsupported as error:
            raise unsupported("echo", f"together with logprobs it needs those of the prompt, and {error}") from error

    async def stream(self, prepared: Prepared) -> StreamResponse:
        said = Said(prepared)
        try:
            async with self._watched(prepared) as watchdog:
                await self._run(prepared, watchdog, said.update, said.flowing)
        finally:
            said.let_go()
        assert said.out is not None, "a generation that ends well has an update for each choice"
        await said.out.write(said.last + prepared.shape.closing())
        return said.out

    async def _run(
        self, prepared: Prepared, watchdog: Watchdog, on_update: OnUpdate, flowing: OnFlow = lambda flow: None
    ) -> None:
        clock, since, now = prepared.clock, time.perf_counter(), time.perf_counter

        def note(update: Update) -> None:
            nonlocal since
            clock.heard(since, update.after_first_s)
            watchdog.kick()
            on_update(update)
            since = now()

        await self._generator.run(prepared.drives, note, flowing)
        watchdog.kick()
        await self._record(prepared)

    @contextlib.asynccontextmanager
    async def _watched(self, prepared: Prepared) -> AsyncIterator[Watchdog]:
        """What goes wrong in the engine, or does not go on, is what the caller is told."""

        def excused() -> bool:
            """The engine is paused, or the call is queued in a busy one."""
            if self._generator.suspension.excuses(prepared.idle_s):
                return True
            return not prepared.clock.first and self._generator.pulse.silent_s() < prepared.idle_s

        try:
            with _engine_errors():
                async with Watchdog(lambda: prepared.idle_s, excused=excused) as watchdog:
                    yield watchdog
        except TimeoutError as error:
            raise ApiError(504, f"no progress in {prepared.idle_s:g} s", code="progress_timeout") from error


@contextlib.contextmanager
def _engine_errors() -> Iterator[None]:
    try:
        yield
    except EngineUnavailable as error:
        raise ApiError(503, str(error), code="engine_unavailable", headers={"Retry-After": "1"}) from error
    except EngineRefused as error:
        raise ApiError(400, str(error), code=error.code or "engine_refused") from error
    except EngineUnsupported:
        raise
    except EngineError as error:
        raise ApiError(502, str(error), code="engine_failed") from error


class Said:
    """A stream as its updates come. ``last`` is what the answer ends with, which waits for the record."""

    def __init__(self, prepared: Prepared) -> None:
        self._prepared = prepared
        self._running = len(prepared.frame.choices)
        self._flows: list[Flow] = []
        self._paused = False  # the caller lags behind
        self.out: StreamResponse | None = None
        self.last = b""

    def update(self, update: Update) -> None:
        opening = b"" if self.out is not None else self._prepared.shape.opening()  # first: events are numbered
        data = self._prepared.shape.update(update)
        if update.finish_reason is not None:
            self._running -= 1
            if not self._running:
                self.last, data = data, b""
        if self.out is None:
            self.out = self._prepared.open_stream(opening + data)
            self.out.hold_back(self)
        elif data:
            self.out.feed(data)

    def flowing(self, flow: Flow) -> None:
        self._flows.append(flow)
        if self._paused:
            flow.pause()

    def pause(self) -> None:
        self._paused = True
        for flow in self._flows:
            flow.pause()

    def resume(self) -> None:
        self._paused = False
        for flow in self._flows:
            flow.resume()

    def let_go(self) -> None:
        """The engine's connections are others' now."""
        self._flows.clear()
        if self.out is not None:
            self.out.hold_back(None)
