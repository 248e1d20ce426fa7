"""The JSON payloads of a server-sent event stream, until ``[DONE]``."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from typing import Any

import orjson

from areal.services.inference.engines.base import EngineError, EngineFailed, EngineRefused
from areal.services.inference.engines.clients.batches import NextPart, line_batches


async def read_events(next_part: NextPart) -> AsyncGenerator[dict[str, Any], None]:
    """Raises for an error event (EngineRefused where it calls the request wrong), and EngineFailed for a stream that is
    cut before ``[DONE]``."""
    async with contextlib.aclosing(line_batches(next_part)) as batches:
        async for lines in batches:
            for line in lines:
                payload = line.removeprefix(b"data:").strip() if line.startswith(b"data:") else b""
                if payload == b"[DONE]":
                    return
                if payload:
                    data = orjson.loads(payload)
                    if "error" in data:
                        raise _failure(data["error"])
                    yield data
    raise EngineFailed("the engine's stream was cut")


def _failure(error: Any) -> EngineError:
    """Some refusals come only as an event, after a good status: the code is in it."""
    told = error if isinstance(error, dict) else {"message": error}
    code, message = told.get("code"), str(told.get("message") or error)
    if isinstance(code, int) and 400 <= code < 500 and code != 429:
        return EngineRefused(message)
    return EngineFailed(f"the engine failed: {message}")
