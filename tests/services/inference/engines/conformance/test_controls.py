"""Pauses at a token's boundary, versions on each token, memory that goes and comes back, probes that tell."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from areal.services.inference.engines.base import EngineCall, EngineDelta, TokenEngine
from tests.services.inference.engines.conformance.conftest import Subject
from tests.services.inference.engines.conformance.models import MAX_LEN, TOLERANCE, gap
from tests.services.inference.engines.conformance.test_generation import PROMPT, reported, tokens

COUNT = 400
QUIET_S = 0.4
ENDS_S = 240.0  # a bound of hangs alone: a real engine beside other work took 64 s for an answer


class Running:
    """A generation under way: what came so far."""

    def __init__(self, client: TokenEngine, call: EngineCall) -> None:
        self.deltas: list[EngineDelta] = []
        self._changed = asyncio.Event()
        self.task = asyncio.create_task(client.stream_to(call, self._add, lambda flow: None), name="reading")

    def _add(self, delta: EngineDelta) -> None:
        self.deltas.append(delta)
        self._changed.set()

    @property
    def versions(self) -> list[int]:
        if self.deltas[-1].all_versions is not None:
            return list(self.deltas[-1].all_versions)
        return [version for delta in self.deltas for version in delta.versions]

    async def grown_to(self, count: int) -> None:
        async with asyncio.timeout(ENDS_S):
            while len(tokens(self.deltas)) < count:
                self._changed.clear()
                await self._changed.wait()


def begin(engine: Subject, prompt: list[int] = PROMPT, *, stream: bool = True) -> Running:
    call = replace(engine.call(prompt, max_new_tokens=COUNT, ignore_eos=True), stream=stream)
    return Running(engine.client, call)


async def paused_midway(engine: Subject) -> Running:
    """A generation that a pause found under way. A busy machine may run the engine to the call's end before it runs
    this process again: then there was nothing to pause, and it is another one's turn."""
    for _ in range(30):
        running = begin(engine)
        await running.grown_to(5)
        await engine.client.pause()
        await asyncio.sleep(QUIET_S)  # a real engine answers before its tokens arrive; a client merges them for 20 ms
        if len(tokens(running.deltas)) < COUNT:
            return running
        await engine.client.resume()
        await running.task
    raise AssertionError("each call was over before its pause")


async def test_pause_keeps_tokens_and_call_resumes(engine: Subject) -> None:
    running = await paused_midway(engine)
    held = len(tokens(running.deltas))
    assert 5 <= held < COUNT
    state = await engine.client.state()
    assert (state.not_ready, state.paused) == (None, True)  # a paused engine is not a dead one
    waiting = begin(engine, [11, 12])
    await asyncio.sleep(QUIET_S)  # nothing happens, which has no event
    assert len(tokens(running.deltas)) == held and not waiting.deltas
    await engine.client.resume()
    await asyncio.wait_for(asyncio.gather(running.task, waiting.task), ENDS_S)
    for call, prompt in ((running, PROMPT), (waiting, [11, 12])):
        assert len(tokens(call.deltas)) == COUNT
        assert gap(engine.models.versions[0], prompt, tokens(call.deltas), reported(call.deltas)) < TOLERANCE


async def test_each_token_has_version_at_sampling(engine: Subject) -> None:
    await engine.client.set_version(3)
    assert await engine.client.version() == 3
    running = await paused_midway(engine)
    arrived = len(tokens(running.deltas))
    await engine.client.set_version(4)
    await engine.client.resume()
    await asyncio.wait_for(running.task, ENDS_S)
    held = running.versions.count(3)  # an engine may have sampled tokens that it had not sent yet
    assert held >= arrived and running.versions == [3] * held + [4] * (COUNT - held)
    assert (await engine.client.state()).version == 4


async def test_whole_answer_keeps_token_versions_across_pause(engine: Subject) -> None:
    await engine.client.set_version(3)
    for _ in range(30):
        quiet = begin(engine, [11, 12], stream=False)
        running = await paused_midway(engine)
        await engine.client.set_version(4)
        await engine.client.resume()
        await asyncio.wait_for(asyncio.gather(running.task, quiet.task), ENDS_S)
        if quiet.versions[-1] == 4:  # else it was over before the pause
            break
        await engine.client.set_version(3)
    held = quiet.versions.count(3)
    assert 0 < held < COUNT and quiet.versions == [3] * held + [4] * (COUNT - held)
    assert gap(engine.models.versions[0], [11, 12], tokens(quiet.deltas), reported(quiet.deltas)) < TOLERANCE
    if engine.client.capabilities.whole_answers:
        (whole,) = quiet.deltas
        assert whole.after_first_s > 0


async def test_pause_and_resume_are_idempotent(engine: Subject) -> None:
    for _ in range(2):
        await engine.client.pause()
    for _ in range(2):
        await engine.client.resume()
    assert len(tokens(await engine.run(PROMPT, max_new_tokens=4, ignore_eos=True))) == 4


async def test_version_outlives_data_proxy(engine: Subject) -> None:
    await engine.client.set_version(12)
    other = engine.process.open(engine.http)
    assert (await other.state()).version == 12 == await other.version()


async def test_released_memory_returns_with_same_weights(engine: Subject) -> None:
    engine.needs("memory")
    before = await engine.run(PROMPT, max_new_tokens=10, temperature=0.0, ignore_eos=True)
    await engine.client.pause()
    await engine.client.release_memory()
    await engine.client.restore_memory()
    await engine.client.resume()
    after = await engine.run(PROMPT, max_new_tokens=10, temperature=0.0, ignore_eos=True)
    assert tokens(after) == tokens(before)
    assert gap(engine.models.versions[0], PROMPT, tokens(after), reported(after)) < TOLERANCE


async def test_state_describes_served_model(engine: Subject) -> None:
    state = await engine.client.state()
    assert state.not_ready is None and state.version == 0
    assert state.root == str(engine.models.folders[0])
    assert state.max_model_len == MAX_LEN
    assert set(state.adapters) == (set() if "adapters" in engine.process.lacks else set(engine.models.adapters))


@pytest.mark.parametrize("prompt", [PROMPT])
async def test_lost_engine_is_not_ready(engine: Subject, prompt: list[int]) -> None:
    client = type(engine.process)(engine.kind, engine.process.popen, engine.process.log, 9).open(engine.http)
    assert (await client.state()).not_ready
