"""Drives the engine for one request: calls out, updates back in the order in which tokens come.

A choice that met a stop string is done at once; when all choices of a call are, the engine's work on it is aborted,
as it is when the caller goes away. No generation outlives its request.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

from areal.services.inference.data_proxy.choice import Choice, Update
from areal.services.inference.data_proxy.credence import next_delta
from areal.services.inference.data_proxy.suspension import Suspension
from areal.services.inference.engines.base import EngineCall, EngineFailed, TokenEngine


class Pulse:
    """When the engine last gave any token to anyone: a call that waits in a busy engine's queue is not stuck."""

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

    def updates(self, drives: Sequence[Drive]) -> AsyncGenerator[Update, None]:
        """Updates of all choices until each has ended. Raises EngineError; close it to cancel."""
        return self._follow(drives[0]) if len(drives) == 1 else self._merged(drives)

    async def _follow(self, drive: Drive) -> AsyncGenerator[Update, None]:
        running = set(range(len(drive.choices)))
        finished_by_engine = 0
        try:
            async with contextlib.aclosing(self._engine.generate(drive.call)) as deltas:
                while (delta := await next_delta(deltas, len(drive.choices))) is not None:
                    self.pulse.beat()
                    finished_by_engine += delta.finish_reason is not None
                    if delta.index not in running:
                        continue
                    update = drive.choices[delta.index].push(delta)
                    if update.finish_reason is not None:
                        running.discard(delta.index)
                    yield update
                    if not running:
                        return
            raise EngineFailed("the engine's stream ended before its choices did")
        finally:
            if finished_by_engine < len(drive.choices):
                self._abort(drive.call.request_id)

    def _abort(self, request_id: str) -> None:
        task = asyncio.create_task(self._engine.abort(request_id), name=f"abort-{request_id}")
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)

    async def _merged(self, drives: Sequence[Drive]) -> AsyncGenerator[Update, None]:
        """Several prompts at once. The first failure ends them all."""
        queue: asyncio.Queue[Update | None] = asyncio.Queue()

        async def pump(drive: Drive) -> None:
            try:
                async with contextlib.aclosing(self._follow(drive)) as stream:
                    async for update in stream:
                        queue.put_nowait(update)
            finally:
                queue.put_nowait(None)

        tasks = [asyncio.create_task(pump(drive), name=f"generate-{drive.call.request_id}") for drive in drives]
        try:
            left = len(tasks)
            while left:
                update = await queue.get()
                if update is not None:
                    yield update
                    continue
                left -= 1
                for task in tasks:
                    if task.done():
                        task.result()
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
