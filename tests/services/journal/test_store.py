"""Journals that change hands."""

from __future__ import annotations

import asyncio
import errno
import os
import sqlite3
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from areal.errors import UsageFault
from areal.services.agent.data_proxy.journal import AgentJournal, open_agent_journal
from areal.services.http.errors import ApiError
from areal.services.http.tasks import background
from areal.services.journal import store
from areal.services.journal.keys import key_digest
from areal.services.journal.storage import (
    DATABASE,
    JournalFailure,
    JournalFolder,
    lock_folder,
    other_folders,
    store_failure,
)
from areal.services.journal.store import JournalStore, open_journal_store, store_details


def reported(process: JournalStore[AgentJournal]) -> list[str]:
    details = store_details(process)
    return [*details["journals"], *details["journals_elsewhere"]]


async def left_behind(root: Path) -> str:
    """The tag of a journal in the folder ``dead`` with a session, whose process has ended."""
    dead = await open_journal_store(root, "dead", open_agent_journal)
    await dead.own.start("mine", {}, None)
    await dead.close()
    return dead.own.tag


async def test_session_stays_known_while_journal_is_released(tmp_path: Path) -> None:
    process = await open_journal_store(tmp_path, "one", open_agent_journal)
    left = process.own.folder.path
    await process.own.start("mine", {}, None)
    digest = key_digest(b"mine")
    changes: list[list[str]] = []
    process.on_change = lambda: changes.append(list(process.journals))
    (tag,) = await process.hand_over()
    while (left / "lock").stat().st_size:  # until it is given up
        assert process.holder_of_digest(digest) is not None or tag in process.others()
        assert tag in reported(process), "the router answers 404 for a journal that no process reports"
        await asyncio.sleep(0)
    assert tag in reported(process)
    assert changes == [[tag, process.own.tag], [process.own.tag]], "the router hears of it at once"
    await process.close()


async def test_foreign_journal_is_reported_and_adopted_without_delay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "_IDLE_SWEEP_S", 3600.0)
    monkeypatch.setattr(store, "_SWEEP_S", 0.01)
    kept = await open_journal_store(tmp_path, "kept", open_agent_journal)
    async with background("upkeep", kept.run):
        await asyncio.sleep(0.05)  # it is idle: the next sweep is in an hour
        removed = await open_journal_store(tmp_path, "removed", open_agent_journal)
        await removed.own.start("mine", {}, None)
        assert store_details(kept)["journals_elsewhere"] == [removed.own.tag]
        adopted = asyncio.Event()
        kept.on_change = adopted.set
        await removed.close()
        await asyncio.wait_for(adopted.wait(), 10.0)
    assert kept.holder_of_key(b"mine") is not None
    await kept.close()


async def test_running_out_of_own_folders_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "_MOST_OWN_FOLDERS", 3)
    held = [await open_journal_store(tmp_path, "one", open_agent_journal) for _ in range(2)]
    with pytest.raises(UsageFault, match="hold all of one to one-2"):
        await open_journal_store(tmp_path, "one", open_agent_journal)
    for each in held:
        await each.close()


async def test_drained_process_does_not_adopt_journals(tmp_path: Path) -> None:
    drained = await open_journal_store(tmp_path, "drained", open_agent_journal)
    dead = await open_journal_store(tmp_path, "dead", open_agent_journal)
    await dead.own.start("mine", {}, None)
    await drained.hand_over()
    await dead.close()
    assert await drained.adopt() == []
    serving = await open_journal_store(tmp_path, "serving", open_agent_journal)
    assert await serving.adopt(after_s=3600.0) == [dead.own.tag], "it is known to be given up all the same"
    await serving.close()
    await drained.keep()
    assert await drained.adopt() == [dead.own.tag]
    await drained.close()


class FullDisk:
    """``os.pwrite`` of a disk that takes nothing until ``room``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.room = False
        self._pwrite = os.pwrite
        monkeypatch.setattr(os, "pwrite", self)

    def __call__(self, *args: object) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self._pwrite(*args)  # type: ignore[arg-type]


@pytest.mark.parametrize("given_up", [True, False])
def test_folder_unlockable_on_full_disk_is_locked_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given_up: bool
) -> None:
    folder = lock_folder(tmp_path / "a")
    assert folder is not None
    (folder.leave if given_up else folder.release)()
    disk = FullDisk(monkeypatch)
    with pytest.raises(OSError, match="No space left"):
        lock_folder(tmp_path / "a")
    disk.room = True
    again = lock_folder(tmp_path / "a")
    assert again is not None and again.left == given_up
    again.release()


async def test_journal_unadoptable_on_full_disk_is_adopted_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tag = await left_behind(tmp_path)
    heir = await open_journal_store(tmp_path, "heir", open_agent_journal)
    disk = FullDisk(monkeypatch)
    assert await heir.adopt() == []
    disk.room = True
    assert await heir.adopt(after_s=3600.0) == [tag], "it is known to be given up all the same"
    await heir.close()


async def test_temporarily_unopenable_journal_is_adopted_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tag = await left_behind(tmp_path)
    heir = await open_journal_store(tmp_path, "heir", open_agent_journal)
    log = tmp_path / "dead" / f"{DATABASE}-wal"
    log.mkdir()  # SQLite cannot open it, as with too many open files
    for _ in range(3):
        assert await heir.adopt() == []
        assert tag in reported(heir), "its sessions would be 404"
    assert store_details(heir)["journal_damaged"] == 0
    assert [record.levelname for record in caplog.records if "cannot be opened" in record.message] == ["ERROR"]
    log.rmdir()
    assert await heir.adopt(after_s=3600.0) == [tag]
    await heir.close()


def overwrite(database: Path) -> None:
    with database.open("r+b") as file:
        file.write(b"x" * 100)


def make_newer(database: Path) -> None:
    with closing(sqlite3.connect(database)) as db:
        db.execute("PRAGMA user_version=99")


@pytest.mark.parametrize("damage", [overwrite, make_newer])
async def test_permanently_unopenable_journal_is_reported_damaged(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    tag = await left_behind(tmp_path)
    damage(tmp_path / "dead" / DATABASE)
    heir = await open_journal_store(tmp_path, "heir", open_agent_journal)
    assert await heir.adopt() == []
    assert tag not in reported(heir)
    assert store_details(heir)["journal_damaged"] == 1
    (named,) = store_details(heir)["journal_damage"]
    assert named.startswith("dead: ") and ("not a database" in named or "has format 99" in named)
    await heir.close()


async def test_failing_read_is_reported_until_one_works(tmp_path: Path) -> None:
    process = await open_journal_store(tmp_path, "one", open_agent_journal)
    with pytest.raises(ApiError), process.own._reading():
        raise sqlite3.OperationalError("disk I/O error")
    await process.own.start("mine", {}, None)
    assert store_details(process)["journal_failing"] == "disk I/O error", "writes work, and calls fail"
    with process.own._reading():
        pass
    assert store_details(process)["journal_failing"] is None
    await process.close()


@pytest.mark.parametrize(
    ("code", "name", "status", "is_full"),
    [
        (sqlite3.SQLITE_FULL, "SQLITE_FULL", 507, True),
        (sqlite3.SQLITE_IOERR_WRITE, "SQLITE_IOERR_WRITE", 507, False),  # a quota, a limit or a broken disk
        (sqlite3.SQLITE_IOERR_FSYNC, "SQLITE_IOERR_FSYNC", 500, False),
    ],
)
def test_only_a_full_disk_is_called_full(code: int, name: str, status: int, is_full: bool) -> None:
    error = sqlite3.OperationalError("failed")
    error.sqlite_errorcode, error.sqlite_errorname = code, name
    assert JournalFailure.of(error).is_full is is_full
    refused = store_failure(error)
    assert (refused.status, "is full" in refused.message) == (status, is_full)


@pytest.mark.parametrize(("content", "is_corrupt"), [(b"no database" * 100, True), (None, False)])
async def test_failing_read_reports_whether_journal_is_corrupt(
    tmp_path: Path, content: bytes | None, is_corrupt: bool
) -> None:
    process = await open_journal_store(tmp_path, "one", open_agent_journal)
    broken = tmp_path / "broken.db"
    if content is not None:
        broken.write_bytes(content)
    with sqlite3.connect(broken) as db, pytest.raises(ApiError), process.own._reading():
        db.execute("SELECT * FROM absent")
    assert store_details(process)["journal_failing"]
    assert store_details(process)["journal_is_corrupt"] is is_corrupt
    db.close()
    await process.close()


async def test_journal_failing_to_open_leaks_no_thread_or_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    await left_behind(tmp_path)
    heir = await open_journal_store(tmp_path, "heir", open_agent_journal)
    before = threading.active_count(), len(asyncio.all_tasks())

    def refuse(file: Path) -> sqlite3.Connection:
        raise sqlite3.OperationalError("unable to open database file")

    monkeypatch.setattr("areal.services.journal.storage.open_reader", refuse)
    assert await heir.adopt() == []
    assert (threading.active_count(), len(asyncio.all_tasks())) == before
    await heir.close()


async def test_tag_is_not_rewritten_on_reopen(tmp_path: Path) -> None:
    await left_behind(tmp_path)
    shown = tmp_path / "dead" / "tag"
    before = shown.stat().st_mtime_ns
    again = await open_journal_store(tmp_path, "dead", open_agent_journal)
    assert shown.stat().st_mtime_ns == before, "on a full disk it would be empty now"
    await again.close()


async def test_folder_is_relisted_only_after_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "_TICK_NS", 0)
    one = await open_journal_store(tmp_path, "one", open_agent_journal)
    listings: list[Path] = []

    def listed(root: Path, held: set[Path]) -> list[Path]:
        listings.append(root)
        return other_folders(root, held)

    monkeypatch.setattr(store, "other_folders", listed)
    assert one.others() == one.others() == () and len(listings) <= 1
    (tmp_path / "two").mkdir()
    os.utime(tmp_path, ns=(1, 1))  # a change in a tick of its own
    assert one.others() == one.others() == () and len(listings) >= 2, "a folder that was just made has its tag later"
    two = await open_journal_store(tmp_path, "two", open_agent_journal)
    assert one.others() == one.others() == (two.own.tag,)
    listings.clear()
    assert one.others() == (two.own.tag,) and not listings
    await two.close()
    os.utime(tmp_path, ns=(2, 2))
    assert one.others() == ()
    await one.close()


@pytest.mark.parametrize(
    ("error", "hint"),
    [(OSError(errno.ENOSPC, "No space left on device"), "free some space there"), (OSError("odd"), "move the folder")],
)
async def test_journal_on_full_disk_needs_space_and_not_another_folder(
    tmp_path: Path, error: OSError, hint: str
) -> None:
    async def fail(folder: JournalFolder) -> AgentJournal:
        raise error

    with pytest.raises(UsageFault) as caught:
        await open_journal_store(tmp_path, "one", fail)
    assert hint in (caught.value.hint or "")
