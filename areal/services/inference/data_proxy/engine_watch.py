"""Asks the engine how it is, often while it starts, then once a second: a data proxy is ready when its engine is."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

from areal.services.inference.data_proxy.suspension import Suspension
from areal.services.inference.engines.base import EngineState
from areal.services.web.stage import report_stage
from areal.services.web.tasks import until_beat

_STARTING_PERIOD_S = 0.1
_PERIOD_S = 1.0
_LOST_AFTER = 2


class EngineWatch:
    """``state`` is the newest answer; a single lost one after good ones is noise. ``suspension`` hears of pauses.
    ``on_progress`` is called where the engine says that it sampled more since it was asked last. ``losses``: how often
    the engine was gone, or made way for another: what it had taken since its start is lost."""

    def __init__(
        self,
        ask: Callable[[], Awaitable[EngineState]],
        *,
        period_s: float = _PERIOD_S,
        suspension: Suspension | None = None,
        on_progress: Callable[[], None] = lambda: None,
    ) -> None:
        self._ask = ask
        self._on_progress = on_progress
        self.on_change: Callable[[], None] = lambda: None
        self._period_s = period_s
        self._suspension = suspension
        self._failures = 0
        self.losses = 0
        self.state = EngineState(not_ready="the engine was not asked yet")

    async def run(self) -> None:
        report_stage("waiting for the engine")
        while True:
            await self.refresh()
            ready = self.state.not_ready is None
            await asyncio.sleep(until_beat(self._period_s) if ready and not self._failures else _STARTING_PERIOD_S)

    async def refresh(self) -> None:
        """Ask now."""
        suspension = self._suspension
        asked_at = suspension.commands if suspension else 0
        answer = await self._ask()
        self._take(answer)
        if suspension:  # an engine that is gone holds nothing still
            lost = self.state.not_ready is not None
            suspension.observe(False if lost else answer.paused, asked_at=asked_at)

    async def confirm(self) -> None:
        """Ask until it is certain whether the engine is there."""
        await self.refresh()
        while self._failures and self.state.not_ready is None:
            await self.refresh()

    def _take(self, answer: EngineState) -> None:
        before = self.state
        self._keep(answer)
        if replace(self.state, generated=before.generated) != before:
            self.on_change()

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
