"""A journal on disk: its folder and lock, its SQLite file, group commit.

Why SQLite and no log of our own: a session changes state, is looked up in several ways, and is removed. All of that
needs an index that survives a crash. Write-ahead mode with ``synchronous=FULL`` gives exactly what is promised: a
transaction is on disk when its commit returns, a torn tail is cut off at the next open, a full disk fails the
transaction and leaves nothing of it. SQLite checks its log but not its tables, so every row carries its own CRC.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import shutil
import sqlite3
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any, Self, TypeVar

from areal.services.http.errors import ApiError
from areal.services.journal.keys import is_tag, new_tag

_PAGES_A_CHECKPOINT = 1000  # a log that is written over again costs half of one that grows
_WRITER_CACHE_KB = 4096
_READER_CACHE_KB = 1024
_BUSY_S = 10.0
_ABOUT = "CREATE TABLE about (name TEXT PRIMARY KEY, value TEXT NOT NULL);"
_text = partial(str, encoding="utf-8", errors="replace")  # damaged text is read, and fails its row's checksum


class CorruptRecord(Exception):
    """Stored bytes that are not those that were written, or that this version cannot read. Names what they belong
    to."""

    code = "record_corrupted"


def open_writer(file: Path, tables: str, version: int) -> sqlite3.Connection:
    """The one connection that writes; ``tables`` are made in a new file. Raises sqlite3.Error, also for a file of
    another format ``version``."""
    file.touch(mode=0o600)  # SQLite gives its log the same mode
    db = _connect(file, _WRITER_CACHE_KB)
    (found,) = db.execute("PRAGMA user_version").fetchone()
    if found == 0:
        db.execute("PRAGMA auto_vacuum=INCREMENTAL")
    db.execute("PRAGMA journal_mode=WAL")
    db.execute("PRAGMA synchronous=FULL")
    db.execute(f"PRAGMA wal_autocheckpoint={_PAGES_A_CHECKPOINT}")
    if found == 0:
        db.executescript(f"BEGIN; {_ABOUT} {tables} PRAGMA user_version={version}; COMMIT")
    elif found != version:
        raise sqlite3.DatabaseError(f"{file} has format {found}; this version reads format {version}")
    return db


def journal_tag(db: sqlite3.Connection, fill: Callable[[str], object] = lambda tag: None) -> str:
    """The tag of the journal; a new one gets it now, and ``fill`` writes what it begins with."""
    row: tuple[str] | None = db.execute("SELECT value FROM about WHERE name='tag'").fetchone()
    if row is not None:
        return row[0]
    tag = new_tag()
    db.execute("BEGIN IMMEDIATE")
    db.execute("INSERT INTO about VALUES ('tag', ?)", (tag,))
    fill(tag)
    db.execute("COMMIT")
    return tag


def open_reader(file: Path) -> sqlite3.Connection:
    """Sees committed rows, and never waits for a lock."""
    db = _connect(file, _READER_CACHE_KB)
    db.execute("PRAGMA query_only=1")
    return db


def _connect(file: Path, cache_kb: int) -> sqlite3.Connection:
    # Statements run on the event loop's thread and commits in another, but never at the same time.
    db = sqlite3.connect(file, isolation_level=None, check_same_thread=False, timeout=_BUSY_S, cached_statements=128)
    db.text_factory = _text
    db.execute(f"PRAGMA cache_size=-{cache_kb}")
    return db


# -- folder and lock

DATABASE = "journal.db"
_LOCK = "lock"
_TAG = "tag"


@dataclass(frozen=True)
class JournalFolder:
    """A folder that this process holds. ``left``: its last holder gave it up."""

    path: Path
    descriptor: int
    left: bool = False

    @property
    def database(self) -> Path:
        return self.path / DATABASE

    def show_tag(self, tag: str) -> None:
        """Publish the journal's tag for processes that do not hold the folder."""
        (self.path / _TAG).write_text(tag, encoding="ascii")

    def release(self) -> None:
        """Release the lock, as if this process had never held it."""
        os.close(self.descriptor)

    def leave(self) -> None:
        """Release it for good: another process may adopt it at once."""
        os.ftruncate(self.descriptor, 0)
        self.release()

    def remove(self) -> None:
        """Delete it, then release the lock: a process that waits for it finds the folder gone."""
        shutil.rmtree(self.path)
        self.release()


def lock_folder(path: Path) -> JournalFolder | None:
    """Take the folder, made if need be. None when another process holds it. Raises OSError."""
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    lock = path / _LOCK
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        still_there = os.fstat(descriptor).st_ino == lock.stat().st_ino
    except (BlockingIOError, FileNotFoundError):
        os.close(descriptor)
        return None
    if not still_there:
        os.close(descriptor)
        return None
    left = os.fstat(descriptor).st_size == 0
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    return JournalFolder(path, descriptor, left)


def wait_for_lock(path: Path, patience_s: float) -> JournalFolder | None:
    """Lock the folder as ``lock_folder`` does, waiting for a process that only tests the lock."""
    deadline = time.monotonic() + patience_s
    while (folder := lock_folder(path)) is None and time.monotonic() < deadline:
        time.sleep(0.02)
    return folder


def is_left(path: Path) -> bool:
    """Whether its last holder gave it up, and nobody has taken it since."""
    try:
        return (path / _LOCK).stat().st_size == 0
    except FileNotFoundError:
        return False


def read_tag(path: Path) -> str | None:
    try:
        tag = (path / _TAG).read_text(encoding="ascii")
    except (OSError, ValueError):
        return None
    return tag if is_tag(tag) else None


def other_folders(root: Path, held: set[Path]) -> list[Path]:
    """Folders under ``root`` with a journal that this process does not hold."""
    with contextlib.suppress(FileNotFoundError):
        return sorted(path for path in root.iterdir() if path not in held and (path / DATABASE).is_file())
    return []


# -- group commit

_T = TypeVar("_T")
_log = logging.getLogger(__name__)
_AT_A_TIME = 16  # changes between two looks at the event loop
_MOST = 1024


@dataclass
class _PendingChange:
    apply: Callable[[], Any]
    done: asyncio.Future[Any]
    outcome: Any = None


class CommitThread:
    """Commits beside the event loop, one at a time: what an executor does for that, with its locks and its futures,
    costs as much again as the commit of a short turn."""

    def __init__(self, db: sqlite3.Connection, name: str) -> None:
        self._db = db
        self._loop = asyncio.get_running_loop()
        self._asked: SimpleQueue[asyncio.Future[None] | None] = SimpleQueue()
        self._thread = Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    async def commit(self) -> None:
        """Raises sqlite3.Error."""
        done = self._loop.create_future()
        self._asked.put(done)
        await done

    def close(self) -> None:
        self._asked.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (done := self._asked.get()) is not None:
            failure = None
            try:
                self._db.execute("COMMIT")
            except sqlite3.Error as error:
                failure = error
            self._loop.call_soon_threadsafe(_settle, done, failure)


def _settle(done: asyncio.Future[None], failure: sqlite3.Error | None) -> None:
    if done.done():
        return
    if failure is None:
        done.set_result(None)
    else:
        done.set_exception(failure)


class CommitQueue:
    """Runs changes on ``db``, whose only writer this is. ``failing``: why the last commit failed, or None.
    ``settled`` is called with whether the batch was committed, before its callers resume."""

    def __init__(
        self, db: sqlite3.Connection, name: str, settled: Callable[[bool], None] = lambda committed: None
    ) -> None:
        self._db = db
        self._settled = settled
        self._waiting: deque[_PendingChange] = deque()
        self._wake = asyncio.Event()
        self._thread = CommitThread(db, f"commit-{name}")
        self._task = asyncio.create_task(self._run(), name=f"commit-{name}")
        self._closing = False
        self.failing: str | None = None
        self.commits = 0
        self.observe: Callable[[float], None] = lambda seconds: None

    async def run(self, apply: Callable[[], _T]) -> _T:
        """``apply()``'s value, once it is durable. Raises what it raises; ApiError 507 or 500 when the store fails."""
        if self._closing:
            raise held_elsewhere()
        change = _PendingChange(apply, asyncio.get_running_loop().create_future())
        self._waiting.append(change)
        self._wake.set()
        value: _T = await change.done
        return value

    async def close(self) -> None:
        """Commit what waits, then stop."""
        self._closing = True
        self._wake.set()
        await self._task
        self._thread.close()

    async def _run(self) -> None:
        while self._waiting or not self._closing:
            await self._wake.wait()
            self._wake.clear()
            while self._waiting:
                await self._commit()

    async def _commit(self) -> None:
        batch: list[_PendingChange] = []
        began = time.perf_counter()
        try:
            self._db.execute("BEGIN IMMEDIATE")
            await self._apply(batch)
            await self._thread.commit()
        except sqlite3.Error as error:
            self._fail(batch, error)
            return
        self.failing = None
        self.commits += 1
        self.observe(time.perf_counter() - began)
        self._settled(True)
        for change in batch:
            if not change.done.done():
                change.done.set_result(change.outcome)

    async def _apply(self, batch: list[_PendingChange]) -> None:
        while self._waiting and len(batch) < _MOST:
            change = self._waiting.popleft()
            if change.done.cancelled():
                continue
            written = self._db.total_changes
            try:
                change.outcome = change.apply()
            except sqlite3.Error:
                batch.append(change)
                raise
            except Exception as error:
                if self._db.total_changes != written:
                    batch.append(change)
                    raise sqlite3.InternalError(f"a change failed when it had begun to write: {error!r}") from error
                if not change.done.done():
                    change.done.set_exception(error)
                continue
            batch.append(change)
            if len(batch) % _AT_A_TIME == 0:
                await asyncio.sleep(0)

    def _fail(self, batch: list[_PendingChange], error: sqlite3.Error) -> None:
        with contextlib.suppress(sqlite3.Error):
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
        self._settled(False)
        self.failing = str(error)
        _log.error("the journal could not be written, %d changes were refused: %s", len(batch), error)
        if not batch:  # the transaction did not begin: fail the waiting changes, or this would loop for ever
            batch = list(self._waiting)
            self._waiting.clear()
        for change in batch:
            if not change.done.done():
                change.done.set_exception(store_failure(error))


def held_elsewhere() -> ApiError:
    message = "this session is not recorded here; whoever routes by the newest table finds it"
    return ApiError(421, message, code="session_elsewhere")


def store_failure(error: sqlite3.Error) -> ApiError:
    if getattr(error, "sqlite_errorname", "") in ("SQLITE_FULL", "SQLITE_IOERR_WRITE"):
        return ApiError(507, f"the journal's disk takes no more: {error}", code="storage_full")
    return ApiError(500, f"the journal could not be written: {error}", code="storage_failed")


# -- one journal

_MOST_NOTED = 100  # damaged records, by name


class Journal(ABC):
    """Sessions recorded in one folder, served by the one process that holds it. Subclasses know the tables. All changes
    go through ``commits``. ``on_news`` is called when others may find something new; ``corrupt`` names damaged
    records."""

    def __init__(
        self,
        folder: JournalFolder,
        db: sqlite3.Connection,
        tag: str,
        settled: Callable[[bool], None] = lambda committed: None,
    ) -> None:
        self.folder = folder
        self.tag = tag
        self.clock: Callable[[], float] = time.time
        self.on_news: Callable[[], None] = lambda: None
        self.corrupt: list[str] = []
        self.released = False  # the folder
        self.commits = CommitQueue(db, tag, settled)
        self._db = db
        self._readers: list[sqlite3.Connection] = []
        self._uses = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._closed = False
        folder.show_tag(tag)

    @abstractmethod
    def session_by_key(self, digest: bytes) -> int | None:
        """The number of the session with this key, by the key's digest."""

    def knows(self, digest: bytes) -> bool:
        """Whether a session with this key is here, or was."""
        return self.session_by_key(digest) is not None

    async def inherit(self, other: Self) -> None:  # noqa: B027 - most have nothing
        """Take what is to outlive ``other``, an adopted journal, where that has no sessions any more."""

    @abstractmethod
    def live_sessions(self) -> int:
        """The number of sessions that have not ended."""

    @abstractmethod
    def is_spent(self) -> bool:
        """Whether it holds nothing that anybody may ask for."""

    @abstractmethod
    async def sweep(self) -> int:
        """One slice of the upkeep: how much was done. Repeat until it is 0."""

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Hold the journal open during a call of a session. Raises 421 where another process has the journal now."""
        if self._closed:
            raise held_elsewhere()
        self._uses += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._uses -= 1
            if self._uses == 0:
                self._idle.set()

    async def check_writable(self) -> None:
        """Try a commit after a failed one, so that nothing begins that cannot be recorded. Raises 507, 500."""
        if self.commits.failing is not None:
            await self.commits.run(
                lambda: self._db.execute("INSERT OR REPLACE INTO about VALUES ('tried_at', ?)", (str(self.clock()),))
            )

    async def wait_idle(self) -> None:
        """Return when no call runs."""
        while self._uses:
            await self._idle.wait()

    async def close(self, *, remove: bool = False) -> None:
        """Commit pending changes and release the folder, or delete it. Later requests for its sessions get 421."""
        self._closed = True
        await self.commits.close()
        for db in (*self._readers, self._db):
            db.close()
        if remove:
            self.folder.remove()
        else:
            self.folder.leave()
        self.released = True

    def _reader(self) -> sqlite3.Connection:
        self._readers.append(open_reader(self.folder.database))
        return self._readers[-1]

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        if self._closed:
            raise held_elsewhere()
        try:
            yield
        except CorruptRecord as error:
            raise self._damaged(error) from error
        except sqlite3.Error as error:
            raise store_failure(error) from error

    def _damaged(self, error: CorruptRecord) -> ApiError:
        self._note(error)
        return ApiError(500, f"the journal is damaged: {error}", code=error.code)

    def _note(self, error: CorruptRecord) -> None:
        """Count damage, and log each kind once."""
        text = str(error)
        if text not in self.corrupt and len(self.corrupt) < _MOST_NOTED:
            self.corrupt.append(text)
            _log.error("the journal %s is damaged: %s", self.folder.path, text)
