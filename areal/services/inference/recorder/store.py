"""The journals of one data proxy, and the leases of online mode.

In online mode any client can lease ready trajectories, and a trajectory is offered until it is acknowledged. A lease
exists in memory only: after a restart, or when the visibility timeout has passed, the trajectory is offered again, so
each is delivered at least once. An acknowledgement is durable and works with any lease of the trajectory. A trajectory
that cannot be exported is skipped, and every response names it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import TypeAlias

from areal.dataclasses import dataclass
from areal.services.inference.recorder.exporting import TrajectoryKey, error_entry
from areal.services.inference.recorder.journal import SessionJournal
from areal.services.inference.recorder.rows import Export, Style, TrajectoryExport, join_exports
from areal.services.inference.recorder.session import LeaseName, TrajectoryKind
from areal.services.journal.store import JournalStore
from areal.wire.columns import ExportError

TrajectoryStore: TypeAlias = JournalStore[SessionJournal]


@dataclass(frozen=True)
class LeasedTrajectory:
    lease: LeaseName
    session_id: str
    trajectory: int
    export: Export


class TrajectoryLeases:
    """Leases of ready trajectories. ``skipped``: those that cannot be exported, by tag and trajectory;
    ``on_skip`` is called once with the code of each."""

    def __init__(self, store: TrajectoryStore, on_skip: Callable[[str], None] = lambda code: None) -> None:
        self._store = store
        self._on_skip = on_skip
        self.skipped: dict[tuple[str, TrajectoryKey], ExportError] = {}
        self._until: dict[tuple[str, TrajectoryKey], float] = {}  # by tag and trajectory, loop time

    async def lease(
        self,
        limit: int,
        wait_s: float,
        kind: TrajectoryKind | None = None,
        style: Style = Style.INDIVIDUAL,
        discount: float = 1.0,
    ) -> list[LeasedTrajectory]:
        """Return up to ``limit`` trajectories (of ``kind``), in the form of an export. Waits up to ``wait_s`` for the
        first."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_s
        while True:
            leased: list[LeasedTrajectory] = []
            for journal in self._store:
                while len(leased) < limit and (
                    chosen := journal.ready_online(limit - len(leased), self._not_now(journal), kind)
                ):
                    until = loop.time() + journal.retention.visibility_timeout
                    self._until |= {(journal.tag, item): until for item in chosen}
                    leased += await self._load(journal, chosen, style, discount)
            left = deadline - loop.time()
            if leased or left <= 0:
                return leased
            await self._wait_ready(min(left, self._next_return()))

    async def wait_for_any(self, wait_s: float, kind: TrajectoryKind | None = None) -> int:
        """Return the number of journals with a trajectory that could be leased, after waiting up to ``wait_s`` seconds
        for the first. Leases nothing."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_s
        while True:
            count = sum(len(journal.ready_online(1, self._not_now(journal), kind)) for journal in self._store)
            left = deadline - loop.time()
            if count or left <= 0:
                return count
            await self._wait_ready(min(left, self._next_return()))

    async def _load(
        self, journal: SessionJournal, chosen: list[TrajectoryKey], style: Style, discount: float
    ) -> list[LeasedTrajectory]:
        try:
            loaded = await journal.online(chosen, style, discount)
        except BaseException:
            self.give_back([LeaseName(journal.tag, *item) for item in chosen])
            raise
        leased = []
        for item, part in zip(chosen, loaded, strict=True):
            if isinstance(part, TrajectoryExport):
                leased.append(
                    LeasedTrajectory(LeaseName(journal.tag, *item), part.session_id, item[1], join_exports([part]))
                )
            elif part is not None:
                session_id = journal.session_id(item[0]) or str(item[0])
                self.skipped[journal.tag, item] = error_entry(session_id, item[1], part)
                self._on_skip(part.code)
        return leased

    def give_back(self, leases: Iterable[LeaseName]) -> None:
        """End leases whose response did not reach the client."""
        for lease in leases:
            self._until.pop((lease.tag, (lease.session, lease.trajectory)), None)

    async def acknowledge(self, leases: Iterable[LeaseName]) -> int:
        """Delete received trajectories, durably. Return how many were found here."""
        done = 0
        for lease in leases:
            journal = self._store.journals.get(lease.tag)
            if journal is not None:
                done += await journal.release(lease.session, lease.trajectory)
                self.give_back([lease])
        return done

    def _not_now(self, journal: SessionJournal) -> frozenset[TrajectoryKey]:
        """Return the trajectories that are leased or cannot be exported."""
        now = asyncio.get_running_loop().time()
        self._until = {key: until for key, until in self._until.items() if until > now}
        return frozenset(item for tag, item in (*self._until, *self.skipped) if tag == journal.tag)

    async def _wait_ready(self, timeout_s: float) -> None:
        """Return when a trajectory may have become ready, or after ``timeout_s``."""
        now = self._store.own.clock()
        due = [at for journal in self._store if (at := journal.next_due()) is not None]
        # for trajectories that are already due, the upkeep sends news
        await self._store.wait_news(min([timeout_s, *(at - now for at in due if at > now)]))

    def _next_return(self) -> float:
        """Return the seconds until the next lease expires, at least 0.01."""
        now = asyncio.get_running_loop().time()
        return max(0.01, min(self._until.values(), default=now + 3600.0) - now)
