"""The JSON payloads of a server-sent event stream, until ``[DONE]``."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import orjson

from areal.services.inference.engines.base import EngineFailed
from areal.services.inference.engines.clients.deltas import Lines


async def read_events(parts: AsyncIterator[bytes]) -> AsyncGenerator[dict[str, Any], None]:
    """Raises EngineFailed for an error event, and for a stream that is cut before ``[DONE]``."""
    lines = Lines()
    async for part in parts:
        for line in lines.feed(part):
            payload = line.removeprefix(b"data:").strip() if line.startswith(b"data:") else b""
            if payload == b"[DONE]":
                return
            if payload:
                data = orjson.loads(payload)
                if "error" in data:
                    raise EngineFailed(f"the engine failed: {data['error']}")
                yield data
    raise EngineFailed("the engine's stream was cut")
