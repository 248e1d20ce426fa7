"""Journals that change hands, and trajectories that are lent."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

import pytest

from areal.errors import UsageFault
from areal.services.inference.recorder.exporting import ExportRequest
from areal.services.inference.recorder.session import LeaseName
from areal.services.inference.recorder.store import TrajectoryLeases, TrajectoryStore
from areal.services.journal.storage import lock_folder
from areal.wire.notes import EVENTS_VARIABLE, OWNER_VARIABLE
from tests.services.inference.recorder.support import Calls, start, vault_in
from tests.services.processes import REPOSITORY, wait_until


async def rewarded(vault: TrajectoryStore, calls: Calls, online: bool = True) -> tuple[int, str]:
    session, session_id = await start(vault.own, online=online)
    await vault.own.record(session, calls.tokens([1, 2]))
    await vault.own.reward(session, 1.0)
    return session, session_id


async def test_folder_has_one_holder_until_release(tmp_path: Path) -> None:
    folder = lock_folder(tmp_path / "a")
    assert folder is not None
    assert lock_folder(tmp_path / "a") is None
    folder.release()
    again = lock_folder(tmp_path / "a")
    assert again is not None
    again.remove()
    assert not (tmp_path / "a").exists()


async def test_restart_under_the_same_uid_serves_the_same_sessions(tmp_path: Path) -> None:
    vault = await vault_in(tmp_path)
    await start(vault.own, key="k")
    tag = vault.own.tag
    await vault.close()
    vault = await vault_in(tmp_path)
    assert vault.own.tag == tag
    assert vault.holder_of_key(b"k") == (vault.own, 1)
    await vault.close()


async def test_journal_of_a_dead_process_is_adopted_served_and_retired(tmp_path: Path) -> None:
    calls = Calls()
    dead = await vault_in(tmp_path, "dead")
    session, _ = await start(dead.own, key="k")
    await dead.own.record(session, calls.tokens([1]))
    tag = dead.own.tag
    heir = await vault_in(tmp_path, "heir")
    assert await heir.adopt() == []  # its process lives
    await dead.close()
    assert await heir.adopt() == [tag]
    held = heir.holder_of_key(b"k")
    assert held is not None
    journal, number = held
    await journal.record(number, calls.tokens([2]))
    await journal.reward(number, 1.0)
    assert await TrajectoryLeases(heir).acknowledge([LeaseName(tag, number, 0)]) == 1
    running = asyncio.create_task(heir.run(), name="vault")
    journal.clock = lambda: 1e12  # the empty session expires, and with it the journal
    await asyncio.to_thread(wait_until, lambda: not (tmp_path / "dead").exists())
    assert heir.journals.get(tag) is None
    running.cancel()
    await heir.close()


async def test_adopted_own_folder_is_left_to_sibling(tmp_path: Path) -> None:
    dead = await vault_in(tmp_path, "a")
    await start(dead.own)
    await dead.close()
    sibling = await vault_in(tmp_path, "b")
    await sibling.adopt()
    back = await vault_in(tmp_path, "a")
    assert back.own.folder.path.name == "a-2"
    assert back.own.tag not in sibling.journals
    await back.close()
    await sibling.close()


async def test_released_journal_is_adopted_before_a_killed_one(tmp_path: Path) -> None:
    left, heir = await vault_in(tmp_path, "left"), await vault_in(tmp_path, "heir")
    await start(left.own)
    await left.close()
    assert await heir.adopt(after_s=3600.0) == [left.own.tag]
    killed = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.services.inference.recorder.recorder", str(tmp_path / "killed")),
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )
    assert killed.stdout is not None
    await killed.stdout.readline()
    killed.kill()
    await killed.communicate()
    assert await heir.adopt(after_s=3600.0) == []
    assert len(heir.elsewhere) == 1
    assert len(await heir.adopt()) == 1
    await heir.close()


async def test_empty_vault_leaves_no_files(tmp_path: Path) -> None:
    vault = await vault_in(tmp_path)
    await vault.close()
    assert list(tmp_path.iterdir()) == []


async def test_unreadable_journal_is_reported_and_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events = tmp_path.with_name("events.jsonl")
    monkeypatch.setenv(EVENTS_VARIABLE, str(events))
    monkeypatch.setenv(OWNER_VARIABLE, "Model/m")
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "journal.db").write_bytes(b"no database at all" * 100)
    vault = await vault_in(tmp_path)
    assert await vault.adopt() == []
    assert list(vault.unreadable) == [tmp_path / "bad"]
    assert [json.loads(line)["reason"] for line in events.read_text().splitlines()] == ["JournalDamaged"]
    await vault.close()
    with pytest.raises(UsageFault, match="bad"):
        await vault_in(tmp_path, "bad")


async def test_online_trajectories_repeat_until_acknowledged(tmp_path: Path) -> None:
    vault, calls = await vault_in(tmp_path, visibility_timeout=0.05), Calls()
    _, session_id = await rewarded(vault, calls)
    await rewarded(vault, calls, online=False)
    leases = TrajectoryLeases(vault)
    [lent] = await leases.lease(10, 0.0)
    assert (lent.session_id, lent.trajectory, len(lent.export.rows)) == (session_id, 0, 1)
    assert await leases.lease(10, 0.0) == []
    assert await leases.lease(10, 5.0) == [lent]  # it was not acknowledged in time
    assert await leases.acknowledge([lent.lease]) == 1
    assert await leases.acknowledge([lent.lease]) == 0
    assert await leases.lease(10, 0.1) == []
    await vault.close()


async def test_returned_lease_is_lent_again_at_once(tmp_path: Path) -> None:
    vault, calls = await vault_in(tmp_path), Calls()
    await rewarded(vault, calls)
    leases = TrajectoryLeases(vault)
    [lent] = await leases.lease(1, 0.0)
    assert await leases.wait_for_any(0.0) == 0
    leases.give_back([lent.lease])
    assert await leases.wait_for_any(0.0) == 1
    assert await leases.lease(1, 0.0) == [lent]
    await vault.close()


async def test_reward_and_finish_timeout_wake_waiting_lender(tmp_path: Path) -> None:
    for timeout in (0.0, 0.05):
        vault, calls = await vault_in(tmp_path / str(timeout), reward_finish_timeout=timeout), Calls()
        waiting = asyncio.create_task(TrajectoryLeases(vault).lease(1, 60.0), name="lend")
        await asyncio.sleep(0)
        await rewarded(vault, calls)
        async with asyncio.timeout(20):
            assert len(await waiting) == 1
        await vault.close()


async def test_exported_trajectory_is_not_lent(tmp_path: Path) -> None:
    vault, calls = await vault_in(tmp_path), Calls()
    session, session_id = await rewarded(vault, calls)
    [lent] = await TrajectoryLeases(vault).lease(1, 0.0)
    await vault.own.export(ExportRequest((session_id,)))
    assert await TrajectoryLeases(vault).lease(1, 0.0) == []
    assert await TrajectoryLeases(vault).acknowledge([lent.lease]) == 0
    assert vault.own.trajectories(session)
    await vault.close()
