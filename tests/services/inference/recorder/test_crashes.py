"""What a crash leaves at every point of a history: all that was acknowledged, nothing half done."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from areal.services.http.errors import ApiError
from areal.services.inference.recorder.exporting import ExportRequest
from areal.services.inference.recorder.journal import SessionJournal
from areal.services.inference.recorder.storage import open_writer
from areal.services.journal.storage import DATABASE
from tests.services.inference.recorder.support import Calls, Clock, journal_in, start, state_of

WAL = f"{DATABASE}-wal"
Step = Callable[[SessionJournal], Awaitable[Any]]


def history(calls: Calls) -> list[Step]:
    """A bit of everything."""
    names: list[str] = []

    async def started(journal: SessionJournal) -> None:
        names.append((await start(journal))[1])

    async def acknowledged(journal: SessionJournal) -> None:
        kept, _ = await journal.export(ExportRequest((names[0],)))
        await journal.acknowledge(kept.name)

    return [
        started,
        lambda journal: journal.record(1, calls.tokens([1, 2], [3], n=2)),
        lambda journal: journal.record(1, calls.tokens([1, 2, 3, 0, 4], list(range(3000)))),
        lambda journal: journal.reward(1, 0.25, "chatcmpl-1"),
        started,
        lambda journal: journal.reward(1, 1.0),
        lambda journal: journal.record(1, calls.tokens([5])),
        lambda journal: journal.note_failure(2, "engine_failed"),
        lambda journal: journal.end(1),
        lambda journal: journal.export(ExportRequest((names[0],))),
        acknowledged,
        lambda journal: journal.record(2, calls.tokens([6])),
    ]


async def test_kill_loses_only_torn_last_change(tmp_path: Path) -> None:
    live, dice = tmp_path / "live", random.Random(1)
    journal = await journal_in(live, Clock())
    before, size_before = await state_of(journal), 0
    for number, step in enumerate(history(Calls())):
        await step(journal)
        after, size_after = await state_of(journal), (live / WAL).stat().st_size
        cuts = [size_after, size_before, *(dice.randrange(size_before, size_after) for _ in range(4)), size_after - 1]
        for place, cut in enumerate(cuts):
            found = await reopened(live, tmp_path / f"{number}-{place}", cut)
            assert found == (after if cut == size_after else before), f"step {number} cut at {cut} of {size_after}"
        before, size_before = after, size_after
    await journal.close()


async def reopened(live: Path, copy: Path, cut: int) -> list[Any]:
    """The state that a new process finds when only ``cut`` bytes of the log reached the disk."""
    shutil.copytree(live, copy)
    os.truncate(copy / WAL, cut)
    journal = await journal_in(copy, Clock())
    try:
        return await state_of(journal)
    finally:
        await journal.close()
        shutil.rmtree(copy)


def killed_recorder(path: Path, lines: int) -> list[list[str]]:
    """What a recording process reported before it was killed, which was after ``lines`` acknowledgements."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[4])}
    argv = [sys.executable, "-m", "tests.services.inference.recorder.recorder", str(path)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        output = [process.stdout.readline() for _ in range(lines)]
        process.kill()
        return [line.split() for line in (*output, *process.stdout)]


@pytest.mark.parametrize("lines", [7, 60])
async def test_kill_9_loses_no_acknowledged_turn(tmp_path: Path, lines: int) -> None:
    acknowledged = killed_recorder(tmp_path, lines)
    journal = await journal_in(tmp_path)
    turns = {}
    for session in journal.sessions(-1, 100):
        for trajectory in journal.trajectories(session.number):
            for turn in (await journal.turns(session, trajectory)).turns:
                assert turn.interaction_id not in turns
                turns[turn.interaction_id] = turn
    for kind, _, interaction_id in acknowledged:
        assert interaction_id in turns
        assert kind == "turn" or turns[interaction_id].reward == 0.5
    await journal.close()


async def test_damaged_record_is_reported_and_the_others_are_served(tmp_path: Path) -> None:
    journal = await journal_in(tmp_path / "run")
    calls = Calls()
    names = [(await start(journal))[1] for _ in range(3)]
    for session in (1, 2, 3):
        await journal.record(session, calls.tokens([session], [7]))
        await journal.reward(session, 1.0)
    await journal.close()
    db = open_writer(tmp_path / "run" / DATABASE)
    (data,) = db.execute("SELECT data FROM interactions WHERE session=1").fetchone()
    db.execute("UPDATE interactions SET data=? WHERE session=1", (data[:-1] + bytes([data[-1] ^ 1]),))
    db.execute("UPDATE rewards SET value=2.0 WHERE interaction=(SELECT id FROM interactions WHERE session=2)")
    db.close()
    journal = await journal_in(tmp_path / "run")
    for name in names[:2]:
        with pytest.raises(ApiError) as caught:
            await journal.export(ExportRequest((name,)))
        assert (caught.value.status, caught.value.code) == (500, "record_corrupted")
    assert "chatcmpl-1" in journal.corrupt[0]
    _, export = await journal.export(ExportRequest((names[2],)))
    assert len(export.rows) == 1
    await journal.close()


async def test_full_disk_fails_the_call_and_records_nothing_of_it(tmp_path: Path) -> None:
    journal = await journal_in(tmp_path / "run")
    calls = Calls()
    session, _ = await start(journal)
    await journal.record(session, calls.tokens([1]))
    before = await state_of(journal)
    (pages,) = journal._db.execute("PRAGMA page_count").fetchone()
    journal._db.execute(f"PRAGMA max_page_count={pages}")  # SQLite takes it for a full disk
    with pytest.raises(ApiError) as caught:
        await journal.record(session, calls.tokens([2], list(range(50_000)), n=2))
    assert (caught.value.status, caught.value.code) == (507, "storage_full")
    assert journal.commits.failing
    assert await state_of(journal) == before
    journal._db.execute("PRAGMA max_page_count=1000000")
    await journal.record(session, calls.tokens([3]))
    assert journal.commits.failing is None
    await journal.close()
