"""Online mode: ready trajectories are lent to whoever asks, and come again until they are acknowledged.

A lease is only memory: after a restart, or when the visibility timeout has passed, the trajectory is offered again. So
each one is delivered at least once. Acknowledging is durable, and works with any lease of the trajectory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass

from areal.services.inference.recording.exporting import Taken
from areal.services.inference.recording.journal import Journal
from areal.services.inference.recording.names import LeaseName
from areal.services.inference.recording.rows import Export
from areal.services.inference.recording.vault import Vault


@dataclass(frozen=True)
class Lent:
    lease: LeaseName
    session_id: str
    trajectory: int
    export: Export


class Leases:
    def __init__(self, vault: Vault) -> None:
        self._vault = vault
        self._until: dict[tuple[str, Taken], float] = {}  # by tag and trajectory, loop time

    async def lend(self, limit: int, wait_s: float) -> list[Lent]:
        """Up to ``limit`` trajectories, waiting for the first of them up to ``wait_s``."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_s
        while True:
            lent = await self._lend_now(limit)
            left = deadline - loop.time()
            if lent or left <= 0:
                return lent
            await self._vault.wait_ready(min(left, self._next_return()))

    async def wait_for_any(self, wait_s: float) -> int:
        """How many could be lent now, waiting for the first of them up to ``wait_s``; none is lent."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_s
        while True:
            count = sum(len(journal.ready_online(1, self._lent(journal))) for journal in self._vault)
            left = deadline - loop.time()
            if count or left <= 0:
                return count
            await self._vault.wait_ready(min(left, self._next_return()))

    async def _lend_now(self, limit: int) -> list[Lent]:
        lent: list[Lent] = []
        for journal in self._vault:
            chosen = journal.ready_online(limit - len(lent), self._lent(journal)) if len(lent) < limit else []
            if not chosen:
                continue
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
        return [
            Lent(LeaseName(journal.tag, *item), turns.session_id, turns.number, export)
            for item, (turns, export) in zip(chosen, loaded, strict=True)
        ]

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

    def _lent(self, journal: Journal) -> frozenset[Taken]:
        now = asyncio.get_running_loop().time()
        self._until = {key: until for key, until in self._until.items() if until > now}
        return frozenset(item for tag, item in self._until if tag == journal.tag)

    def _next_return(self) -> float:
        """Seconds until the next lease runs out."""
        now = asyncio.get_running_loop().time()
        return max(0.01, min(self._until.values(), default=now + 3600.0) - now)
