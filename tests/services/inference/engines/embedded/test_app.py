"""Routes whose caller goes away half way, and process groups that break: whoever leaves one waits for nothing in it."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from areal.errors import ArealError
from areal.services.inference.engines.embedded import app
from areal.services.inference.engines.embedded.app import EngineRoutes, WeightGroups
from areal.services.inference.engines.embedded.loading import LoadedModel
from areal.services.inference.engines.embedded.requests import Streams
from areal.services.weight_update.staging import BroadcastPublisher
from areal.wire.bodies import JoinGroup

from .support import Harness, make_sequence

Start = Callable[..., Harness]


@pytest.mark.parametrize("paused_before", [False, True])
async def test_pause_of_disconnected_caller_keeps_engine_state(
    llama: tuple[Path, Any], start: Start, monkeypatch: pytest.MonkeyPatch, paused_before: bool
) -> None:
    """The reply waits for a stream that is not read; its caller does not wait for the reply."""
    monkeypatch.setattr(app, "_SETTLE_S", 600.0)
    engine = start(llama[0]).engine
    streams = Streams(asyncio.get_running_loop())
    routes = EngineRoutes(streams)
    loaded = LoadedModel(engine, frozenset(), "test")
    routes.serve_with(loaded)
    unread = make_sequence([1])
    unread.output, unread.produced = [5], 1
    stream = streams.open([unread], whole=False)
    if paused_before:
        engine.pause().result(10)
    pausing = asyncio.create_task(routes._pause(loaded), name="pause")
    await asyncio.wait_for(stream._news.wait(), 10)
    assert engine.paused
    pausing.cancel()
    await asyncio.wait([pausing])
    engine.stats().result(10)  # commands run in order: the resume, if there is one, has been
    assert engine.paused is paused_before


# -- process groups

CPU = torch.device("cpu")
SOON_S = 20.0  # on a busy machine; the deadline of a group is 300 s


@pytest.fixture
async def engine() -> AsyncIterator[WeightGroups]:
    groups = WeightGroups()
    yield groups
    groups.close()


@pytest.fixture
async def other() -> AsyncIterator[WeightGroups]:
    groups = WeightGroups()
    yield groups
    groups.close()


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[BroadcastPublisher]:
    publisher = BroadcastPublisher(tmp_path / "weights")
    yield publisher
    publisher.remove()


def place(offer: dict[str, Any], rank: int = 1) -> JoinGroup:
    return JoinGroup(name="pair", host=offer["host"], port=offer["port"], rank=rank, world_size=offer["world_size"])


async def received(engine: WeightGroups, layout: object) -> Path:
    file, _, end = await engine.receiving("pair", layout)
    await end
    return file


async def carried(trainer: BroadcastPublisher, engine: WeightGroups, version: int) -> bool:
    """A group of two forms, and brings what was staged."""
    offer = await asyncio.to_thread(trainer.offer, "pair", 2, "plain")
    await asyncio.gather(asyncio.to_thread(trainer.join), engine.join(place(offer), CPU))
    trainer.write(version, [("a", torch.full((1000, 100), float(version)))], None)
    layout = trainer.published(version)["source"]["layout"]
    file, _ = await asyncio.gather(received(engine, layout), asyncio.to_thread(trainer.send, version))
    trainer.settle()
    return bool(file.read_bytes().endswith(torch.full((100,), float(version)).numpy().tobytes()))


async def test_group_is_left_when_other_member_is_missing(trainer: BroadcastPublisher, engine: WeightGroups) -> None:
    offer = await asyncio.to_thread(trainer.offer, "pair", 3, "plain")
    joining = [
        asyncio.create_task(asyncio.to_thread(trainer.join)),
        asyncio.create_task(engine.join(place(offer), CPU)),
    ]
    done, _ = await asyncio.wait(joining, timeout=0.5)
    assert not done
    engine.leave("pair")
    await asyncio.to_thread(trainer.leave)
    async with asyncio.timeout(SOON_S):
        ours, theirs = await asyncio.gather(*joining, return_exceptions=True)
    assert isinstance(ours, RuntimeError) and "was left" in str(ours)
    assert isinstance(theirs, ArealError) and "was left" in str(theirs)
    async with asyncio.timeout(SOON_S):
        assert await carried(trainer, engine, 1)


async def test_abandoned_join_does_not_block_next(trainer: BroadcastPublisher, engine: WeightGroups) -> None:
    offer = await asyncio.to_thread(trainer.offer, "pair", 3, "plain")
    joining = asyncio.create_task(engine.join(place(offer), CPU))
    await asyncio.wait([joining], timeout=0.3)
    joining.cancel()
    async with asyncio.timeout(SOON_S):
        assert await carried(trainer, engine, 1)


async def test_join_fails_when_trainer_is_gone(tmp_path: Path, engine: WeightGroups) -> None:
    trainer = BroadcastPublisher(tmp_path / "weights")
    offer = await asyncio.to_thread(trainer.offer, "pair", 2, "plain")
    joining = asyncio.create_task(engine.join(place(offer), CPU))
    await asyncio.wait([joining], timeout=0.3)
    trainer.remove()
    async with asyncio.timeout(SOON_S):
        with pytest.raises(ArealError, match="process group failed"):
            await joining


async def test_broadcast_with_silent_member_can_be_left_at_once(
    trainer: BroadcastPublisher, engine: WeightGroups, other: WeightGroups
) -> None:
    """As an engine whose data proxy was killed: it is in the group, and does not hear of the broadcast."""
    offer = await asyncio.to_thread(trainer.offer, "pair", 3, "plain")
    members = [engine.join(place(offer, 1), CPU), other.join(place(offer, 2), CPU)]
    await asyncio.gather(asyncio.to_thread(trainer.join), *members)
    trainer.write(1, [("a", torch.zeros(4_000_000, 4))], None)
    trainer.settle()
    layout = trainer.published(1)["source"]["layout"]
    sending = asyncio.create_task(asyncio.to_thread(trainer.send, 1))
    receiving = asyncio.create_task(received(engine, layout))
    await asyncio.wait([sending], timeout=1.0)
    assert not sending.done()
    began = time.monotonic()
    await asyncio.to_thread(trainer.leave)
    engine.leave("pair")
    assert time.monotonic() - began < SOON_S
    async with asyncio.timeout(SOON_S):
        assert await carried(trainer, engine, 2)
        with pytest.raises(RuntimeError):
            await sending
    await asyncio.gather(receiving, return_exceptions=True)


async def test_abandoned_receive_ends_preparation(trainer: BroadcastPublisher, engine: WeightGroups) -> None:
    offer = await asyncio.to_thread(trainer.offer, "pair", 2, "plain")
    await asyncio.gather(asyncio.to_thread(trainer.join), engine.join(place(offer), CPU))
    trainer.write(1, [("a", torch.zeros(10))], None)
    trainer.settle()
    _, arrival, received = await engine.receiving("pair", trainer.published(1)["source"]["layout"])
    ready = asyncio.create_task(asyncio.to_thread(arrival.wait_all))
    received.cancel()
    async with asyncio.timeout(SOON_S):
        with pytest.raises(ArealError, match="did not arrive: no request asks"):
            await ready
        assert await carried(trainer, engine, 2)


@pytest.mark.extended
async def test_hanging_group_is_abandoned_without_waiting(trainer: BroadcastPublisher, engine: WeightGroups) -> None:
    offer = await asyncio.to_thread(trainer.offer, "pair", 2, "plain")
    await asyncio.gather(asyncio.to_thread(trainer.join), engine.join(place(offer), CPU))
    trainer.write(1, [("a", torch.zeros(10))], None)
    trainer.settle()
    receiving = asyncio.create_task(received(engine, trainer.published(1)["source"]["layout"]))
    await asyncio.wait([receiving], timeout=1.0)  # the trainer sends nothing
    engine.leave("pair")
    await asyncio.wait([receiving])
    failure = receiving.exception()
    assert isinstance(failure, ArealError) and "was left" in str(failure)
    began = time.monotonic()
    del failure, receiving
    gc.collect()
    assert time.monotonic() - began < SOON_S


async def test_left_group_file_is_distinct_from_new_one(trainer: BroadcastPublisher, engine: WeightGroups) -> None:
    async def pushed() -> Path:
        offer = await asyncio.to_thread(trainer.offer, "pair", 2, "plain")
        await asyncio.gather(asyncio.to_thread(trainer.join), engine.join(place(offer), CPU))
        trainer.write(1, [("a", torch.zeros(10))], None)
        layout = trainer.published(1)["source"]["layout"]
        file, _ = await asyncio.gather(received(engine, layout), asyncio.to_thread(trainer.send, 1))
        trainer.settle()
        return file

    first = await pushed()
    engine.leave("pair")
    assert not first.exists()
    second = await pushed()
    assert second.exists() and not first.exists()
