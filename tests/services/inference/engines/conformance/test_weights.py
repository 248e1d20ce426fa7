"""New weights under a running engine: what follows is computed with them, and only with them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from areal.http.client import HttpClient
from areal.services.inference.engines.base import (
    Broadcast,
    EngineError,
    EngineRefused,
    GroupMember,
    WeightsDiffer,
    WeightStager,
    check_weights,
)
from areal.services.weight_transfer.group import open_group, open_store
from areal.services.weight_transfer.memory import Image, layout_of
from tests.services.inference.engines.conformance.conftest import Subject
from tests.services.inference.engines.conformance.engines import start
from tests.services.inference.engines.conformance.models import TOLERANCE, Models, gap, probe
from tests.services.inference.engines.conformance.test_controls import ENDS_S, paused_midway
from tests.services.inference.engines.conformance.test_generation import LONG, PROMPT, reported, tokens


@pytest.fixture(params=[False, True], ids=["untied", "tied"])
def tied(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


async def update(engine: Subject, version: int) -> None:
    await engine.client.pause()
    await engine.client.load_weights(str(engine.models.folders[version]), version)
    await engine.client.resume()


async def test_new_weights_match_forward_pass(engine: Subject) -> None:
    old, new = engine.models.versions
    await check_weights(engine.client, probe(old, PROMPT))
    await engine.run(LONG, max_new_tokens=2)  # a prefix that must not survive
    await update(engine, 1)
    for prompt in (LONG, PROMPT):
        deltas = await engine.run(prompt, max_new_tokens=12, ignore_eos=True)
        assert gap(new, prompt, tokens(deltas), reported(deltas)) < TOLERANCE
        assert all(version == 1 for delta in deltas for version in delta.versions)
    assert await engine.client.version() == 1
    await check_weights(engine.client, probe(new, LONG))
    with pytest.raises(WeightsDiffer, match="nats off"):
        await check_weights(engine.client, probe(old, PROMPT))


async def test_running_call_continues_with_new_weights_stamped(engine: Subject) -> None:
    running = await paused_midway(engine)
    arrived = len(tokens(running.deltas))
    await engine.client.load_weights(str(engine.models.folders[1]), 1)
    await engine.client.resume()
    late = await engine.run([20, 21], max_new_tokens=8, ignore_eos=True)
    await asyncio.wait_for(running.task, ENDS_S)
    held, total = running.versions.count(0), len(tokens(running.deltas))
    assert total > held >= arrived and running.versions == [0] * held + [1] * (total - held)
    old, new = engine.models.versions
    sampled, logprobs = tokens(running.deltas), reported(running.deltas)
    assert gap(old, PROMPT, sampled[:held], logprobs[:held]) < TOLERANCE
    # From the boundary on, also what came before it is read by the new weights: nothing is left of the old cache.
    assert gap(new, [*PROMPT, *sampled[:held]], sampled[held:], logprobs[held:]) < TOLERANCE
    assert gap(new, [20, 21], tokens(late), reported(late)) < TOLERANCE


async def test_loading_wrong_folder_changes_nothing(engine: Subject) -> None:
    for folder in (engine.models.broken, Path("/nowhere")):
        await engine.client.pause()
        with pytest.raises(EngineRefused):
            await engine.client.load_weights(str(folder), 5)
        await engine.client.resume()
    deltas = await engine.run(PROMPT, max_new_tokens=8, ignore_eos=True)
    assert gap(engine.models.versions[0], PROMPT, tokens(deltas), reported(deltas)) < TOLERANCE
    assert await engine.client.version() == 0


@pytest.mark.parametrize("kind", ["vllm-standin"])
async def test_stale_head_behind_a_good_answer_is_found(
    kind: str, models: Callable[[bool], Models], http: HttpClient, log: Path
) -> None:
    which = models(True)
    process = start(kind, which.folders[0], log, None, "--tied-fault")
    try:
        await process.wait_ready(http)
        client = process.open(http)
        await client.state()
        await client.load_weights(str(which.folders[1]), 1)  # answered well
        with pytest.raises(WeightsDiffer):
            await check_weights(client, probe(which.versions[1], PROMPT))
    finally:
        process.stop()


async def test_staged_weights_are_served_only_after_load(engine: Subject) -> None:
    client = stager(engine)
    old, new = engine.models.versions
    await client.stage_weights(str(engine.models.folders[1]), 1)
    await check_weights(engine.client, probe(old, PROMPT))
    await engine.client.pause()
    await client.load_staged(1)
    await engine.client.resume()
    await check_weights(engine.client, probe(new, LONG))
    assert await engine.client.version() == 1
    with pytest.raises(EngineError):  # nothing is staged any more
        await client.load_staged(1)
    with pytest.raises(EngineRefused):
        await client.stage_weights(str(engine.models.broken), 2)
    await client.forget_weights()
    await check_weights(engine.client, probe(new, PROMPT))


async def receive(client: Any, layout: Any, version: int) -> None:
    """As a data proxy does it: an engine that stages weights stages a broadcast."""
    if isinstance(client, WeightStager):
        await client.stage_weights(Broadcast("pair", layout), version)
        await client.load_staged(version)
    else:
        await client.receive_weights("pair", layout, version)


async def test_broadcast_weights_match_forward_pass(
    engine: Subject,
) -> None:
    client = engine.client
    assert isinstance(client, GroupMember)
    held = load_file(engine.models.folders[1] / "model.safetensors")
    image = Image(layout_of(held.items()))
    for name, tensor in held.items():
        image.write(name, tensor)
    layout = [list(entry) for entry in image.layout]
    for round_ in (1, 3):  # a group is formed anew under the same name
        store = open_store("127.0.0.1", 0, 2, 60.0)
        place = {"host": "127.0.0.1", "port": store.port, "rank": 1, "world_size": 2}
        form = partial(open_group, client.group_form, store, 2, 60.0, "pair")
        group, _ = await asyncio.gather(asyncio.to_thread(form), client.join_group("pair", place))
        for version in (round_, round_ + 1):  # and serves again
            await client.pause()
            await asyncio.gather(
                asyncio.to_thread(group.send, image.body, image.tensors),
                receive(client, layout, version),
            )
            await client.resume()
            await check_weights(client, probe(engine.models.versions[1], LONG))
            assert await client.version() == version
        await client.leave_group("pair")
        group.leave()
    with pytest.raises(EngineError):
        await receive(client, layout, 9)
    assert await client.version() == 4
    image.remove()


async def test_update_left_open_does_not_block_broadcast(engine: Subject) -> None:
    if engine.process.client_kind != "sglang":
        pytest.skip(f"{engine.kind} has no sessions of an update")
    headers = {"Content-Type": "application/json"}
    begun = await engine.http.fetch(
        "POST", engine.process.url, "/begin_weight_update", timeout_s=30.0, headers=headers, body=b"{}"
    )
    assert begun.status == 200, begun.body
    await test_broadcast_weights_match_forward_pass(engine)


@pytest.mark.slow
async def test_abandoned_group_or_broadcast_does_not_block_next(
    engine: Subject,
) -> None:
    client = engine.client
    assert isinstance(client, GroupMember)
    if client.group_form != "plain":
        pytest.skip(f"{engine.kind} makes its own groups")
    held = load_file(engine.models.folders[1] / "model.safetensors")
    image = Image(layout_of(held.items()))
    for name, tensor in held.items():
        image.write(name, tensor)
    layout = [list(entry) for entry in image.layout]

    def meeting() -> tuple[Any, dict[str, object]]:
        store = open_store("127.0.0.1", 0, 2, 60.0)
        return store, {"host": "127.0.0.1", "port": store.port, "rank": 1, "world_size": 2}

    async with asyncio.timeout(60.0):  # a deadline of the group is 300 s
        store, place = meeting()
        await given_up(client.join_group("pair", place))  # where the trainer never came
        store, place = meeting()
        form = partial(open_group, client.group_form, store, 2, 60.0, "pair")
        silent, _ = await asyncio.gather(asyncio.to_thread(form), client.join_group("pair", place))
        await given_up(receive(client, layout, 1))  # of a trainer that hangs
        store, place = meeting()
        form = partial(open_group, client.group_form, store, 2, 60.0, "pair")
        group, _ = await asyncio.gather(asyncio.to_thread(form), client.join_group("pair", place))
        await client.pause()
        await asyncio.gather(asyncio.to_thread(group.send, image.body, image.tensors), receive(client, layout, 2))
        await client.resume()
    await check_weights(client, probe(engine.models.versions[1], LONG))
    await client.leave_group("pair")
    for each in (group, silent):
        each.leave()
    image.remove()


async def given_up(call: Coroutine[Any, Any, None]) -> None:
    waiting = asyncio.create_task(call)
    done, _ = await asyncio.wait([waiting], timeout=1.0)
    assert not done
    waiting.cancel()
    await asyncio.wait([waiting])


def stager(engine: Subject) -> WeightStager:
    if not isinstance(engine.client, WeightStager):
        pytest.skip(f"{engine.kind} stages no weights")
    return engine.client
