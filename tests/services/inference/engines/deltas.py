"""The deltas of a call, drawn one after the other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from areal.services.inference.engines.base import EngineCall, EngineDelta, TokenGenerator


async def deltas_of(client: TokenGenerator, call: EngineCall) -> AsyncGenerator[EngineDelta, None]:
    """Yield the deltas as they arrive; closing the generator cancels the call."""
    arrived: asyncio.Queue[EngineDelta | None] = asyncio.Queue()

    async def run() -> None:
        try:
            await client.stream_to(call, arrived.put_nowait, lambda flow: None)
        finally:
            arrived.put_nowait(None)

    task = asyncio.create_task(run())
    try:
        while (delta := await arrived.get()) is not None:
            yield delta
        await task
    finally:
        task.cancel()
        await asyncio.wait([task])
