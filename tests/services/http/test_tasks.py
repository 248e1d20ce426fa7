from __future__ import annotations

import asyncio
import logging

import pytest

from areal.services.http.tasks import background


async def test_background_task_that_fails_is_logged_and_starts_again(caplog: pytest.LogCaptureFixture) -> None:
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
