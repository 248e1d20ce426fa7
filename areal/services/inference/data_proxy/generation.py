"""Drives the engine for one request: calls out, updates back in the order in which tokens come, from within the loop's
callback that read them.

A choice that met a stop string is done at once; when all choices of a call are, the engine's work on it is aborted,
as it is when the caller goes away. No generation outlives its request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from areal.services.inference.data_proxy.choice import Choice, Update
from areal.services.inference.data_proxy.credence import check_delta
from areal.services.inference.data_proxy.suspension import Suspension
from areal.services.inference.engines.base import (
    EngineCall,
    EngineDelta,
    EngineFailed,
    OnFlow,
    PromptLogprobs,
    PromptScorer,
    TokenEngine,
)

OnUpdate = Callable[[Update], None]
_SCORED_AT_ONCE = 8


class Pulse:
    """When the engine last gave any token to anyone, or said that it sampled more: a call that waits in its queue, or
    for an answer that comes whole, is not stuck."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._last = self._loop.time()

    def beat(self) -> None:
        self._last = self._loop.time()

    def silent_s(self) -> float:
        return self._loop.time() - self._last


@dataclass(frozen=True)
class Drive:
    """One engine call and the choices it feeds, in the engine's order."""

    call: EngineCall
    choices: Sequence[Choice]


class Generator:
    def __init__(self, engine: TokenEngine, suspension: Suspension) -> None:
        self._engine = engine
        self.suspension = suspension
        self._aborts: set[asyncio.Task[None]] = set()
        self.pulse = Pulse()

    async def run(self, drives: Sequence[Drive], on_update: OnUpdate, flowing: OnFlow = lambda flow: None) -> None:
        """Give ``on_update`` the updates of all choices, until each has ended. Raises EngineError, and what
        ``on_update`` raises. ``flowing`` is given what holds the engine back, for each of ``drives``."""
        if len(drives) == 1:
            await self._follow(drives[0], on_update, flowing)
            return
        work = [self._follow(drive, on_update, flowing) for drive in drives]
        names = [f"generate-{drive.call.request_id}" for drive in drives]
        tasks = [asyncio.create_task(each, name=name) for each, name in zip(work, names, strict=True)]
        try:
            await asyncio.gather(*tasks)  # the first failure ends them all
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def scores(self, prompts: Sequence[Sequence[int]], top: int, adapter: str | None) -> list[PromptLogprobs]:
        """Of each prompt. Raises EngineError."""
        engine = self._engine
        assert isinstance(engine, PromptScorer), "its capabilities say so"
        slots = asyncio.Semaphore(_SCORED_AT_ONCE)

        async def score(prompt: Sequence[int]) -> PromptLogprobs:
            async with slots:
                return await engine.score(prompt, top, adapter)

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(score(prompt), name="score") for prompt in prompts]
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None
        return [task.result() for task in tasks]

    async def _follow(self, drive: Drive, on_update: OnUpdate, flowing: OnFlow) -> None:
        heard = _Heard(drive, on_update, self.pulse)
        try:
            await self._engine.pour(drive.call, heard.delta, flowing)
            if heard.running:
                raise EngineFailed("the engine's stream ended before its choices did")
        except _AllEnded:
            pass
        finally:
            if heard.ended_by_engine < len(drive.choices):
                self._abort(drive.call.request_id)

    def _abort(self, request_id: str) -> None:
        task = asyncio.create_task(self._engine.abort(request_id), name=f"abort-{request_id}")
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)


class _AllEnded(Exception):
    """Stop strings have ended every choice: what else the engine says is not wanted."""


class _Heard:
    """One engine call as its deltas come."""

    def __init__(self, drive: Drive, on_update: OnUpdate, pulse: Pulse) -> None:
        self._choices = drive.choices
        self._on_update = on_update
        self._pulse = pulse
        self.running = set(range(len(drive.choices)))
        self.ended_by_engine = 0

    def delta(self, delta: EngineDelta) -> None:
        check_delta(delta, len(self._choices))
        self._pulse.beat()
        self.ended_by_engine += delta.finish_reason is not None
        if delta.index not in self.running:
            return
        update = self._choices[delta.index].push(delta)
        if update.finish_reason is not None:
            self.running.discard(delta.index)
        self._on_update(update)
        if not self.running and self.ended_by_engine < len(self._choices):
            raise _AllEnded
