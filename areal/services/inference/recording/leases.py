"""Online mode: ready trajectories are lent to whoever asks, and come again until they are acknowledged.

A lease is only memory: after a restart, or when the visibility timeout has passed, the trajectory is offered again. So
each one is delivered at least once. Acknowledging is durable, and works with any lease of the trajectory.

A trajectory that cannot be handed out is skipped, and every answer names it: the others flow past it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from areal.services.inference.recording.exporting import Taken, error_entry
from areal.services.inference.recording.journal import Journal
from areal.services.inference.recording.names import LeaseName
from areal.services.inference.recording.packing import CorruptRecord
from areal.services.inference.recording.rows import Export, Part, RewardOverflow, join_parts
from areal.services.inference.recording.session import Kind
from areal.services.inference.recording.vault import Vault


@dataclass(frozen=True)
class Lent:
    lease: LeaseName
    session_id: str
    trajectory: int
    export: Export


class Leases:
    """``skipped``: what cannot be handed out, by tag and trajectory, as answers name it (``exporting.error_entry``).
    ``on_skip`` is told the code of each, once."""

    def __init__(self, vault: Vault, on_skip: Callable[[str], None] = lambda code: None) -> None:
        self._vault = vault
        self._on_skip = on_skip
        self.skipped: dict[tuple[str, Taken], dict[str, Any]] = {}
        self._until: dict[tuple[str, Taken], float] = {}  # by tag and trajectory, loop time

    async def lend(self, limit: int, wait_s: float, kind: Kind | None = None) -> list[Lent]:
        """Up to ``limit`` trajectories (of ``kind``), waiting for the first of them up to ``wait_s``."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_s
        while True:
            lent = await self._lend_now(limit, kind)
            left = deadline - loop.time()
            if lent or left <= 0:
                return lent
            await self._vault.wait_ready(min(left, self._next_return()))

    async def wait_for_any(self, wait_s: float, kind: Kind | None = None) -> int:
        """How many could be lent now, waiting for the first of them up to ``wait_s``; none is lent."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_s
        while True:
            count = sum(len(journal.ready_online(1, self._not_now(journal), kind)) for journal in self._vault)
            left = deadline - loop.time()
            if count or left <= 0:
                return count
            await self._vault.wait_ready(min(left, self._next_return()))

    async def _lend_now(self, limit: int, kind: Kind | None) -> list[Lent]:
        lent: list[Lent] = []
        for journal in self._vault:
            while len(lent) < limit and (
                chosen := journal.ready_online(limit - len(lent), self._not_now(journal), kind)
            ):
                until = asyncio.get_running_loop().time() + journal.rules.visibility_timeout_s
                self._until |= {(journal.tag, item): until for item in chosen}
                lent += await self._load(journal, chosen)
        return lent

    async def _load(self, journal: Journal, chosen: list[Taken]) -> list[Lent]:
        try:
            loaded = await journal.online(chosen)
        except BaseException:
            self.give_back([LeaseName(journal.tag, *item) for item in chosen])
            raise
        lent = []
        for item, part in zip(chosen, loaded, strict=True):
            if isinstance(part, Part):
                lent.append(Lent(LeaseName(journal.tag, *item), part.session_id, item[1], join_parts([part])))
            elif part is not None:
                self._skip(journal, item, part)
        return lent

    def _skip(self, journal: Journal, item: Taken, error: CorruptRecord | RewardOverflow) -> None:
        session_id = journal.session_id(item[0]) or str(item[0])
        self.skipped[journal.tag, item] = error_entry(session_id, item[1], error)
        self._on_skip(error.code)

    def give_back(self, leases: Iterable[LeaseName]) -> None:
        """They did not reach whoever asked."""
        for lease in leases:
            self._until.pop((lease.tag, (lease.session, lease.trajectory)), None)

    async def acknowledge(self, leases: Iterable[LeaseName]) -> int:
        """Forget what was received, durably. How many of them were here."""
        done = 0
        for lease in leases:
            journal = self._vault.journal(lease.tag)
            if journal is not None:
                done += await journal.release(lease.session, lease.trajectory)
                self.give_back([lease])
        return done

    def _not_now(self, journal: Journal) -> frozenset[Taken]:
        """What is lent, or cannot be."""
        now = asyncio.get_running_loop().time()
        self._until = {key: until for key, until in self._until.items() if until > now}
        return frozenset(item for tag, item in (*self._until, *self.skipped) if tag == journal.tag)

    def _next_return(self) -> float:
        """Seconds until the next lease runs out."""
        now = asyncio.get_running_loop().time()
        return max(0.01, min(self._until.values(), default=now + 3600.0) - now)
