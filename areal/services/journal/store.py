"""The journals that one process serves.

``root`` contains one folder per process, named by the uid of its run. A process restarted under the same uid finds its
own journal again. A process adopts every journal that its holder gave up, or whose lock stays free for longer than a
restart takes: it serves the journal in place, under the journal's tag, and deletes it once it is empty. New sessions go
to the process's own journal.

A draining process gives up its journals (``hand_over``), each when none of its calls is running, and continues with a
new journal, which it also gives up once a session has started in it. From then on it adopts a journal only if no other
process has done so for ``_TAKE_BACK_S``, since calls of its sessions would not be sent here.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sqlite3
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar
from uuid import uuid4

from areal.errors import UsageFault
from areal.http.headers import JOURNAL, STARTED
from areal.services.http.auth import Access
from areal.services.http.errors import ApiError, bad_field
from areal.services.http.messages import Request, Response, read_object
from areal.services.http.service import Metrics, Service, json_response
from areal.services.http.tasks import IDLE_S, background, happens, uninterrupted, until_beat
from areal.services.journal.keys import key_digest, tag_of_key
from areal.services.journal.storage import (
    Journal,
    JournalFolder,
    held_elsewhere,
    is_damage,
    is_full,
    lock_folder,
    note_damage,
    other_folders,
    read_tag,
    wait_for_lock,
)

J = TypeVar("J", bound=Journal)
OpenJournal = Callable[[JournalFolder], Awaitable[J]]
RUN_UID = "AREAL_RUN_UID"  # finds a restarted process's own journal

_log = logging.getLogger(__name__)
_SWEEP_S = 1.0
_IDLE_SWEEP_S = 3 * IDLE_S  # for a journal without writes and without other journals beside it
_LOOKED_AT_S = 0.2
ADOPT_AFTER_S = 5.0
_MOST_OWN_FOLDERS = 100
_MOST_TOLD = 3  # damaged records in a report
_TAKE_BACK_S = 30.0  # a journal that was given up, and that no process has adopted in this time, is taken back
_TICK_NS = 2_000_000_000  # longer than a file system's clock tick (Lustre: 1 s) and a file server's clock lag
_COMMIT_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1, 5)


class JournalStore(Generic[J]):
    """The journals of this process, by tag. Open it with ``serve_journals``; ``run`` is the background work.

    ``open_journal`` opens the journal of a locked folder, and raises sqlite3.Error. ``elsewhere``: tags of the journals
    under ``root`` that this process does not hold. ``leaving`` returns whether the process is draining, and so adopts
    nothing. ``on_left`` is awaited after a journal was given up; ``on_change`` is called when the set of served
    journals changes.
    """

    def __init__(self, root: Path, own: J, open_journal: OpenJournal[J], adopt_after_s: float) -> None:
        self.root = root
        self._open_journal = open_journal
        self.own = own
        self.elsewhere: tuple[str, ...] = ()
        self.leaving: Callable[[], bool] = lambda: False
        self.on_left: Callable[[J], Awaitable[None]] = _do_nothing
        self.on_change: Callable[[], None] = lambda: None
        self._adopt_after_s = adopt_after_s
        self._free_since: dict[Path, float] = {}
        self._held_elsewhere: set[Path] = set()
        self._siblings = False
        self._uid = own.folder.path.name
        self._left: dict[Path, float] = {}  # journals that were given up, and the loop time of that
        self._handing: asyncio.Task[None] | None = None
        self._drained = False
        self.journals: dict[str, J] = {own.tag: own}
        self.unreadable: set[Path] = set()
        self._listed: object = None  # the state of the root when ``elsewhere`` was last read
        self.failures: dict[Path, str] = {}  # why journals could not be opened, as it was logged
        self.started = time.time_ns() // 1000  # of sessions: so that a successor's count goes on above it
        self._news: asyncio.Event | None = None  # once something waits
        self._appeared = asyncio.Event()  # a journal appeared that the last sweep did not see
        self._adopting = asyncio.Lock()
        self._leaving = asyncio.Lock()
        own.on_news = self._wake

    def __iter__(self) -> Iterator[J]:
        return iter(tuple(self.journals.values()))

    def require(self, headers: Mapping[str, str]) -> None:
        """Raise 421 if the request names a journal that another process holds. A request with only a caller's key names
        none."""
        if (tag := headers.get(JOURNAL)) is not None and tag not in self.journals:
            raise held_elsewhere()

    def count_started(self, sessions: int) -> dict[str, str]:
        """Count started sessions. Return the header by which the router recognizes them in a report."""
        self.started += sessions
        return {STARTED: str(self.started)}

    def others(self) -> tuple[str, ...]:
        """Update and return ``elsewhere``. It must be current: the router starts new sessions in place of those of a
        journal that it does not know. It is left unchanged while the root cannot be read. Folders are listed only after
        a change."""
        before = self.elsewhere
        with contextlib.suppress(OSError):
            changed_at = self.root.stat().st_mtime_ns
            state = changed_at, tuple(self.journals), frozenset(self.unreadable)
            if state == self._listed:
                return before
            entries = [path for path in self.root.iterdir() if path.is_dir() and path not in self.unreadable]
            self.elsewhere = self._tags(other_folders(self.root, self._held))
            # A new folder gets its tag later, and another folder may have been created in the same tick of the clock.
            is_whole = len(self.journals) + len(self.elsewhere) == len(entries)
            self._listed = state if is_whole and time.time_ns() - changed_at > _TICK_NS else None
        if not set(before).issuperset(self.elsewhere):
            self._appeared.set()
        return self.elsewhere

    @property
    def _held(self) -> set[Path]:
        return {journal.folder.path for journal in self}

    def _tags(self, folders: Iterable[Path]) -> tuple[str, ...]:
        return tuple(tag for path in folders if path not in self.unreadable and (tag := read_tag(path)) is not None)

    def holder_of_key(self, key: bytes) -> tuple[J, int] | None:
        """Return the journal and number of the session with this key. The journal of the key's tag is only tried first:
        a client may reuse the key of another journal's session for a new session."""
        digest = key_digest(key)
        first = self.journals.get(tag_of_key(key.decode("ascii", "replace")) or "")
        for journal in (*((first,) if first else ()), *self):
            if (number := journal.session_by_key(digest)) is not None:
                return journal, number
        return None

    def holder_of_digest(self, digest: bytes) -> J | None:
        return next((journal for journal in self if journal.knows(digest)), None)

    def _wake(self) -> None:
        if self._news is not None:
            self._news.set()
            self._news = None

    async def wait_news(self, timeout_s: float) -> None:
        """Wait until a journal has news or a journal was adopted, at most ``timeout_s``."""
        self._news = self._news or asyncio.Event()
        await happens(self._news, timeout_s)

    async def run(self) -> None:
        """Sweep the journals and adopt free ones, until cancelled."""
        commits = 0
        while True:
            for journal in self:
                try:
                    await journal.check_writable()  # retry a failed commit here, since there may be no call to do so
                    if journal is not self.own:
                        await self.own.inherit(journal)
                    if not await journal.sweep() and journal is not self.own and journal.is_spent():
                        del self.journals[journal.tag]
                        self.on_change()
                        await journal.close(remove=True)
                        _log.info("the adopted journal %s is empty and gone", journal.folder.path.name)
                except ApiError as error:  # concerns this journal only; the others still get their upkeep
                    _log.warning("no upkeep of the journal %s: %s", journal.folder.path.name, error)
            if self._drained and not _is_spent(self.own):  # a session has started here since: it goes, too
                try:
                    await self.hand_over()
                except (ApiError, OSError, sqlite3.Error) as error:
                    _log.warning("sessions that started since the drain stay here: %s", error)
            if not self.leaving():
                await self.adopt(self._adopt_after_s)
            before, commits = commits, sum(journal.commits.commits for journal in self)
            is_idle = commits == before and len(self.journals) == 1 and not self.elsewhere and not self._free_since
            self._appeared.clear()
            await happens(self._appeared, until_beat(_IDLE_SWEEP_S if is_idle else _SWEEP_S))

    async def adopt(self, after_s: float = 0.0) -> list[str]:
        """Adopt every journal that was given up, or whose lock has been free for ``after_s`` seconds. Return their
        tags. If other processes hold journals under ``root``, adopt one per call, so that each process gets a share. A
        journal that cannot be read is logged and skipped."""
        async with self._adopting:
            candidates = other_folders(self.root, self._held)
            self.unreadable.intersection_update(candidates)  # forget damaged ones that were moved away
            adopted: list[str] = []
            for path in candidates:
                if adopted and self._siblings:
                    break  # leave the rest to the other processes
                try:
                    tag = await self._adopt(path, after_s)
                except (OSError, sqlite3.Error) as error:
                    self._note_failure(path, error)
                    continue
                if tag is not None:
                    adopted.append(tag)
            self._siblings = any(path in self._held_elsewhere for path in candidates)
            held = self._held
            self.elsewhere = self._tags(path for path in candidates if path not in held)
            if adopted:
                self._wake()
            return adopted

    async def hand_over(self) -> list[str]:
        """Give up the journals that have sessions, for other processes to adopt. Return their tags. Does not wait: each
        journal is closed when none of its calls is running."""
        self._drained = True
        async with self._leaving:
            leaving = [journal for journal in self if not journal.is_spent()]
            if self._handing is not None and not self._handing.done():
                return [journal.tag for journal in leaving]
            if self.own in leaving:
                folder = await asyncio.to_thread(_first_free, self.root, self._uid)
                journal = await self._open_journal(folder)
                self._serve(journal)
                self.own = journal

            async def leave_all() -> None:
                async with asyncio.TaskGroup() as group:
                    for journal in leaving:
                        group.create_task(self._leave(journal), name=f"leave-{journal.tag}")

            self._handing = asyncio.create_task(leave_all(), name="hand-over")
            return [journal.tag for journal in leaving]

    async def keep(self) -> None:
        """Cancel the hand-over: journals that are not closed yet stay."""
        self._drained = False
        if self._handing is not None:
            self._handing.cancel()
            await asyncio.wait([self._handing])

    async def _leave(self, journal: J) -> None:
        await journal.wait_idle()
        del self.journals[journal.tag]
        self.on_change()
        self._left[journal.folder.path] = asyncio.get_running_loop().time()
        await uninterrupted(journal.close(), f"close-{journal.tag}")
        _log.info("left the journal %s to other processes", journal.folder.path.name)
        await self.on_left(journal)

    def _serve(self, journal: J) -> None:
        journal.on_news = self._wake
        journal.clock = self.own.clock
        journal.commits.observe = self.own.commits.observe
        self.journals[journal.tag] = journal
        self.on_change()

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
        patience_s = 0.0 if folder.left else after_s
        if self._drained and path not in self._left:
            patience_s = max(patience_s, _TAKE_BACK_S)
        if now - self._free_since.setdefault(path, now) < patience_s:
            folder.give_back()
            return None
        try:
            journal = await self._open_journal(folder)
        except BaseException:
            folder.give_back()
            raise
        self.unreadable.discard(path)
        self.failures.pop(path, None)
        self._free_since.pop(path, None)
        self._left.pop(path, None)
        self._serve(journal)
        _log.info("adopted the journal %s with %d sessions", path.name, journal.live_sessions())
        return journal.tag

    def _note_failure(self, path: Path, error: OSError | sqlite3.Error) -> None:
        """Log the failure to open a journal once. Mark the journal unreadable only if it is damaged; otherwise it is
        tried again."""
        if self.failures.get(path) != str(error):
            self.failures[path] = str(error)
            _log.error("the journal %s cannot be opened: %s", path, error)
        if is_damage(error) and path not in self.unreadable:
            self.unreadable.add(path)
            note_damage(path, str(error))

    async def close(self) -> None:
        """Close every journal: delete empty ones, and give the others up to other processes."""
        await self.keep()
        for journal in self:
            await journal.close(remove=_is_spent(journal))


async def _do_nothing(journal: Journal) -> None:
    pass


def _is_spent(journal: Journal) -> bool:
    try:
        return journal.is_spent()
    except ApiError:  # unreadable here; another process may be able to read it
        return False


async def open_journal_store(
    root: Path, uid: str, open_journal: OpenJournal[J], *, adopt_after_s: float = ADOPT_AFTER_S
) -> JournalStore[J]:
    """Open the store with this process's own journal. Raises UsageFault if that journal cannot be opened."""
    try:
        folder = _first_free(root, uid)
        store = JournalStore(root, await open_journal(folder), open_journal, adopt_after_s)
        store.others()
        return store
    except (OSError, sqlite3.Error) as error:
        move = "move the folder away to start without what is recorded in it"
        hint = f"{'free some space there' if is_full(error) else move}, or name another --state-dir"
        raise UsageFault(f"cannot open the journal {root / uid}: {error}", hint=hint) from error


def _first_free(root: Path, uid: str) -> JournalFolder:
    """Lock the folder ``uid``, or else the first free ``uid-N``, since another process may have adopted ours before a
    restart. Raises OSError."""
    names = [uid, *(f"{uid}-{number}" for number in range(2, _MOST_OWN_FOLDERS))]
    for name in names:
        if (folder := wait_for_lock(root / name, _LOOKED_AT_S)) is not None:
            return folder
    raise OSError(f"other processes hold all of {uid} to {names[-1]} under {root}")


@contextlib.asynccontextmanager
async def serve_journals(
    state_dir: str, open_journal: OpenJournal[J], adopt_after_s: float
) -> AsyncIterator[JournalStore[J]]:
    """Open the journals under ``state_dir``, and maintain them while the block runs. Raises UsageFault."""
    root = Path(state_dir)
    try:
        root.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise UsageFault(f"cannot make the state folder {root}: {error.strerror}") from error
    uid = os.environ.get(RUN_UID) or f"manual-{uuid4().hex[:12]}"
    store = await open_journal_store(root, uid, open_journal, adopt_after_s=adopt_after_s)
    try:
        async with background("journal-upkeep", store.run):
            yield store
    finally:
        await store.close()


def store_details(store: JournalStore[J]) -> dict[str, Any]:
    """Return the store's status for the router: the journals here and elsewhere, the number of live sessions, and
    damage."""
    failing = next((journal.failing for journal in store if journal.failing is not None), None)
    noted = [f"{journal.folder.path.name}: {text}" for journal in store for text in journal.corrupt]
    noted += [f"{path.name}: {store.failures.get(path, '')}" for path in sorted(store.unreadable)]
    return {
        "journals": list(store.journals),
        "journals_elsewhere": list(store.others()),
        "journals_damaged": {tag: path.name for path in store.unreadable if (tag := read_tag(path)) is not None},
        "sessions": sum(journal.live_sessions() for journal in store),
        "sessions_started": store.started,
        "journal_failing": failing.reason if failing is not None else None,
        "journal_is_corrupt": failing is not None and failing.is_corrupt,
        "journal_is_full": failing is not None and failing.is_full,
        "journal_damaged": len(noted),
        "journal_damage": noted[:_MOST_TOLD],
    }


def track_journals(metrics: Metrics, store: JournalStore[J]) -> None:
    """Register metrics of the journals. Gauges are computed when they are scraped."""
    commits = metrics.histogram(
        "areal_commit_seconds", "One group commit of the journal, until it is on disk.", _COMMIT_SECONDS, ()
    )
    for journal in store:  # adopted journals get it from ``_serve``
        journal.commits.observe = commits.observe
    metrics.gauge("areal_sessions_open", "Sessions that have not ended.").set_function(
        lambda: sum(journal.live_sessions() for journal in store)
    )
    metrics.gauge("areal_journals", "Journals served: the own one and those adopted.").set_function(
        lambda: len(store.journals)
    )
    metrics.gauge("areal_journal_failing", "1 while a journal cannot be written.").set_function(
        lambda: float(any(journal.failing is not None for journal in store))
    )


_BODY_BYTES = 64 * 1024


class JournalRoutes(Generic[J]):
    """HTTP routes by which a router finds sessions and moves journals."""

    def __init__(self, store: JournalStore[J]) -> None:
        self._store = store

    def add_to(self, service: Service) -> None:
        self._store.leaving = lambda: service.lifetime.draining
        self._store.on_change = service.lifetime.news.set
        track_journals(service.metrics, self._store)
        service.route("POST", "/drain", self.drain, Access.ADMIN)
        service.route("POST", "/undrain", self.undrain, Access.ADMIN)
        service.route("POST", "/rl/find_key", self.find_key, Access.ADMIN)

    async def drain(self, request: Request) -> Response:
        """Move the sessions to other data proxies. Each of the returned ``journals`` is given up when its running calls
        have ended."""
        await request.read(_BODY_BYTES)
        return json_response({"status": "ok", "journals": await self._store.hand_over()})

    async def undrain(self, request: Request) -> Response:
        await request.read(_BODY_BYTES)
        await self._store.keep()
        return json_response({"status": "ok", "journals": list(self._store.journals)})

    async def find_key(self, request: Request) -> Response:
        """Find the session whose client-chosen key has this SHA-256 digest. Return the tag of its ``journal``, the
        ``journals`` that were searched, and those ``elsewhere``."""
        digest = (await read_object(request, _BODY_BYTES)).get("digest")
        try:
            wanted = bytes.fromhex(digest if isinstance(digest, str) else "")
        except ValueError as error:
            raise bad_field("digest", "must be a key's SHA-256 in hexadecimal") from error
        journal = self._store.holder_of_digest(wanted)
        about = {"journals": list(self._store.journals), "elsewhere": list(self._store.others())}
        return json_response({"journal": journal.tag if journal else None, **about})
