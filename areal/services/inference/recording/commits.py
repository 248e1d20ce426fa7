"""Group commit: many changes share one transaction, and each is acknowledged when that is on disk.

While one transaction is being committed, in a thread, the changes that arrive wait; then they all go into the next.
So under load one fsync serves as many interactions as came during the last one, and alone a change waits for nobody.

A change decides before it writes: one that raises has written nothing, and the others of its batch go on. When the
store itself fails (a full disk), the whole batch is rolled back and each of its callers is told.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Thread
from typing import Any, TypeVar

from areal.services.web.errors import ApiError

_T = TypeVar("_T")
_log = logging.getLogger(__name__)
_AT_A_TIME = 16  # changes between two looks at the event loop
_MOST = 1024


@dataclass
class _Change:
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


class GroupCommit:
    """Runs changes on ``db``, whose only writer this is. ``failing``: why the last commit failed, or None.
    ``settled`` hears of each batch whether it was committed, before its callers do."""

    def __init__(
        self, db: sqlite3.Connection, name: str, settled: Callable[[bool], None] = lambda committed: None
    ) -> None:
        self._db = db
        self._settled = settled
        self._waiting: deque[_Change] = deque()
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
            raise elsewhere()
        change = _Change(apply, asyncio.get_running_loop().create_future())
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
        batch: list[_Change] = []
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

    async def _apply(self, batch: list[_Change]) -> None:
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

    def _fail(self, batch: list[_Change], error: sqlite3.Error) -> None:
        with contextlib.suppress(sqlite3.Error):
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
        self._settled(False)
        self.failing = str(error)
        _log.error("the journal could not be written, %d changes were refused: %s", len(batch), error)
        if not batch:  # not even begun: whoever waits now is told, or this would turn for ever
            batch = list(self._waiting)
            self._waiting.clear()
        for change in batch:
            if not change.done.done():
                change.done.set_exception(store_failure(error))


def elsewhere() -> ApiError:
    message = "this session is not recorded here; whoever routes by the newest table finds it"
    return ApiError(421, message, code="session_elsewhere")


def store_failure(error: sqlite3.Error) -> ApiError:
    if getattr(error, "sqlite_errorname", "") in ("SQLITE_FULL", "SQLITE_IOERR_WRITE"):
        return ApiError(507, f"the journal's disk takes no more: {error}", code="storage_full")
    return ApiError(500, f"the journal could not be written: {error}", code="storage_failed")
