"""Ends of streams that go wrong."""

from __future__ import annotations

import asyncio
import contextlib

from aiohttp import web

_LAST_WORD_S = 5.0


async def last_word(out: web.StreamResponse, data: bytes) -> None:
    """Write ``data`` to a stream that ends now. A caller that is gone, or takes nothing any more, misses it."""
    with contextlib.suppress(ConnectionResetError, TimeoutError):
        async with asyncio.timeout(_LAST_WORD_S):
            await out.write(data)
