"""The JSON payloads of a server-sent event stream, until ``[DONE]``."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from typing import Any

import aiohttp
import orjson

from areal.services.inference.engines.base import EngineFailed
from areal.services.web.ndjson import split_lines


async def read_events(stream: aiohttp.StreamReader) -> AsyncGenerator[dict[str, Any], None]:
    """Raises EngineFailed for an error event, and for a stream that is cut before ``[DONE]``."""
    async with contextlib.aclosing(split_lines(stream.iter_any())) as lines:
        async for line in lines:
            payload = line.removeprefix(b"data:").strip() if line.startswith(b"data:") else b""
            if payload == b"[DONE]":
                return
            if payload:
                data = orjson.loads(payload)
                if "error" in data:
                    raise EngineFailed(f"the engine failed: {data['error']}")
                yield data
    raise EngineFailed("the engine's stream was cut")
