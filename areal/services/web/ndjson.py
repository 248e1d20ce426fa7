"""Lines of a byte stream, of any length."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable


async def split_lines(parts: AsyncIterable[bytes]) -> AsyncGenerator[bytes, None]:
    """Each complete line without its newline; empty ones are skipped, and so is an unfinished last one."""
    rest = b""
    async for part in parts:
        lines = (rest + part).split(b"\n")
        rest = lines.pop()
        for line in lines:
            if line:
                yield line
