"""A journal on disk: its folder and lock, its SQLite file, group commit, and its disposal.

Why SQLite and no log of our own: a session changes state, is looked up by key, by interaction and by conversation,
and is removed. All of that needs an index that survives a crash, on disk, so that idle sessions cost no memory.
Write-ahead mode with ``synchronous=FULL`` gives exactly what is promised: a transaction is on disk when its commit
returns, a torn tail is cut off at the next open, a full disk fails the transaction and leaves nothing of it. What it
costs an interaction, ``benchmarks/recording.py`` measures: between 100 and 200 us of CPU, of which the statements
themselves are less than half. SQLite checks its log but not its tables, so every row carries its own CRC.

``interactions.id`` is session * 2^32 + sequence number: one session's rows lie together and in order, and a trajectory
is a range of them. ``rewards.value`` has no type: a REAL column stores -0.0 as the integer 0.

``python -m areal.services.inference.recorder.storage FOLDER`` deletes the journals of a deleted model (``dispose``) and
prints what it left, as JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import fcntl
import json
import logging
import os
import shutil
import sqlite3
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any, TypeVar

from areal.services.http.errors import ApiError
from areal.services.inference.recorder.session import is_tag

SEQUENCES = 2**32
_FORMAT = 1
_PAGES_A_CHECKPOINT = 1000  # a log that is written over again costs half of one that grows
_WRITER_CACHE_KB = 4096
_READER_CACHE_KB = 1024
_BUSY_S = 10.0
_text = partial(str, encoding="utf-8", errors="replace")  # damaged text is read, and fails its row's checksum

_TABLES = """
CREATE TABLE about (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE sessions (
    number INTEGER PRIMARY KEY, task TEXT NOT NULL, grp TEXT NOT NULL, key BLOB UNIQUE, created REAL NOT NULL,
    life INTEGER NOT NULL, online INTEGER NOT NULL, standing INTEGER NOT NULL, next_trajectory INTEGER NOT NULL,
    crc INTEGER NOT NULL);
CREATE INDEX sessions_live ON sessions (number) WHERE life = 0;
CREATE TABLE trajectories (
    session INTEGER NOT NULL, number INTEGER NOT NULL, first INTEGER NOT NULL, phase INTEGER NOT NULL, due REAL,
    sealed INTEGER NOT NULL, ready_at REAL, export INTEGER, crc INTEGER NOT NULL,
    PRIMARY KEY (session, number)) WITHOUT ROWID;
CREATE INDEX trajectories_by_phase ON trajectories (phase, ready_at) WHERE phase IN (1, 2);
CREATE INDEX trajectories_by_export ON trajectories (export) WHERE export IS NOT NULL;
CREATE TABLE interactions (
    id INTEGER PRIMARY KEY, session INTEGER NOT NULL, name TEXT NOT NULL, total INTEGER NOT NULL, tokens BLOB,
    after BLOB, call BLOB NOT NULL, idempotency BLOB, at REAL NOT NULL, data BLOB NOT NULL);
CREATE INDEX interactions_after ON interactions (session, after) WHERE after IS NOT NULL;
CREATE INDEX interactions_idempotency ON interactions (session, idempotency) WHERE idempotency IS NOT NULL;
CREATE TABLE rewards (
    interaction INTEGER PRIMARY KEY, value NOT NULL, at REAL NOT NULL, crc INTEGER NOT NULL);
CREATE TABLE failures (
    session INTEGER NOT NULL, trajectory INTEGER NOT NULL, code TEXT NOT NULL, count INTEGER NOT NULL,
    PRIMARY KEY (session, trajectory, code)) WITHOUT ROWID;
CREATE TABLE exports (
    number INTEGER PRIMARY KEY, nonce TEXT NOT NULL, digest BLOB NOT NULL UNIQUE, request TEXT NOT NULL,
    until REAL NOT NULL, crc INTEGER NOT NULL);
"""


def open_writer(file: Path) -> sqlite3.Connection:
    """The one connection that writes, the tables made if need be. Raises sqlite3.Error."""
    db = _connect(file, _WRITER_CACHE_KB)
    (version,) = db.execute("PRAGMA user_version").fetchone()
    if version == 0:
        db.execute("PRAGMA auto_vacuum=INCREMENTAL")
    db.execute("PRAGMA journal_mode=WAL")
    db.execute("PRAGMA synchronous=FULL")
    db.execute(f"PRAGMA wal_autocheckpoint={_PAGES_A_CHECKPOINT}")
    if version == 0:
        db.executescript(f"BEGIN; {_TABLES} PRAGMA user_version={_FORMAT}; COMMIT")
    elif version != _FORMAT:
        raise sqlite3.DatabaseError(f"{file} has format {version}; this version reads format {_FORMAT}")
    return db


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
REGISTRATIONS = ".models.json"  # beside the folders: what was registered at the run of this uid
PUBLISHED = "published.json"  # beside the folders: the weights that the model's workers are to serve
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
    """As ``lock_folder``, but somebody who only looks whether the lock is free is waited for."""
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


# -- disposal

_LOOKED_AT_S = 1.0
_FINISHED = "SELECT count(*) FROM trajectories WHERE phase IN (1, 2)"


@dataclass(frozen=True)
class DisposalReport:
    """``finished``: trajectories that were never fetched. ``unreadable`` and ``served``: journals that cannot be
    read, and those that a process serves."""

    finished: int = 0
    unreadable: tuple[str, ...] = ()
    served: tuple[str, ...] = ()

    @property
    def anything(self) -> bool:
        return bool(self.finished or self.unreadable or self.served)


def dispose(root: Path) -> DisposalReport:
    """Delete every journal under ``root`` from which nothing would be lost, and ``root`` itself if that is all. What
    was registered at its data proxies goes always (there may be keys in it), and what a trainer published for it."""
    for beside in (*root.glob(f"*{REGISTRATIONS}"), root / PUBLISHED):
        beside.unlink(missing_ok=True)
    finished, unreadable, served = 0, [], []
    for path in other_folders(root, set()):
        folder = wait_for_lock(path, _LOOKED_AT_S)
        if folder is None:
            served.append(path.name)
            continue
        try:
            with contextlib.closing(open_writer(folder.database)) as db:
                (count,) = db.execute(_FINISHED).fetchone()
        except sqlite3.Error:
            unreadable.append(path.name)
            folder.release()
            continue
        finished += count
        if count:
            folder.leave()
        else:
            folder.remove()
    remains = DisposalReport(finished, tuple(unreadable), tuple(served))
    if not remains.anything:
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(root)
    return remains


def main() -> None:
    parser = argparse.ArgumentParser(prog="areal-recording-disposal")
    parser.add_argument("folder", type=Path, help="a model's --state-dir")
    print(json.dumps(asdict(dispose(parser.parse_args().folder))))


if __name__ == "__main__":
    main()
