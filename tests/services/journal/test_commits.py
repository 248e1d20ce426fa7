"""Group commit: who shares a transaction, and who gets the error when it fails."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from areal.services.http.errors import ApiError
from areal.services.journal.storage import CommitQueue


@pytest.fixture
def db(tmp_path: Path) -> sqlite3.Connection:
    db = sqlite3.connect(tmp_path / "db", isolation_level=None, check_same_thread=False)
    db.execute("PRAGMA journal_mode=WAL")
    db.execute("CREATE TABLE things (name TEXT UNIQUE)")
    return db


@pytest.fixture
async def commits(db: sqlite3.Connection) -> AsyncIterator[CommitQueue]:
    commits = CommitQueue(db, "test")
    yield commits
    await commits.close()


def adding(db: sqlite3.Connection, name: str) -> Callable[[], str]:
    def add() -> str:
        db.execute("INSERT INTO things VALUES (?)", (name,))
        return name

    return add


def names(db: sqlite3.Connection) -> list[str]:
    return [name for (name,) in db.execute("SELECT name FROM things ORDER BY rowid")]


async def test_waiting_changes_share_a_commit_in_order(db: sqlite3.Connection, commits: CommitQueue) -> None:
    wanted = [str(number) for number in range(100)]
    assert await asyncio.gather(*(commits.run(adding(db, name)) for name in wanted)) == wanted
    assert names(db) == wanted
    assert commits.commits < 5


async def test_refused_change_does_not_affect_others(db: sqlite3.Connection, commits: CommitQueue) -> None:
    def refuse() -> None:
        raise ApiError(409, "no")

    outcomes = await asyncio.gather(
        commits.run(adding(db, "a")), commits.run(refuse), commits.run(adding(db, "b")), return_exceptions=True
    )
    assert [type(outcome) for outcome in outcomes] == [str, ApiError, str]
    assert names(db) == ["a", "b"]


async def test_failing_store_rolls_back_batch_and_reports_each(db: sqlite3.Connection, commits: CommitQueue) -> None:
    outcomes = await asyncio.gather(
        *(commits.run(adding(db, name)) for name in ("a", "b", "a")), return_exceptions=True
    )
    assert [outcome.status for outcome in outcomes if isinstance(outcome, ApiError)] == [500] * 3
    assert names(db) == []
    assert commits.failing
    await commits.run(adding(db, "c"))
    assert names(db) == ["c"]


async def test_change_failing_half_way_is_undone(db: sqlite3.Connection, commits: CommitQueue) -> None:
    def half() -> None:
        db.execute("INSERT INTO things VALUES ('half')")
        raise ValueError("too late")

    with pytest.raises(ApiError) as caught:
        await commits.run(half)
    assert caught.value.status == 500
    assert names(db) == []


async def test_cancelled_waiting_caller_is_skipped(db: sqlite3.Connection, commits: CommitQueue) -> None:
    first = asyncio.create_task(commits.run(adding(db, "a")), name="first")
    second = asyncio.create_task(commits.run(adding(db, "b")), name="second")
    await asyncio.sleep(0)
    second.cancel()
    await first
    with pytest.raises(asyncio.CancelledError):
        await second
    assert names(db) == ["a"]


async def test_close_commits_waiting_changes_and_refuses_new_ones(db: sqlite3.Connection) -> None:
    commits = CommitQueue(db, "test")
    waiting = asyncio.create_task(commits.run(adding(db, "a")), name="waiting")
    await asyncio.sleep(0)
    await commits.close()
    assert await waiting == "a"
    with pytest.raises(ApiError) as caught:
        await commits.run(adding(db, "b"))
    assert caught.value.status == 421
