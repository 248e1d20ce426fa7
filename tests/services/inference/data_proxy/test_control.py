from __future__ import annotations

import asyncio
import contextlib
from errno import ENOSPC
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest

from areal.services.http.messages import Request
from areal.services.http.tasks import background
from areal.services.inference.data_proxy import control, engine_watch
from areal.services.inference.data_proxy.control import EngineControl, PublishedWeights, WeightTracker
from areal.services.inference.data_proxy.engine_watch import EngineWatch, PauseState
from areal.services.inference.engines.base import EngineState
from areal.services.inference.recorder.storage import PUBLISHED
from areal.wire.bodies import LeftWeights

READY = EngineState(None, version=3)
LOST = EngineState("no answer")


async def states_after(*answers: EngineState) -> list[EngineState]:
    """The watch's state after each of ``answers``, in order."""
    seen: list[EngineState] = []
    left = list(answers)
    done = asyncio.Event()

    async def ask() -> EngineState:
        seen.append(watch.state)
        if not left:
            done.set()
            await asyncio.Event().wait()
        return left.pop(0)

    watch = EngineWatch(ask, period_s=0.0)
    task = asyncio.create_task(watch.run(), name="watch")
    await asyncio.wait_for(done.wait(), 20)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    return seen[1:]


async def test_engine_is_not_ready_until_it_reports_ready() -> None:
    first, second = await states_after(LOST, READY)
    assert (first, second) == (LOST, READY)


async def test_engine_is_lost_after_two_failed_polls() -> None:
    states = await states_after(READY, LOST, READY, LOST, LOST, READY)
    assert [state.not_ready is None for state in states] == [True, True, True, True, False, True]


@pytest.mark.parametrize(("busy", "period_s"), [(True, 3.0), (False, 12.0)])
async def test_idle_engine_is_polled_less_often(busy: bool, period_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []
    slept = asyncio.Event()

    def until_beat(seconds: float) -> float:
        asked.append(seconds)
        slept.set()
        return seconds

    monkeypatch.setattr(engine_watch, "until_beat", until_beat)
    watch = EngineWatch(Engine().state, period_s=3.0, busy=lambda: busy)
    async with background("watch", watch.run):
        await asyncio.wait_for(slept.wait(), 20)
    assert asked == [period_s]


async def test_polls_of_lost_engine_back_off(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, slept, enough = asyncio.get_running_loop(), list[float](), asyncio.Event()
    began, clock = loop.time(), [0.0]

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        clock[0] += seconds
        if clock[0] > 3600:
            enough.set()
            await asyncio.Event().wait()

    async def ask() -> EngineState:
        return LOST

    monkeypatch.setattr(loop, "time", lambda: began + clock[0])
    monkeypatch.setattr(asyncio, "sleep", sleep)
    watch = EngineWatch(ask, period_s=5.0)
    task = asyncio.create_task(watch.run(), name="watch")
    await enough.wait()
    task.cancel()
    assert slept[0] == 0.1 and slept == sorted(slept) and slept[-1] == 5.0
    assert len(slept) < 1000  # an hour of polls that a server refuses


async def test_closed_connection_triggers_prompt_poll() -> None:
    engine, lost = Engine(), asyncio.Event()
    watch = EngineWatch(engine.state, period_s=3600.0)
    watch.on_change = lost.set
    async with background("watch", watch.run):
        await asyncio.wait_for(lost.wait(), 20)
        assert watch.state == EngineState(None, version=0)
        engine.version = None
        lost.clear()
        watch.suspect()
        await asyncio.wait_for(lost.wait(), 20)
        assert watch.state.not_ready == "gone"


async def test_progress_is_polled_while_engine_samples() -> None:
    answers = [EngineState(None, generated=count) for count in (5, 5, 9)]
    beats: list[int] = []

    async def ask() -> EngineState:
        return answers.pop(0)

    watch = EngineWatch(ask, on_progress=lambda: beats.append(len(answers)))
    for _ in range(3):
        await watch.refresh()
    assert beats == [2, 0]


# When an engine is behind the published weights.


class Engine:
    """What the watch asks; ``version`` None: it is gone."""

    def __init__(self) -> None:
        self.version: int | None = 0

    async def state(self) -> EngineState:
        return EngineState("gone" if self.version is None else None, self.version)


async def seen(watch: EngineWatch, times: int = 2) -> None:
    for _ in range(times):
        await watch.refresh()


async def test_tracker_is_behind_once_updated_engine_is_lost(tmp_path: Path) -> None:
    engine = Engine()
    watch = EngineWatch(engine.state)
    await seen(watch)
    tracker = WeightTracker(watch, tmp_path, "base")
    assert tracker.reason is None, "nothing is published"
    tracker.loaded("actor", 0)
    assert tracker.reason is None
    tracker.commit(tracker.record("actor", 0, None, None))
    assert tracker.reason is None
    tracker.loaded("actor", 1)
    assert tracker.reason is None, "version 0 counts until 1 is committed"
    engine.version = None
    await seen(watch)
    engine.version = 0
    await seen(watch)
    assert tracker.behind == PublishedWeights("actor", 0, base="base"), "a fresh engine is at 0 too"
    again = WeightTracker(watch, tmp_path, "base")
    assert again.behind == tracker.behind
    assert WeightTracker(watch, tmp_path, "another").behind is None


async def test_tracker_forgets_previously_loaded_weights(tmp_path: Path) -> None:
    engine = Engine()
    watch = EngineWatch(engine.state)
    await seen(watch)
    tracker = WeightTracker(watch, tmp_path, None)
    for version in (1, 2, 1):  # a trainer that went on from version 1
        tracker.loaded("actor", version)
        tracker.commit(tracker.record("actor", version, "/weights", None))
    tracker.loaded("actor", 3)
    assert tracker.behind is None, "version 1 counts until 3 is committed"


async def test_engine_lost_before_commit_is_behind_after_it(tmp_path: Path) -> None:
    engine = Engine()
    watch = EngineWatch(engine.state)
    await seen(watch)
    tracker = WeightTracker(watch, tmp_path, None)
    old, new = (tracker.record("actor", version, "/weights", None) for version in (4, 5))
    tracker.loaded("actor", 4)
    tracker.commit(old)
    tracker.loaded("actor", 5)
    for version in (None, 0):  # it is killed between the swap and the commit, and starts again
        engine.version = version
        await seen(watch)
    tracker.commit(new)
    assert tracker.behind == new
    tracker.commit(old)
    assert tracker.behind == old, (
        "it comes back, and an update takes it along while the old version is about to be loaded"
    )
    tracker.loaded("actor", 5)
    tracker.reloaded("actor", 4)
    assert tracker.behind is None
    tracker.commit(new)
    assert tracker.behind == new


async def test_tracker_of_missed_update_is_behind_until_reload(tmp_path: Path) -> None:
    engine = Engine()
    watch = EngineWatch(engine.state)
    await seen(watch)
    here, there = WeightTracker(watch, tmp_path, None), WeightTracker(watch, tmp_path, None)
    there.commit(there.record("actor", 7, "/weights/v7", "http://127.0.0.1:1"))
    here.reload()
    assert here.reason == "version 7 of the pair 'actor' is published, and the engine does not have it yet"
    engine.version = 7
    await seen(watch)
    assert here.reason is None, "the engine says that it has it"
    engine.version = 9
    await seen(watch)
    assert here.reason is None, "a version that somebody set by hand is theirs to answer for"


async def test_tracker_end_publishes_left_weights_or_none(tmp_path: Path) -> None:
    watch = EngineWatch(Engine().state)
    tracker = WeightTracker(watch, tmp_path, None)
    tracker.commit(tracker.record("actor", 7, None, "http://127.0.0.1:1"))
    tracker.end("critic", None)
    assert tracker.published is not None, "another pair's"
    tracker.end("actor", LeftWeights(path=str(tmp_path), version=7))
    assert tracker.published == PublishedWeights("actor", 7, str(tmp_path))
    tracker.end("actor", LeftWeights(path=str(tmp_path), version=6))
    assert tracker.published is None
    assert not (tmp_path / PUBLISHED).exists()


async def test_failed_commit_keeps_previous_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tracker = WeightTracker(EngineWatch(Engine().state), tmp_path, None)
    old, new = (tracker.record("actor", version, "/weights", None) for version in (4, 5))
    tracker.commit(old)
    with monkeypatch.context() as full:
        full.setattr(control, "replace_file", Mock(side_effect=OSError(ENOSPC, "full")))
        with pytest.raises(OSError, match="full"):
            tracker.commit(new)
    tracker.reload()
    assert tracker.published == old
    tracker.commit(new)
    assert tracker.published == new


async def test_tracker_ignores_malformed_record(tmp_path: Path) -> None:
    for text in ("", "[]", '{"pair": "actor"}', '{"pair": "actor", "version": "x"}'):
        (tmp_path / PUBLISHED).write_text(text)
        assert WeightTracker(EngineWatch(Engine().state), tmp_path, None).behind is None


IDLE_S = 60.0


async def test_silence_is_not_covered_before_first_pause() -> None:
    assert not PauseState().covers(IDLE_S)


async def test_silence_is_covered_while_paused_and_one_deadline_after() -> None:
    pause = PauseState()
    pause.set(True)
    assert pause.covers(0.0)
    pause.set(False)
    assert pause.covers(IDLE_S) and not pause.covers(0.0)


async def test_observation_begun_before_command_is_stale() -> None:
    pause = PauseState()
    asked_at = pause.commands
    pause.set(True)
    pause.observe(False, asked_at=asked_at)
    assert pause.active
    pause.observe(None, asked_at=pause.commands)  # an engine that does not tell
    assert pause.active
    pause.observe(False, asked_at=pause.commands)
    assert not pause.active


async def test_lost_engine_clears_pause() -> None:
    answers = iter([EngineState(None, paused=True), LOST, LOST])

    async def ask() -> EngineState:
        return next(answers)

    pause = PauseState()
    watch = EngineWatch(ask, pause=pause)
    await watch.refresh()
    assert pause.active
    await watch.refresh()  # one lost answer is noise
    assert watch.state.not_ready is None and pause.active
    await watch.refresh()
    assert not pause.active


async def test_pause_set_during_poll_is_kept() -> None:
    asked, answer = asyncio.Event(), asyncio.Event()

    async def ask() -> EngineState:
        asked.set()
        await answer.wait()
        return EngineState(None, paused=False)

    pause = PauseState()
    refreshing = asyncio.create_task(EngineWatch(ask, pause=pause).refresh(), name="refresh")
    await asyncio.wait_for(asked.wait(), 20)
    pause.set(True)
    answer.set()
    await asyncio.wait_for(refreshing, 20)
    assert pause.active


async def test_failed_update_is_announced_and_undone_at_once(tmp_path: Path) -> None:
    """A router that hears of it a second later shows two versions as ready."""
    watch = EngineWatch(Engine().state)
    await watch.refresh()
    tracker = WeightTracker(watch, tmp_path, None)
    tracker.loaded("pair", 1)
    tracker.commit(tracker.record("pair", 1, str(tmp_path), None))
    reasons: list[str | None] = []
    tracker.on_change = lambda: reasons.append(tracker.reason)
    tracker.invalidate()
    assert tracker.failed.is_set()
    tracker.reloaded("pair", 1)
    assert len(reasons) == 2 and reasons[0] is not None and "does not have it yet" in reasons[0] and reasons[1] is None


async def test_release_and_restoration_of_memory_are_announced(tmp_path: Path) -> None:
    """A router that learns of it at the next renewal of the lease sends calls there until then."""

    class Memory(Engine):
        async def release_memory(self) -> None:
            pass

        async def restore_memory(self) -> None:
            pass

    async def read(limit: int) -> bytes:
        return b""

    engine: Any = Memory()
    watch, asked = EngineWatch(engine.state), SimpleNamespace(read=read)
    config: Any = SimpleNamespace(engine_url="http://127.0.0.1:1", engine="vllm")
    tracker = WeightTracker(watch, tmp_path, None)
    controls = EngineControl(config, engine, lambda url: engine, watch, PauseState(), lambda: 0, tracker)
    announced: list[str | None] = []
    controls.on_change = lambda: announced.append(controls.not_ready)
    await watch.refresh()
    for handler in (controls.release_memory, controls.release_memory, controls.restore_memory, controls.restore_memory):
        await handler(cast(Request, asked))
    assert announced == ["the engine's memory is released", None]
