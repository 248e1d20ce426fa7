from __future__ import annotations

import asyncio

from areal.services.inference.data_proxy.engine_watch import EngineWatch
from areal.services.inference.data_proxy.suspension import Suspension
from areal.services.inference.engines.base import EngineState

IDLE_S = 60.0
LOST = EngineState("no answer")


async def test_nothing_is_excused_before_the_first_pause() -> None:
    assert not Suspension().excuses(IDLE_S)


async def test_silence_is_excused_while_paused_and_for_one_deadline_after() -> None:
    suspension = Suspension()
    suspension.set(True)
    assert suspension.excuses(0.0)
    suspension.set(False)
    assert suspension.excuses(IDLE_S) and not suspension.excuses(0.0)


async def test_observation_that_began_before_a_command_is_stale() -> None:
    suspension = Suspension()
    asked_at = suspension.commands
    suspension.set(True)
    suspension.observe(False, asked_at=asked_at)
    assert suspension.active
    suspension.observe(None, asked_at=suspension.commands)  # an engine that does not tell
    assert suspension.active
    suspension.observe(False, asked_at=suspension.commands)
    assert not suspension.active


async def test_engine_that_is_gone_holds_nothing_still() -> None:
    answers = iter([EngineState(None, paused=True), LOST, LOST])

    async def ask() -> EngineState:
        return next(answers)

    suspension = Suspension()
    watch = EngineWatch(ask, suspension=suspension)
    await watch.refresh()
    assert suspension.active
    await watch.refresh()  # one lost answer is noise
    assert watch.state.not_ready is None and suspension.active
    await watch.refresh()
    assert not suspension.active


async def test_pause_that_comes_while_the_engine_is_asked_stands() -> None:
    asked, answer = asyncio.Event(), asyncio.Event()

    async def ask() -> EngineState:
        asked.set()
        await answer.wait()
        return EngineState(None, paused=False)

    suspension = Suspension()
    refreshing = asyncio.create_task(EngineWatch(ask, suspension=suspension).refresh(), name="refresh")
    await asyncio.wait_for(asked.wait(), 20)
    suspension.set(True)
    answer.set()
    await asyncio.wait_for(refreshing, 20)
    assert suspension.active
