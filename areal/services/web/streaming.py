"""Server-sent events that are passed on, and streams that end badly."""

from __future__ import annotations

import asyncio
import contextlib

from areal.services.web.server import StreamResponse

_LAST_WORD_S = 5.0
_LONGEST_EVENT = 16 * 1024 * 1024


class EventCutter:
    """Cuts a byte stream between events, so that a source that breaks off never leaves half an event behind. ``held``
    is the half that waits for its end."""

    def __init__(self) -> None:
        self.held = b""

    def push(self, part: bytes) -> bytes:
        """What may be passed on: whole events."""
        if not self.held and part.endswith(b"\n\n"):
            return part
        if self.held:
            part = self.held + part
        end = max(part.rfind(b"\n\n") + 2, part.rfind(b"\n\r\n") + 3)
        if end < 3:
            end = len(part) if len(part) > _LONGEST_EVENT else 0
        self.held = part[end:]
        return part[:end] if self.held else part

    def rest(self) -> bytes:
        """What came after the last event of a source that ended well."""
        return self.held


async def last_word(out: StreamResponse, data: bytes) -> None:
    """Write ``data`` to a stream that ends now. A caller that is gone, or takes nothing any more, misses it."""
    with contextlib.suppress(ConnectionResetError, TimeoutError):
        async with asyncio.timeout(_LAST_WORD_S):
            await out.write(data)
