"""A journal on disk: its folder and lock, its SQLite file, group commit.

Why SQLite instead of our own log: a session changes state, is found by several keys, and is removed, which needs an
index that survives a crash. Write-ahead mode with ``synchronous=FULL`` gives the required guarantees: a transaction is
on disk when its commit returns, a torn tail is truncated at the next open, and a full disk fails the whole transaction.
SQLite checksums its log but not its tables, so rows carry their own CRC.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import shutil
import sqlite3
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any, NamedTuple, Self, TypeVar
from urllib.parse import quote

from areal.dataclasses import dataclass
from areal.files import lacks_room, replace_file, still_named, try_lock
from areal.services.http.errors import ApiError
from areal.services.journal.keys import is_tag, new_tag
from areal.wire.notes import note

_PAGES_A_CHECKPOINT = 1000  # overwriting the log costs half as much as growing it
_WRITER_CACHE_KB = 4096
_READER_CACHE_KB = 1024
_BUSY_S = 10.0
_ABOUT = "CREATE TABLE about (name TEXT PRIMARY KEY, value TEXT NOT NULL);"
_text = partial(str, encoding="utf-8", errors="replace")  # damaged text can be read, but fails its row's checksum


def note_damage(path: Path, why: str) -> None:
    """Add an event to the process's object. Callers get only a 404 or 500 for the damage."""
    note(os.environ, "Warning", "JournalDamaged", f"{path}: {why}", "data-proxy")


class CorruptRecord(Exception):
    """Stored bytes are damaged, or this version cannot read them. The message names the record."""

    code = "record_corrupted"


class OtherFormat(sqlite3.DatabaseError):
    """The journal was written by another version."""


def is_damage(error: Exception) -> bool:
    """Return whether ``error`` means that a journal cannot be read, however often it is tried. Other errors, such as a
    full disk, too many open files or a busy file, are temporary."""
    name = getattr(error, "sqlite_errorname", "")
    return isinstance(error, OtherFormat) or name.startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB"))


def open_writer(file: Path, tables: str, version: int) -> sqlite3.Connection:
    """Open the journal's only writing connection, and create ``tables`` in a new file. Raises sqlite3.Error, also for a
    file of another format ``version``."""
    file.touch(mode=0o600)  # SQLite gives its log the same mode
    with closed_on_error(_connect(file, _WRITER_CACHE_KB)) as db:
        (found,) = db.execute("PRAGMA user_version").fetchone()
        if found == 0:
            db.execute("PRAGMA auto_vacuum=INCREMENTAL")
        db.execute("PRAGMA journal_mode=WAL")
        db.execute("PRAGMA synchronous=FULL")
        db.execute(f"PRAGMA wal_autocheckpoint={_PAGES_A_CHECKPOINT}")
        if found == 0:
            db.executescript(f"BEGIN; {_ABOUT} {tables} PRAGMA user_version={version}; COMMIT")
        elif found != version:
            raise OtherFormat(f"{file} has format {found}; this version reads format {version}")
        return db


@contextlib.contextmanager
def closed_on_error(db: sqlite3.Connection) -> Iterator[sqlite3.Connection]:
    """Close ``db`` if the block fails. A connection is part of a reference cycle: unclosed, it would hold the file's
    lock, for which other processes wait, until the next garbage collection."""
    try:
        yield db
    except BaseException:
        db.close()
        raise


def journal_tag(db: sqlite3.Connection, fill: Callable[[str], object] = lambda tag: None) -> str:
    """Return the tag of the journal. A new journal gets its tag here, and ``fill(tag)`` writes its first rows."""
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
    """Open a connection that sees committed rows and never waits for a lock."""
    with closed_on_error(_connect(file, _READER_CACHE_KB)) as db:
        db.execute("PRAGMA query_only=1")
        return db


def _connect(file: Path, cache_kb: int) -> sqlite3.Connection:
    # Statements run on the event loop's thread and commits on another thread, but never at the same time. The lock of
    # the folder keeps other processes out, so that the index of the log is in this process's memory instead of a mapped
    # file, which network file systems do not share or refuse (https://sqlite.org/wal.html, "noshm").
    uri = f"file://{quote(os.fsencode(file.absolute()))}?vfs=unix-excl"
    db = sqlite3.connect(uri, _BUSY_S, isolation_level=None, check_same_thread=False, cached_statements=128, uri=True)
    with closed_on_error(db):
        db.text_factory = _text
        db.execute(f"PRAGMA cache_size=-{cache_kb}")
        return db


DATABASE = "journal.db"
_LOCK = "lock"
_TAG = "tag"


@dataclass(frozen=True)
class JournalFolder:
    """A journal's folder, locked by this process. ``left``: the previous holder gave it up."""

    path: Path
    descriptor: int
    left: bool = False

    @property
    def database(self) -> Path:
        return self.path / DATABASE

    def show_tag(self, tag: str) -> None:
        """Publish the journal's tag for processes that do not hold the folder. Raises OSError."""
        if read_tag(self.path) != tag:
            replace_file(self.path / _TAG, tag.encode("ascii"), mode=0o600, durable=True)

    def release(self) -> None:
        """Release the lock, as if this process had never held it."""
        os.close(self.descriptor)

    def give_back(self) -> None:
        """Release the lock without a change: a folder that was given up stays so, any other remains its holder's."""
        (self.leave if self.left else self.release)()

    def leave(self) -> None:
        """Give the folder up and release the lock, so that another process may adopt it at once."""
        os.ftruncate(self.descriptor, 0)
        self.release()

    def remove(self) -> None:
        """Delete the folder, then release the lock: a process that waits for the lock finds the folder gone. A network
        file system may keep the open lock file in the folder, under another name, until it is closed."""
        try:
            shutil.rmtree(self.path)
        except OSError as error:
            if error.errno != errno.ENOTEMPTY:
                raise
        self.release()
        with contextlib.suppress(OSError):  # already removed, or in use by another process
            self.path.rmdir()


def lock_folder(path: Path) -> JournalFolder | None:
    """Lock the folder, and create it if it does not exist. Return None if another process holds it. Raises OSError."""
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    lock = path / _LOCK
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        if try_lock(descriptor) and still_named(descriptor, lock):
            left = os.fstat(descriptor).st_size == 0
            holder = f"{os.getpid()}\n".encode()
            os.pwrite(descriptor, holder, 0)  # before the truncation: an empty file means that the folder was given up
            os.ftruncate(descriptor, len(holder))
            return JournalFolder(path, descriptor, left=left)
    except OSError:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None


def wait_for_lock(path: Path, patience_s: float) -> JournalFolder | None:
    """Lock the folder as ``lock_folder`` does, but wait up to ``patience_s`` seconds for a process that only tests the
    lock."""
    deadline = time.monotonic() + patience_s
    while (folder := lock_folder(path)) is None and time.monotonic() < deadline:
        time.sleep(0.02)
    return folder


def read_tag(path: Path) -> str | None:
    try:
        tag = (path / _TAG).read_text(encoding="ascii")
    except (OSError, ValueError):
        return None
    return tag if is_tag(tag) else None


def other_folders(root: Path, held: set[Path]) -> list[Path]:
    """Return the folders under ``root`` with a journal, except those in ``held``."""
    with contextlib.suppress(FileNotFoundError):
        return sorted(path for path in root.iterdir() if path not in held and (path / DATABASE).is_file())
    return []


_T = TypeVar("_T")
_log = logging.getLogger(__name__)
_AT_A_TIME = 16  # changes before the event loop runs other tasks
_MOST = 1024


@dataclass
class _PendingChange:
    apply: Callable[[], Any]
    done: asyncio.Future[Any]
    outcome: Any = None


class CommitThread:
    """A thread that runs one commit at a time. An executor's locks and futures would cost as much again as the commit
    of a short turn."""

    def __init__(self, db: sqlite3.Connection, name: str) -> None:
        self._db = db
        self._loop = asyncio.get_running_loop()
        self._asked: SimpleQueue[asyncio.Future[None] | None] = SimpleQueue()
        self._thread = Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    async def commit(self) -> None:
        """Commit the open transaction. Raises sqlite3.Error."""
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


class JournalFailure(NamedTuple):
    """Why a journal could not be written or read, by SQLite's own result code. ``is_corrupt``: its file is damaged.
    ``is_full``: its disk has no room."""

    reason: str
    is_corrupt: bool
    is_full: bool

    @classmethod
    def of(cls, error: sqlite3.Error) -> JournalFailure:
        code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_OK) & 0xFF  # without the extended part
        is_corrupt = code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
        return cls(str(error), is_corrupt, is_full(error))


class CommitQueue:
    """Group commit: runs waiting changes on ``db``, as its only writer, and commits them in one transaction.
    ``failing``: why the last commit failed, or None. ``settled`` is called before the callers resume; its argument says
    whether the batch was committed."""

    def __init__(
        self, db: sqlite3.Connection, name: str, settled: Callable[[bool], None] = lambda committed: None
    ) -> None:
        self._db = db
        self._settled = settled
        self._waiting: deque[_PendingChange] = deque()
        self._wake = asyncio.Event()
        self._name = f"commit-{name}"
        self._task: asyncio.Task[None] | None = None  # created by the first change, so that a failed open leaves none
        self._closing = False
        self.failing: JournalFailure | None = None
        self.commits = 0
        self.observe: Callable[[float], None] = lambda seconds: None

    async def run(self, apply: Callable[[], _T]) -> _T:
        """Return the value of ``apply()`` once its change is durable. Raises what ``apply`` raises, ApiError 507 or 500
        if the write fails, and 421 after ``close``."""
        if self._closing:
            raise held_elsewhere()
        if self._task is None:
            self._task = asyncio.create_task(self._run(CommitThread(self._db, self._name)), name=self._name)
        change = _PendingChange(apply, asyncio.get_running_loop().create_future())
        self._waiting.append(change)
        self._wake.set()
        value: _T = await change.done
        return value

    async def close(self) -> None:
        """Commit the waiting changes, then stop."""
        self._closing = True
        self._wake.set()
        if self._task is not None:
            await self._task

    async def _run(self, thread: CommitThread) -> None:
        while self._waiting or not self._closing:
            await self._wake.wait()
            self._wake.clear()
            while self._waiting:
                await self._commit(thread)
        thread.close()

    async def _commit(self, thread: CommitThread) -> None:
        batch: list[_PendingChange] = []
        began = time.perf_counter()
        try:
            self._db.execute("BEGIN IMMEDIATE")
            await self._apply(batch)
            await thread.commit()
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
        self.failing = JournalFailure.of(error)
        _log.error("the journal could not be written, %d changes were refused: %s", len(batch), error)
        if not batch:  # BEGIN failed: fail the waiting changes, or the loop would never end
            batch = list(self._waiting)
            self._waiting.clear()
        for change in batch:
            if not change.done.done():
                change.done.set_exception(store_failure(error))


def held_elsewhere() -> ApiError:
    message = "this session is recorded by another data proxy, which the current routing table names"
    return ApiError(421, message, code="session_elsewhere")


def is_full(error: OSError | sqlite3.Error) -> bool:
    """Return whether a write failed because its disk, or the user's share of it, is full."""
    if isinstance(error, OSError):
        return lacks_room(error)
    return getattr(error, "sqlite_errorname", "") == "SQLITE_FULL"


def store_failure(error: sqlite3.Error) -> ApiError:
    if is_full(error):
        return ApiError(507, f"the journal's disk is full: {error}", code="storage_full")
    if getattr(error, "sqlite_errorname", "") == "SQLITE_IOERR_WRITE":
        # A quota, a limit of file sizes or a broken disk: SQLite does not say which.
        return ApiError(507, f"the journal's disk accepts no more: {error}", code="storage_full")
    return ApiError(500, f"the journal could not be written: {error}", code="storage_failed")


class JournalUse:
    """Counts the blocks that use a journal. ``idle`` is set when the last one ends."""

    def __init__(self) -> None:
        self.count = 0
        self.idle = asyncio.Event()

    def __enter__(self) -> None:
        self.count += 1

    def __exit__(self, *error: object) -> None:
        self.count -= 1
        if self.count == 0:
            self.idle.set()


_MOST_NOTED = 100


class Journal(ABC):
    """Sessions recorded in one folder, served by the process that holds its lock. Subclasses define the tables. All
    changes go through ``commits``. ``on_news`` is called when waiting readers may find something new. ``corrupt`` lists
    the first 100 damaged records."""

    def __init__(
        self,
        folder: JournalFolder,
        db: sqlite3.Connection,
        tag: str,
        settled: Callable[[bool], None] = lambda committed: None,
    ) -> None:
        folder.show_tag(tag)
        self.folder = folder
        self.tag = tag
        self.clock: Callable[[], float] = time.time
        self.on_news: Callable[[], None] = lambda: None
        self.corrupt: list[str] = []
        self.commits = CommitQueue(db, tag, settled)
        self._db = db
        self._readers: list[sqlite3.Connection] = []
        self._use = JournalUse()
        self._closed = False
        self._unread: JournalFailure | None = None  # why the latest read failed

    @abstractmethod
    def session_by_key(self, digest: bytes) -> int | None:
        """Return the number of the session whose key has this digest, or None."""

    def knows(self, digest: bytes) -> bool:
        """Return whether the journal has, or had, a session whose key has this digest."""
        return self.session_by_key(digest) is not None

    async def inherit(self, other: Self) -> None:  # noqa: B027 - optional
        """Take over the records that must outlive ``other``, an adopted journal, once it has no sessions."""

    @abstractmethod
    def live_sessions(self) -> int:
        """Return the number of sessions that have not ended."""

    @abstractmethod
    def is_spent(self) -> bool:
        """Return whether the journal has nothing that a client may request."""

    @abstractmethod
    async def sweep(self) -> int:
        """Process one slice of the upkeep. Return the number of changes."""

    def in_use(self) -> JournalUse:
        """Keep the journal open during a call of a session. Raises 421 if it is closed: another process may have it."""
        if self._closed:
            raise held_elsewhere()
        return self._use

    async def check_writable(self) -> None:
        """Try another commit if the last one failed, so that no call starts that cannot be recorded. Raises 507,
        500."""
        if self.commits.failing is not None:
            await self.commits.run(
                lambda: self._db.execute("INSERT OR REPLACE INTO about VALUES ('tried_at', ?)", (str(self.clock()),))
            )

    async def wait_idle(self) -> None:
        """Return when no call is running."""
        while self._use.count:
            self._use.idle.clear()
            await self._use.idle.wait()

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

    def abandon(self) -> None:
        """Close the connections of a journal that cannot be served."""
        for db in (*self._readers, self._db):
            db.close()

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
            self._unread = JournalFailure.of(error)
            raise store_failure(error) from error
        self._unread = None

    @property
    def failing(self) -> JournalFailure | None:
        """Why the latest write or read failed; None if both worked."""
        return self.commits.failing or self._unread

    def _damaged(self, error: CorruptRecord) -> ApiError:
        self._note(error)
        return ApiError(500, f"the journal is damaged: {error}", code=error.code)

    def _note(self, error: CorruptRecord) -> None:
        """Note a damaged record, and log it once."""
        text = str(error)
        if text not in self.corrupt and len(self.corrupt) < _MOST_NOTED:
            self.corrupt.append(text)
            note_damage(self.folder.path, text)
            _log.error("the journal %s is damaged: %s", self.folder.path, text)
