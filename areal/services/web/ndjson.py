"""Lines of a byte stream, of any length: aiohttp's own readline refuses a line longer than its buffer."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import aiohttp


async def split_lines(stream: aiohttp.StreamReader) -> AsyncGenerator[bytes, None]:
    """Each complete line without its newline; empty ones are skipped, and so is an unfinished last one."""
    rest = b""
    async for part in stream.iter_any():
        lines = (rest + part).split(b"\n")
        rest = lines.pop()
        for line in lines:
            if line:
                yield line
