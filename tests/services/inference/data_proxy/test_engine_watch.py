from __future__ import annotations

import asyncio
import contextlib

from areal.services.inference.data_proxy.engine_watch import EngineWatch
from areal.services.inference.engines.base import EngineState

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


async def test_engine_is_not_ready_until_it_says_so() -> None:
    first, second = await states_after(LOST, READY)
    assert (first, second) == (LOST, READY)


async def test_one_lost_answer_is_noise_and_two_are_not() -> None:
    states = await states_after(READY, LOST, READY, LOST, LOST, READY)
    assert [state.not_ready is None for state in states] == [True, True, True, True, False, True]


async def test_progress_is_heard_while_the_engine_samples() -> None:
    answers = [EngineState(None, generated=count) for count in (5, 5, 9)]
    beats: list[int] = []

    async def ask() -> EngineState:
        return answers.pop(0)

    watch = EngineWatch(ask, on_progress=lambda: beats.append(len(answers)))
    for _ in range(3):
        await watch.refresh()
    assert beats == [2, 0]
