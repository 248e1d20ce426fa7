"""Background tasks, timers of one process that ring together, and the deadline on progress."""

from __future__ import annotations

import asyncio
import gc
import logging
import weakref

import pytest

from areal.services.http import tasks
from areal.services.http.tasks import Watchdog, background, happens


async def test_failed_background_task_is_logged_and_restarted(caplog: pytest.LogCaptureFixture) -> None:
    runs = []
    twice = asyncio.Event()

    async def run() -> None:
        runs.append(True)
        if len(runs) == 1:
            raise RuntimeError("first time")
        twice.set()
        await asyncio.Event().wait()

    with caplog.at_level(logging.ERROR):
        async with background("flaky", run, again_after_s=0.0):
            await asyncio.wait_for(twice.wait(), 10)
    assert "flaky" in caplog.text and "first time" in caplog.text


async def test_background_task_ends_with_its_body() -> None:
    ended = asyncio.Event()
    begun = asyncio.Event()

    async def run() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async with background("steady", run):
        await asyncio.wait_for(begun.wait(), 10)
    assert ended.is_set()


@pytest.mark.parametrize("period_s", [0.5, 1.0, 2.0, 20.0])
async def test_timers_of_whole_periods_fire_together(period_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    loop, now = asyncio.get_running_loop(), 1000.3
    monkeypatch.setattr(tasks, "_PHASE_S", 0.25)
    monkeypatch.setattr(loop, "time", lambda: now)
    beats = []
    for _ in range(10):
        left_s = tasks.until_beat(period_s)
        assert period_s / 4 < left_s <= period_s * 1.25
        now += left_s - 0.001  # a timer rings a little early
        beats.append(now + 0.001)
        now += 0.01  # what is done then
    assert [round((beat - 0.25) / period_s, 6) % 1 for beat in beats] == [0.0] * 10
    assert len(set(beats)) == 10


async def test_zero_period_does_not_wait() -> None:
    assert tasks.until_beat(0.0) == 0.0


async def test_watchdog_without_a_kick_raises_timeout() -> None:
    with pytest.raises(TimeoutError):
        async with Watchdog(lambda: 0.01):
            await asyncio.Event().wait()


async def test_suspended_watchdog_checks_again_then_raises() -> None:
    asked = []

    def suspended() -> bool:
        asked.append(True)
        return len(asked) < 3

    with pytest.raises(TimeoutError):
        async with Watchdog(lambda: 0.01, suspended=suspended):
            await asyncio.Event().wait()
    assert len(asked) == 3


async def test_kicked_watchdog_lets_body_end() -> None:
    loop = asyncio.get_running_loop()
    async with Watchdog(lambda: 5.0) as watchdog:
        for _ in range(100):
            watchdog.kick()
            await asyncio.sleep(0)
    assert loop.time() > 0


async def test_watchdog_follows_growing_limit() -> None:
    limit = [0.01]

    async def body() -> None:
        async with Watchdog(lambda: limit[0]):
            limit[0] = 60.0
            await asyncio.sleep(0.05)

    await body()


async def test_watchdog_propagates_outside_cancellation() -> None:
    async def body() -> None:
        async with Watchdog(lambda: 60.0):
            await asyncio.Event().wait()

    task = asyncio.create_task(body(), name="body")
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_expiring_watchdog_propagates_concurrent_cancellation() -> None:
    expired = asyncio.Event()

    def suspended() -> bool:
        expired.set()
        return False

    async def body() -> None:
        async with Watchdog(lambda: 0.0, suspended=suspended):
            await asyncio.Event().wait()

    task = asyncio.create_task(body(), name="body")
    await expired.wait()
    task.cancel()  # before the task has run again
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_expired_watchdog_leaves_task_uncancelled() -> None:
    with pytest.raises(TimeoutError):
        async with Watchdog(lambda: 0.0):
            await asyncio.Event().wait()
    task = asyncio.current_task()
    assert task is not None and task.cancelling() == 0
    await asyncio.sleep(0)


async def test_late_found_progress_moves_deadline_from_its_time() -> None:
    loop = asyncio.get_running_loop()
    progress_at = loop.time() + 0.06

    def suspended() -> bool:
        ago_s = loop.time() - progress_at
        if ago_s < 0.1:
            watchdog.kick(ago_s)
        return ago_s < 0.1

    with pytest.raises(TimeoutError):
        async with Watchdog(lambda: 0.1, suspended=suspended) as watchdog:
            await asyncio.Event().wait()
    assert progress_at + 0.09 < loop.time() < progress_at + 5


async def test_watchdog_cycle_is_freed_with_body() -> None:
    async def guarded() -> weakref.ref[Watchdog]:
        def suspended() -> bool:
            watchdog.kick()
            return True

        async with Watchdog(lambda: 60.0, suspended=suspended) as watchdog:
            return weakref.ref(watchdog)

    gc.disable()
    try:
        assert (await guarded())() is None
    finally:
        gc.enable()


async def test_happens_reports_event_only_in_time() -> None:
    event = asyncio.Event()
    assert not await happens(event, 0.01)
    asyncio.get_running_loop().call_later(0.01, event.set)
    assert await happens(event, 60.0)
