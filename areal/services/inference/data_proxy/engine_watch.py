"""Observes an engine: whether it is up, and whether it is paused."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable

from areal.dataclasses import replace
from areal.services.http.tasks import happens, until_beat
from areal.services.inference.engines.base import EngineState
from areal.wire.stage import report_stage


class PauseState:
    """Whether the engine is paused, from the data proxy's controls and the engine's reports. Paused time does not count
    against a call's deadline: after a pause each call has its full timeout again."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._ended = -math.inf
        self.active = False
        self.on_change: Callable[[], None] = lambda: None
        self.commands = 0  # how often ``set`` was called: an observation that began before the last one is stale

    def set(self, active: bool) -> None:
        """Set the state after a control of the data proxy."""
        self.commands += 1
        self._change(active)

    def observe(self, paused: bool | None, *, asked_at: int) -> None:
        """Set the state by the engine's report, which was requested when ``commands`` was ``asked_at``. None: the
        engine does not report it."""
        if paused is not None and asked_at == self.commands:
            self._change(paused)

    def _change(self, active: bool) -> None:
        if self.active and not active:
            self._ended = self._loop.time()
        changed, self.active = self.active != active, active
        if changed:
            self.on_change()

    def covers(self, idle_s: float) -> bool:
        """Return whether a pause may explain ``idle_s`` seconds of silence."""
        return self.active or self._loop.time() - self._ended < idle_s


_STARTING_PERIOD_S = 0.1
_DOWN_SHARE = 0.05  # poll interval as a share of the engine's downtime, up to the usual period
_PERIOD_S = 1.0
_LOST_AFTER = 2  # failed polls


class EngineWatch:
    """Polls the engine's health: more often while the engine has just gone down, a quarter as often while it is not
    ``busy``, and soon after ``suspect``. ``state`` is the latest result; a single failed poll after good ones is
    ignored. ``on_progress`` is called when the engine reports another number of sampled tokens. ``losses`` counts how
    often the engine was lost or replaced, each of which discards the weight updates it had received."""

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
                period_s = self._period_s if self._busy() else 4 * self._period_s
                if await happens(self._suspected, until_beat(period_s)):
                    await asyncio.sleep(_STARTING_PERIOD_S)  # even if the engine closes every connection
            else:
                pause_s = min(self._period_s, (now() - well_at) * _DOWN_SHARE)
                await asyncio.sleep(max(_STARTING_PERIOD_S, pause_s))

    def suspect(self) -> None:
        """Poll soon, because the engine closed a connection."""
        self._suspected.set()

    async def refresh(self) -> None:
        """Poll now."""
        pause = self._pause
        asked_at = pause.commands if pause else 0
        answer, before = await self._ask(), self.state
        self._keep(answer)
        if replace(self.state, generated=before.generated) != before:
            self.on_change()
        if pause:  # a lost engine counts as not paused
            lost = self.state.not_ready is not None
            pause.observe(False if lost else answer.paused, asked_at=asked_at)

    async def confirm(self) -> None:
        """Poll until it is certain whether the engine is up."""
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
