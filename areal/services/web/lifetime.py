"""Where a process is in its life: starting, ready, draining. Liveness is not asked here: who answers, lives."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Lifetime:
    """``not_ready`` is asked at each probe and gives the reason, or None when the process can serve. ``news`` is set
    when it may have changed what a probe would be told."""

    def __init__(self, not_ready: Callable[[], str | None]) -> None:
        self._not_ready = not_ready
        self._draining = asyncio.Event()
        self.news = asyncio.Event()
        self.in_flight = 0

    @property
    def draining(self) -> bool:
        return self._draining.is_set()

    def drain(self) -> None:
        """From now on not ready; whoever holds a stream without end (``wait_draining``) ends it."""
        self._draining.set()
        self.news.set()

    async def wait_draining(self) -> None:
        await self._draining.wait()

    def state(self) -> tuple[str, str | None]:
        """``ready``, ``not_ready`` or ``draining``, and why it is not ready."""
        if self.draining:
            return "draining", "the process was told to stop and finishes what it has"
        reason = self._not_ready()
        return ("ready", None) if reason is None else ("not_ready", reason)
