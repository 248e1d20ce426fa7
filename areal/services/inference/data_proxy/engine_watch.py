"""Asks the engine how it is, often while it starts, then once a second: a data proxy is ready when its engine is."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from areal.services.inference.engines.base import EngineState
from areal.services.web.stage import report_stage

_STARTING_PERIOD_S = 0.1
_PERIOD_S = 1.0
_LOST_AFTER = 2


class EngineWatch:
    """``state`` is the newest answer; a single lost one after good ones is noise."""

    def __init__(self, ask: Callable[[], Awaitable[EngineState]], *, period_s: float = _PERIOD_S) -> None:
        self._ask = ask
        self._period_s = period_s
        self._failures = 0
        self.state = EngineState(not_ready="the engine was not asked yet")

    async def run(self) -> None:
        report_stage("waiting for the engine")
        while True:
            self._take(await self._ask())
            ready = self.state.not_ready is None
            await asyncio.sleep(self._period_s if ready and not self._failures else _STARTING_PERIOD_S)

    def _take(self, answer: EngineState) -> None:
        was_ready = self.state.not_ready is None
        if answer.not_ready is None:
            self._failures = 0
            self.state = answer
            if not was_ready:
                report_stage("serving")
            return
        self._failures += 1
        if not was_ready or self._failures >= _LOST_AFTER:
            self.state = answer
