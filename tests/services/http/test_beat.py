"""What a process does now and then it does at one time."""

from __future__ import annotations

import asyncio

import pytest

from areal.services.http import tasks


@pytest.mark.parametrize("period_s", [0.5, 1.0, 2.0, 20.0])
async def test_timers_of_whole_periods_ring_together(period_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
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


async def test_no_period_is_no_wait() -> None:
    assert tasks.until_beat(0.0) == 0.0
