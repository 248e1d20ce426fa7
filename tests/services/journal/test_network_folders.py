"""Journals in folders of network file systems, which map no shared memory and keep open files that are deleted."""

from __future__ import annotations

import asyncio
import gc
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from areal.services.agent.data_proxy.journal import open_agent_journal
from areal.services.journal.storage import DATABASE
from areal.services.journal.store import open_journal_store

_READ = "import sqlite3, sys; sqlite3.connect(sys.argv[1], 0).execute('SELECT * FROM about').fetchall()"


def read(database: Path) -> str:
    """The error of another process that reads the journal."""
    command = [sys.executable, "-c", _READ, str(database)]
    return subprocess.run(command, capture_output=True, text=True).stderr


@pytest.fixture
def network_folder(tmp_path: Path) -> Iterator[Path]:
    """A folder that a user-space file system serves without the kernel's cache, as some network file systems do."""
    if shutil.which("bindfs") is None:
        pytest.skip("bindfs is not installed")
    served, mounted = tmp_path / "served", tmp_path / "mounted"
    served.mkdir()
    mounted.mkdir()
    made = subprocess.run(["bindfs", "-o", "direct_io", served, mounted], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"FUSE cannot be mounted here: {made.stderr.strip()}")
    yield mounted
    subprocess.run(["fusermount", "-u", "-z", mounted], check=True)


def test_fixture_folder_refuses_sqlite_shared_memory(network_folder: Path) -> None:
    with closing(sqlite3.connect(network_folder / "db")) as db, pytest.raises(sqlite3.OperationalError):
        db.execute("PRAGMA journal_mode=WAL")
        db.execute("CREATE TABLE t (x)")


async def test_journal_on_network_folder_is_adopted_then_deleted(
    network_folder: Path,
) -> None:
    first = await open_journal_store(network_folder, "first", open_agent_journal)
    await first.own.start("mine", {}, None)
    second = await open_journal_store(network_folder, "second", open_agent_journal)
    assert await second.adopt(after_s=0.0) == [], "its process has it"
    await first.close()
    assert await second.adopt(after_s=3600.0) == [first.own.tag]
    assert second.holder_of_key(b"mine") is not None
    await second.close()
    assert [path.name for path in network_folder.iterdir()] == ["first"], "the empty journal is deleted"
    assert sorted(path.name for path in (network_folder / "first").iterdir()) == [DATABASE, "lock", "tag"]


async def test_journal_is_not_mapped_and_locks_others_out(tmp_path: Path) -> None:
    kept = await open_journal_store(tmp_path, "a folder?#%20", open_agent_journal)
    await kept.own.start("mine", {}, None)
    database = kept.own.folder.database
    assert sorted(path.name for path in database.parent.iterdir()) == [DATABASE, f"{DATABASE}-wal", "lock", "tag"]
    assert "database is locked" in await asyncio.to_thread(read, database)
    await kept.close()
    assert await asyncio.to_thread(read, database) == ""


@pytest.mark.parametrize("damage", [b"no database", b""])
async def test_unopenable_journal_is_not_locked_for_others(tmp_path: Path, damage: bytes) -> None:
    kept = await open_journal_store(tmp_path, "kept", open_agent_journal)
    dead = await open_journal_store(tmp_path, "dead", open_agent_journal)
    await dead.own.start("mine", {}, None)
    await dead.close()
    database = tmp_path / "dead" / DATABASE
    content = bytearray(database.read_bytes())
    content[4096:] = b"x" * (len(content) - 4096)  # its pages but the first
    database.write_bytes(damage or content)
    gc.disable()
    try:
        assert await kept.adopt() == []
        assert "database is locked" not in (error := await asyncio.to_thread(read, database)), error
        assert error
    finally:
        gc.enable()
    await kept.close()
