"""One damaged or odd row stops nothing but itself: others are exported, lent, listed and swept past it."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from areal.services.http.errors import ApiError
from areal.services.inference.recorder.exporting import ExportRequest
from areal.services.inference.recorder.journal import SessionJournal
from areal.services.inference.recorder.records import pack, unpack
from areal.services.inference.recorder.session import GroupName
from areal.services.inference.recorder.storage import open_writer
from areal.services.inference.recorder.store import TrajectoryLeases, TrajectoryStore
from areal.services.journal.storage import DATABASE
from tests.services.inference.recorder.support import Calls, Clock, journal_in, start, user, vault_in


def _another_header(db: sqlite3.Connection) -> None:
    """A right checksum over a header that this version does not know."""
    row, data = db.execute("SELECT id, data FROM interactions WHERE session=1").fetchone()
    packed = unpack(data, "")
    header = {name: value for name, value in packed.header.items() if name not in ("extra", "lengths")}
    db.execute(
        "UPDATE interactions SET data=? WHERE id=?", (pack(header, packed.prompt, packed.output, packed.logprobs), row)
    )


DAMAGE: dict[str, str | Callable[[sqlite3.Connection], None]] = {
    "interaction": "UPDATE interactions SET data=substr(data, 1, length(data)-1) WHERE session=1",
    "interaction of another version": _another_header,
    "reward": "UPDATE rewards SET value=value+1 WHERE interaction=(SELECT id FROM interactions WHERE session=1)",
    "trajectory": "UPDATE trajectories SET ready_at=ready_at+1 WHERE session=1",
    "session": "UPDATE sessions SET created=created+1 WHERE number=1",
    "session's text": "UPDATE sessions SET task=CAST(x'ff8081' AS TEXT) WHERE number=1",
}


@pytest.fixture(params=list(DAMAGE))
async def vault(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[TrajectoryStore]:
    """A group of three rewarded sessions, of which the first is damaged."""
    vault = await vault_in(tmp_path, "run")
    calls = Calls()
    await vault.own.start("task", 3, None, True)
    for session in (1, 2, 3):
        await vault.own.record(session, calls.tokens([session], [7]))
        await vault.own.reward(session, 1.0)
    await vault.close()
    db = open_writer(tmp_path / "run" / DATABASE)
    damage = DAMAGE[request.param]
    if isinstance(damage, str):
        assert db.execute(damage).rowcount == 1
    else:
        damage(db)
    db.close()
    vault = await vault_in(tmp_path, "run")
    yield vault
    await vault.close()


async def test_damaged_row_is_named_and_the_others_are_lent(vault: TrajectoryStore) -> None:
    skipped: list[str] = []
    leases = TrajectoryLeases(vault, skipped.append)
    for _ in range(2):
        found = []
        while lent := await leases.lease(1, 0.0):
            found += [(each.session_id.rsplit("-", 1)[1], len(each.export.rows)) for each in lent]
        assert found == [("2", 1), ("3", 1)]
        assert await leases.wait_for_any(0.0) == 0
        leases._until.clear()  # their visibility timeout passes
    [entry] = leases.skipped.values()
    assert (entry["code"], entry["trajectory_id"], skipped) == ("record_corrupted", 0, ["record_corrupted"])


async def test_damaged_row_is_reported_and_others_are_exported(vault: TrajectoryStore) -> None:
    journal = vault.own
    members = journal.members(GroupName(journal.tag, 1, 3))
    assert [number for number, _ in members] == [1, 2, 3]
    request = ExportRequest(tuple(name for _, name in members))
    kept, export = await journal.export(request)
    assert [row["session_id"].rsplit("-", 1)[1] for row in export.rows] == ["2", "3"]
    [error] = export.errors
    assert (error["code"], error["session_id"]) == ("record_corrupted", members[0][1])
    again, same = await journal.export(request)
    assert (again, same) == (kept, export)
    assert await journal.acknowledge(kept.name)
    assert journal.corrupt


async def test_export_of_only_damaged_row_is_500(vault: TrajectoryStore) -> None:
    [(_, name), *_] = vault.own.members(GroupName(vault.own.tag, 1, 3))
    for _ in range(2):
        with pytest.raises(ApiError) as caught:
            await vault.own.export(ExportRequest((name,)))
        assert (caught.value.status, caught.value.code) == (500, "record_corrupted")


async def test_sessions_beside_damaged_row_still_work(vault: TrajectoryStore) -> None:
    journal = vault.own
    assert {2, 3} <= {session.number for session in journal.sessions(-1, 100)}
    await journal.sweep()
    journal.clock = lambda: 4e9
    await journal.sweep()
    assert {session.number for session in journal.sessions(-1, 100)} <= {0, 1}  # the others expired
    assert (await start(journal))[0] == 4


async def test_damaged_trajectory_leaves_rest_of_session(tmp_path: Path) -> None:
    journal, calls = await journal_in(tmp_path / "run"), Calls()
    session, session_id = await start(journal)
    for prompt in ([1], [2], [3]):
        await journal.record(session, calls.tokens(prompt))
        await journal.reward(session, 1.0)
    journal._db.execute("UPDATE trajectories SET ready_at=0 WHERE number=1")
    kept, export = await journal.export(ExportRequest((session_id,)))
    assert [row["trajectory_id"] for row in export.rows] == [0, 2]
    assert len(export.errors) == 1
    await journal.acknowledge(kept.name)
    assert journal.session_id(session) == session_id  # what is damaged is not deleted
    await journal.close()


async def test_reward_sum_beyond_float32_fails_its_trajectory(tmp_path: Path) -> None:
    journal, calls = await journal_in(tmp_path / "run"), Calls()
    names = []
    for values in ((3e38, 3e38), (1.0, 2.0)):
        session, name = await start(journal)
        messages = [user("a")]
        first = calls.tokens([1], [2], messages=messages)
        reply = {"role": "assistant", "content": "2 0"}
        await journal.record(session, first)
        await journal.record(session, calls.tokens([1, 2, 0, 5], [6], messages=[*messages, reply, user("b")]))
        await journal.reward(session, values[0], "chatcmpl-" + str(calls.count - 1))
        await journal.reward(session, values[1])
        names.append(name)
    _, export = await journal.export(ExportRequest(tuple(names), remove=False))
    assert [error["code"] for error in export.errors] == ["reward_overflow"]
    assert export.traj()["rewards"] == [3.0, 2.0]
    with pytest.raises(ApiError) as caught:
        await journal.export(ExportRequest((names[0],)))
    assert (caught.value.status, caught.value.code) == (422, "reward_overflow")
    _, undiscounted = await journal.export(ExportRequest((names[0],), discount=0.0))
    assert [row["session_id"] for row in undiscounted.rows] == [names[0]] * 2
    await journal.close()


async def test_finish_timeout_of_a_damaged_trajectory_wakes_no_waiter(tmp_path: Path) -> None:
    clock = Clock()
    journal, calls = await journal_in(tmp_path / "run", clock, reward_finish_timeout=5.0), Calls()
    session, _ = await start(journal)
    await journal.record(session, calls.tokens([1]))
    await journal.reward(session, 1.0)
    journal._db.execute("UPDATE trajectories SET due=due-1")
    clock.now += 10
    assert await journal.sweep() == 0
    await journal.close()


async def rewarded_sessions(journal: SessionJournal, calls: Calls, count: int) -> list[str]:
    """Names of new sessions, each with one turn and its reward."""
    names = []
    for _ in range(count):
        session, name = await start(journal)
        await journal.record(session, calls.tokens([session], [7]))
        await journal.reward(session, 1.0)
        names.append(name)
    return names


EXPORT_DAMAGE = {
    "checksum": "UPDATE exports SET crc=crc+1",
    "text": "UPDATE exports SET request='[[1,'",
    "another version": "UPDATE exports SET request='{}'",
    "no text": "UPDATE exports SET request=x'00ff'",
    "retention": "UPDATE exports SET until=0",
}


@pytest.mark.parametrize("damage", EXPORT_DAMAGE)
async def test_damaged_export_record_is_rebuilt_from_its_sessions(tmp_path: Path, damage: str) -> None:
    clock = Clock()
    journal, calls = await journal_in(tmp_path / "run", clock), Calls()
    names = await rewarded_sessions(journal, calls, 3)
    request, other = ExportRequest((names[0], names[1])), ExportRequest((names[2],))
    kept, export = await journal.export(request)
    assert journal._db.execute(EXPORT_DAMAGE[damage]).rowcount == 1
    await journal.sweep()  # it was not acknowledged
    again, same = await journal.export(request)
    assert (again.name, same) == (kept.name, export)
    _, beside = await journal.export(other)
    assert [row["session_id"] for row in beside.rows] == [names[2]]
    assert await journal.acknowledge(kept.name)
    assert not await journal.acknowledge(kept.name)
    assert journal.session_id(1) is None  # the sessions went with it
    await journal.close()


async def test_lost_export_names_its_sessions_and_blocks_no_other(tmp_path: Path) -> None:
    journal, calls = await journal_in(tmp_path / "run"), Calls()
    names = await rewarded_sessions(journal, calls, 2)
    await journal.export(ExportRequest((names[0],)))
    journal._db.execute("UPDATE exports SET crc=crc+1")
    journal._db.execute("UPDATE trajectories SET export=NULL")
    with pytest.raises(ApiError, match=names[0]) as caught:
        await journal.export(ExportRequest((names[0],)))
    assert (caught.value.status, caught.value.code) == (500, "record_corrupted")
    _, export = await journal.export(ExportRequest((names[1],)))
    assert [row["session_id"] for row in export.rows] == [names[1]]
    await journal.close()


async def test_session_missed_by_damaged_export_is_an_error(tmp_path: Path) -> None:
    journal, calls = await journal_in(tmp_path / "run"), Calls()
    names = await rewarded_sessions(journal, calls, 2)
    journal._db.execute("UPDATE interactions SET data=substr(data, 1, length(data)-1) WHERE session=1")
    request = ExportRequest(tuple(names))
    await journal.export(request)
    journal._db.execute("UPDATE exports SET crc=crc+1")
    _, export = await journal.export(request)
    assert [row["session_id"] for row in export.rows] == [names[1]]
    assert [(error["session_id"], error["code"]) for error in export.errors] == [(names[0], "record_corrupted")]
    await journal.close()
