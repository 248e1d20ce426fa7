"""What a route does when its caller goes away half way."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from areal.services.inference.engines.embedded import app
from areal.services.inference.engines.embedded.app import EngineRoutes
from areal.services.inference.engines.embedded.loading import LoadedModel
from areal.services.inference.engines.embedded.requests import Streams

from .support import Harness, make_sequence

Start = Callable[..., Harness]


@pytest.mark.parametrize("paused_before", [False, True])
async def test_pause_whose_caller_left_leaves_the_engine_as_it_was(
    llama: tuple[Path, Any], start: Start, monkeypatch: pytest.MonkeyPatch, paused_before: bool
) -> None:
    """The reply waits for a stream that nobody reads; its caller does not wait for the reply."""
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
