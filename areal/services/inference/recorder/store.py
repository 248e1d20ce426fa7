"""The journals that one data proxy serves, and the leases of online mode.

``root`` holds one folder a process, by its run's uid. A process restarted under the same uid finds its own journal
again. Any other journal whose process left, or whose lock stays free for longer than its own process needs to come
back, is adopted; it is served in place, under its own tag, and deleted once it is empty. New sessions go to the own
journal. A process that is drained leaves its journals to the others (``hand_over``), each as soon as none of its calls
runs, and continues with a new one.

In online mode ready trajectories are leased to any caller, and offered again until they are acknowledged. A lease
exists in memory only: after a restart, or when the visibility timeout has passed, the trajectory is offered again, so
each is delivered at least once. Acknowledging is durable, and works with any lease of the trajectory. A trajectory that
cannot be handed out is skipped, and every answer names it.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal.errors import UsageFault
from areal.services.http.errors import ApiError
from areal.services.http.tasks import until_beat
from areal.services.inference.recorder.exporting import TrajectoryKey, error_entry
from areal.services.inference.recorder.journal import SessionJournal, open_journal
from areal.services.inference.recorder.rows import Export, TrajectoryExport, join_exports
from areal.services.inference.recorder.session import LeaseName, TrajectoryKind, key_digest, tag_of_key
from areal.services.inference.recorder.storage import JournalFolder, lock_folder, other_folders, read_tag, wait_for_lock
from areal.wire.processes import Retention

_log = logging.getLogger(__name__)
_SWEEP_S = 1.0
_LOOKED_AT_S = 0.2
ADOPT_AFTER_S = 5.0
_MOST_OWN_FOLDERS = 100
_TAKE_BACK_S = 30.0  # a journal that was left and not adopted for so long is taken back


class JournalStore:
    """Open with ``open_journal_store``; ``run`` is its background work. ``elsewhere``: tags of the journals under the
    same root that this process does not hold. ``leaving``: the process is about to end, and adopts nothing."""

    def __init__(self, root: Path, own: SessionJournal, adopt_after_s: float) -> None:
        self.root = root
        self.own = own
        self.elsewhere: tuple[str, ...] = ()
        self.leaving: Callable[[], bool] = lambda: False
        self._adopt_after_s = adopt_after_s
        self._free_since: dict[Path, float] = {}
        self._held_elsewhere: set[Path] = set()
        self._siblings = False
        self._uid = own.folder.path.name
        self._left: dict[Path, float] = {}  # journals that were left to others, and when, in loop time
        self._handing: asyncio.Task[None] | None = None
        self.journals: dict[str, SessionJournal] = {own.tag: own}
        self.unreadable: dict[Path, str] = {}
        self._ready = asyncio.Event()
        self._adopting = asyncio.Lock()
        own.on_ready = self._wake

    def __iter__(self) -> Iterator[SessionJournal]:
        return iter(tuple(self.journals.values()))

    def journal(self, tag: str) -> SessionJournal | None:
        return self.journals.get(tag)

    def others(self) -> tuple[str, ...]:
        """Tags of the journals under the root that this process does not hold and can read, as they are now."""
        folders = other_folders(self.root, {journal.folder.path for journal in self})
        return tuple(tag for path in folders if path not in self.unreadable and (tag := read_tag(path)) is not None)

    def holder_of_key(self, key: bytes) -> tuple[SessionJournal, int] | None:
        """The journal and number of the session that this key opens. A session of one journal may have a key that
        another one made: keys are used again."""
        digest = key_digest(key)
        first = self.journals.get(tag_of_key(key.decode("ascii", "replace")) or "")
        for journal in (*((first,) if first else ()), *self):
            if (number := journal.session_by_key(digest)) is not None:
                return journal, number
        return None

    def holder_of_digest(self, digest: bytes) -> SessionJournal | None:
        return next((journal for journal in self if journal.session_by_key(digest) is not None), None)

    # -- readiness of online trajectories

    def _wake(self) -> None:
        self._ready.set()
        self._ready = asyncio.Event()

    async def wait_ready(self, timeout_s: float) -> None:
        """Return when a trajectory may have become ready, or after ``timeout_s``."""
        now = self.own.clock()
        due = [at for journal in self if (at := journal.next_due()) is not None]
        patience = min([timeout_s, *(at - now for at in due if at > now)])  # the upkeep wakes us for the others
        event = self._ready
        try:
            async with asyncio.timeout(patience):
                await event.wait()
        except TimeoutError:
            return

    # -- upkeep

    async def run(self) -> None:
        """Sweep, and adopt what stays free, for as long as the process lives."""
        while True:
            for journal in self:
                try:
                    if not await journal.sweep() and journal is not self.own and journal.is_spent():
                        del self.journals[journal.tag]
                        await journal.close(remove=True)
                        _log.info("the adopted journal %s is empty and gone", journal.folder.path.name)
                except ApiError as error:  # of this journal's store; the others have their upkeep
                    _log.warning("no upkeep of the journal %s: %s", journal.folder.path.name, error)
            if not self.leaving():
                await self.adopt(self._adopt_after_s)
            await asyncio.sleep(until_beat(_SWEEP_S))

    async def adopt(self, after_s: float = 0.0) -> list[str]:
        """Take over every journal that was left, or whose lock has been free for ``after_s``: their tags. Where others
        live it is one at a time, so that all get some. One that cannot be read is reported and left."""
        async with self._adopting:
            candidates = other_folders(self.root, {journal.folder.path for journal in self})
            adopted: list[str] = []
            for path in candidates:
                if adopted and self._siblings:
                    break  # they take their share
                if (tag := await self._adopt(path, after_s)) is not None:
                    adopted.append(tag)
            self._siblings = any(path in self._held_elsewhere for path in candidates)
            self.elsewhere = self.others()
            if adopted:
                self._wake()
            return adopted

    # -- draining

    async def hand_over(self) -> list[str]:
        """Leave the journals that have sessions to other processes: their tags. Returns at once; each goes when none of
        its calls runs any more."""
        leaving = [journal for journal in self if not journal.is_spent()]
        if self._handing is not None and not self._handing.done():
            return [journal.tag for journal in leaving]
        if self.own in leaving:
            folder = await asyncio.to_thread(_first_free, self.root, self._uid)
            journal = await open_journal(folder, self.own.retention, self.own.clock)
            self._serve(journal)
            self.own = journal

        async def leave_all() -> None:
            async with asyncio.TaskGroup() as group:
                for journal in leaving:
                    group.create_task(self._leave(journal), name=f"leave-{journal.tag}")

        self._handing = asyncio.create_task(leave_all(), name="hand-over")
        return [journal.tag for journal in leaving]

    async def keep(self) -> None:
        """The drain is over: what was not left yet stays."""
        if self._handing is not None:
            self._handing.cancel()
            await asyncio.wait([self._handing])

    async def _leave(self, journal: SessionJournal) -> None:
        await journal.wait_idle()
        del self.journals[journal.tag]
        self._left[journal.folder.path] = asyncio.get_running_loop().time()
        await asyncio.shield(asyncio.create_task(journal.close(), name=f"close-{journal.tag}"))
        _log.info("left the journal %s to other processes", journal.folder.path.name)

    def _serve(self, journal: SessionJournal) -> None:
        journal.on_ready = self._wake
        journal.commits.observe = self.own.commits.observe
        self.journals[journal.tag] = journal

    async def _adopt(self, path: Path, after_s: float) -> str | None:
        now = asyncio.get_running_loop().time()
        if now - self._left.get(path, -_TAKE_BACK_S) < _TAKE_BACK_S:
            return None
        folder = lock_folder(path)
        if folder is None:
            self._free_since.pop(path, None)
            self._held_elsewhere.add(path)
            return None
        self._held_elsewhere.discard(path)
        if not folder.left and now - self._free_since.setdefault(path, now) < after_s:
            folder.release()
            return None
        try:
            journal = await open_journal(folder, self.own.retention, self.own.clock)
        except sqlite3.Error as error:
            if path not in self.unreadable:
                _log.error("the journal %s cannot be read: %s", path, error)
            self.unreadable[path] = str(error)
            folder.release()
            return None
        self.unreadable.pop(path, None)
        self._free_since.pop(path, None)
        self._left.pop(path, None)
        self._serve(journal)
        _log.info("adopted the journal %s with %d sessions", path.name, journal.live_sessions())
        return journal.tag

    async def close(self) -> None:
        """Leave every journal to other processes, and delete empty ones."""
        await self.keep()
        for journal in self:
            await journal.close(remove=_is_spent(journal))


def _is_spent(journal: SessionJournal) -> bool:
    try:
        return journal.is_spent()
    except ApiError:  # it cannot be read: somebody else may
        return False


async def open_journal_store(
    root: Path, uid: str, retention: Retention, *, adopt_after_s: float = ADOPT_AFTER_S
) -> JournalStore:
    """The store with this process's own journal. Raises UsageFault when that cannot be opened."""
    try:
        folder = _first_free(root, uid)
        store = JournalStore(root, await open_journal(folder, retention), adopt_after_s)
        store.elsewhere = store.others()
        return store
    except (OSError, sqlite3.Error) as error:
        hint = "move the folder away to start without what is recorded in it, or name another --state-dir"
        raise UsageFault(f"cannot open the journal {root / uid}: {error}", hint=hint) from error


def _first_free(root: Path, uid: str) -> JournalFolder:
    """Of the folders to try: a sibling may have adopted ours while we were away."""
    names = [uid, *(f"{uid}-{number}" for number in range(2, _MOST_OWN_FOLDERS))]
    return next(filter(None, (wait_for_lock(root / name, _LOOKED_AT_S) for name in names)))


# -- leases


@dataclass(frozen=True)
class LeasedTrajectory:
    lease: LeaseName
    session_id: str
    trajectory: int
    export: Export


class TrajectoryLeases:
    """``skipped``: what cannot be handed out, by tag and trajectory, as answers name it (``exporting.error_entry``).
    ``on_skip`` is called with the code of each, once."""

    def __init__(self, store: JournalStore, on_skip: Callable[[str], None] = lambda code: None) -> None:
        self._store = store
        self._on_skip = on_skip
        self.skipped: dict[tuple[str, TrajectoryKey], dict[str, Any]] = {}
        self._until: dict[tuple[str, TrajectoryKey], float] = {}  # by tag and trajectory, loop time

    async def lease(self, limit: int, wait_s: float, kind: TrajectoryKind | None = None) -> list[LeasedTrajectory]:
        """Up to ``limit`` trajectories (of ``kind``), waiting for the first of them up to ``wait_s``."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_s
        while True:
            leased = await self._lease_now(limit, kind)
            left = deadline - loop.time()
            if leased or left <= 0:
                return leased
            await self._store.wait_ready(min(left, self._next_return()))

    async def wait_for_any(self, wait_s: float, kind: TrajectoryKind | None = None) -> int:
        """The number that could be leased now, waiting for the first of them up to ``wait_s``; none is leased."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_s
        while True:
            count = sum(len(journal.ready_online(1, self._not_now(journal), kind)) for journal in self._store)
            left = deadline - loop.time()
            if count or left <= 0:
                return count
            await self._store.wait_ready(min(left, self._next_return()))

    async def _lease_now(self, limit: int, kind: TrajectoryKind | None) -> list[LeasedTrajectory]:
        leased: list[LeasedTrajectory] = []
        for journal in self._store:
            while len(leased) < limit and (
                chosen := journal.ready_online(limit - len(leased), self._not_now(journal), kind)
            ):
                until = asyncio.get_running_loop().time() + journal.retention.visibility_timeout
                self._until |= {(journal.tag, item): until for item in chosen}
                leased += await self._load(journal, chosen)
        return leased

    async def _load(self, journal: SessionJournal, chosen: list[TrajectoryKey]) -> list[LeasedTrajectory]:
        try:
            loaded = await journal.online(chosen)
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
        """The response did not reach the caller."""
        for lease in leases:
            self._until.pop((lease.tag, (lease.session, lease.trajectory)), None)

    async def acknowledge(self, leases: Iterable[LeaseName]) -> int:
        """Forget what was received, durably. How many of them were here."""
        done = 0
        for lease in leases:
            journal = self._store.journal(lease.tag)
            if journal is not None:
                done += await journal.release(lease.session, lease.trajectory)
                self.give_back([lease])
        return done

    def _not_now(self, journal: SessionJournal) -> frozenset[TrajectoryKey]:
        """Trajectories that are leased already, or cannot be handed out."""
        now = asyncio.get_running_loop().time()
        self._until = {key: until for key, until in self._until.items() if until > now}
        return frozenset(item for tag, item in (*self._until, *self.skipped) if tag == journal.tag)

    def _next_return(self) -> float:
        """Seconds until the next lease runs out."""
        now = asyncio.get_running_loop().time()
        return max(0.01, min(self._until.values(), default=now + 3600.0) - now)
