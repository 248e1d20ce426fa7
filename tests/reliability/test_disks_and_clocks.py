"""Disks that are full, read-only or damaged, and clocks that jump: what was acknowledged stays, what cannot be kept is
reported."""

from __future__ import annotations

import contextlib
import os
import resource
import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.reliability.asking import Line, Reply
from tests.reliability.faults import Outcome, fault, slow_fault
from tests.reliability.fleet import MODEL, Fleet, running_fleet
from tests.reliability.scenes import NOTHING_MORE, RETRY, SERVED, Scene, failure, instruct, scene_at, status_of
from tests.services.inference.recorder.rollouts import CHAT
from tests.services.inference.running_service import later
from tests.services.processes import Answer, Process, Processes, wait_until

FULL = "Full disks"
DAMAGE = "Damaged journals (a data proxy is killed and restarts)"
CLOCK = "Clock jumps"


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory, tokenizer: Path) -> Iterator[Fleet]:
    with running_fleet(tmp_path_factory.mktemp("disks"), tokenizer) as fleet:
        yield fleet


@pytest.fixture
def own(tmp_path: Path, tokenizer: Path) -> Iterator[Fleet]:
    """For what would spoil a shared one."""
    with running_fleet(tmp_path, tokenizer) as fleet:
        yield fleet


# -- full


@contextlib.contextmanager
def full_disk(process: Process) -> Iterator[None]:
    """No file of this process grows: the kernel refuses the write, as it does on a full disk."""
    before = resource.prlimit(process.popen.pid, resource.RLIMIT_FSIZE, (4096, -1))
    try:
        yield
    finally:
        resource.prlimit(process.popen.pid, resource.RLIMIT_FSIZE, before)


def _start(scene: Scene) -> Answer:
    started: Answer = scene.fleet.admin("POST", "/rl/start_session", {"task_id": "t"})
    return started


def _call(scene: Scene) -> Answer:
    return scene.rollout.post(CHAT, scene.body())


def _reward(scene: Scene) -> Answer:
    return scene.rollout.post("/rl/set_reward", {"reward": 1.0})


def _end(scene: Scene) -> Answer:
    return scene.rollout.post("/rl/end_session", {})


def _export(scene: Scene) -> Answer:
    exported: Answer = scene.fleet.admin("POST", "/export_trajectories", {"session_ids": [scene.rollout.session_id]})
    return exported


OPERATIONS: dict[str, Callable[[Scene], Answer]] = {
    "at the start of a session": _start,
    "at a call": _call,
    "at a reward": _reward,
    "at the end of a session": _end,
    "at an export": _export,
}


@pytest.mark.parametrize("when", [pytest.param(when, marks=fault(FULL, "disk full", when)) for when in OPERATIONS])
def test_full_disk_refuses_writes_until_space_is_free(fleet: Fleet, outcome: Outcome, when: str) -> None:
    scene, operation, proxy = scene_at(fleet, turns=2), OPERATIONS[when], fleet.proxies[0].process
    if operation is _export:
        assert _reward(scene).status == 200
    with full_disk(proxy):
        outcome.callers(status_of(operation(scene)))
        wait_until(lambda: proxy.call("GET", "/ready").json()["journal_failing"], what="it says so")
        outcome.callers("`/ready` says why")
        outcome.recorded(scene.kept())
    answer = operation(scene)
    assert answer.status < 300, answer.body
    wait_until(lambda: not proxy.call("GET", "/ready").json()["journal_failing"], what="it is well again")
    if operation is _call:
        scene.acknowledged = scene.recorded()
        assert len(scene.acknowledged) == 3
    if operation is not _export:
        assert scene.exported()
    outcome.healed("succeeds when there is space")


@fault(FULL, "disk full", "in a stream")
def test_disk_filling_mid_stream_ends_it_with_error(fleet: Fleet, outcome: Outcome) -> None:
    scene, engine = scene_at(fleet), fleet.engines[0]
    instruct(engine, hold_after=2)
    line, body = Line(fleet.front), scene.body(stream=True)
    running = later(line.ask, scene.rollout.key, CHAT, body, {"Idempotency-Key": "k"})
    assert line.begun.wait(20)
    with full_disk(fleet.proxies[0].process):
        assert engine.call("POST", "/release").status == 200
        outcome.callers(failure(running.result(60)))
        outcome.recorded(scene.kept())
    scene.until_answered(body, **{"Idempotency-Key": "k"}, **RETRY)
    assert scene.exported()
    outcome.healed("a retry is answered when there is space")


@fault(FULL, "file system that refuses a folder", "at the start of a data proxy")
def test_uncreatable_state_folder_is_reported_at_start(processes: Processes, tokenizer: Path, outcome: Outcome) -> None:
    flags = ("--model", MODEL, "--engine", "embedded", "--engine-url", "http://127.0.0.1:9", "--port", "0")
    argv = ("-m", "areal.services.inference.data_proxy", *flags, "--tokenizer-path", str(tokenizer))
    process = processes.spawn(*argv, "--state-dir", "/proc/areal-state")
    assert process.wait() == 2
    outcome.callers(process.wait_log("error: cannot make the state folder /proc/areal-state")[0])
    outcome.recorded("nothing")
    outcome.healed("does not start")


# -- damaged


@dataclass(frozen=True)
class Files:
    folder: Path

    @property
    def database(self) -> Path:
        return self.folder / "journal.db"

    @property
    def log(self) -> Path:
        return self.folder / "journal.db-wal"


def _garbage_after_the_tail(files: Files) -> None:
    with files.log.open("ab") as log:
        log.write(b"half-written record" * 100)


def _cut_tail(files: Files) -> None:
    os.truncate(files.log, files.log.stat().st_size - 100)


def _spoilt_tail(files: Files) -> None:
    with files.log.open("r+b") as log:
        log.seek(-2000, os.SEEK_END)
        log.write(bytes(byte ^ 0xFF for byte in log.read(1)) or b"x")


def _spoilt_payload(files: Files) -> None:
    """A bit of the first recorded turn."""
    with contextlib.closing(sqlite3.connect(files.database)) as db:
        ((number, data),) = db.execute("SELECT id, data FROM interactions ORDER BY id LIMIT 1").fetchall()
        db.execute("UPDATE interactions SET data=? WHERE id=?", (data[:-1] + bytes([data[-1] ^ 1]), number))
        db.commit()


def _cut_payload(files: Files) -> None:
    with contextlib.closing(sqlite3.connect(files.database)) as db:
        db.execute(
            "UPDATE interactions SET data=substr(data, 1, length(data)/2) WHERE id=(SELECT min(id) FROM interactions)"
        )
        db.commit()


def _no_database(files: Files) -> None:
    for file in (files.database, files.log):
        file.write_bytes(b"this is no database, and never was one. " * 100)


def _half_database(files: Files) -> None:
    with contextlib.closing(sqlite3.connect(files.database)) as db:
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    os.truncate(files.database, files.database.stat().st_size // 2)


def _back(fleet: Fleet, damage: Callable[[Files], None]) -> None:
    proxy = fleet.proxies[0]
    proxy.kill()
    damage(Files(fleet.folder / "state" / "run-0"))
    proxy.restart()


@pytest.mark.parametrize(
    ("damage", "lost"),
    [
        pytest.param(_garbage_after_the_tail, 0, marks=fault(DAMAGE, "half-written record", "after the last record")),
        pytest.param(
            _cut_tail, 1, marks=slow_fault(DAMAGE, "last record truncated", "after the disk had acknowledged it")
        ),
        pytest.param(
            _spoilt_tail, 1, marks=fault(DAMAGE, "last record corrupted", "after the disk had acknowledged it")
        ),
    ],
)
def test_damaged_tail_costs_at_most_the_last_record(
    own: Fleet, outcome: Outcome, damage: Callable[[Files], None], lost: int
) -> None:
    scene = scene_at(own, turns=3)
    _back(own, damage)
    scene.rollout.front = own.front
    scene.acknowledged = scene.acknowledged[: 3 - lost]
    assert scene.kept() == NOTHING_MORE
    outcome.recorded("everything" if not lost else "everything except the last record")
    outcome.callers(failure(scene.ask()))
    assert scene.exported()
    outcome.healed(SERVED)


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(_spoilt_payload, marks=fault(DAMAGE, "one bit of a payload flipped", "in an earlier record")),
        pytest.param(_cut_payload, marks=slow_fault(DAMAGE, "payload truncated", "in an earlier record")),
    ],
)
def test_damaged_payload_is_reported_and_never_exported(
    own: Fleet, outcome: Outcome, damage: Callable[[Files], None]
) -> None:
    spoilt, good = scene_at(own, turns=2), scene_at(own, turns=2)
    _back(own, damage)
    for scene in (spoilt, good):
        scene.rollout.front = own.front
    assert _reward(spoilt).status == 200
    outcome.callers(f"its export is {status_of(_export(spoilt))}")
    assert good.exported()
    outcome.recorded("everything of the other sessions")
    assert own.front.call("GET", "/ready").json()["journal_damaged"] == 1
    outcome.healed("`/ready` counts it; everything else is served")


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(_no_database, marks=fault(DAMAGE, "not a database", "the whole file")),
        pytest.param(_half_database, marks=slow_fault(DAMAGE, "database truncated to half", "the whole file")),
    ],
)
def test_unreadable_journal_is_not_overwritten(own: Fleet, outcome: Outcome, damage: Callable[[Files], None]) -> None:
    scene_at(own, turns=30)
    proxy = own.proxies[0]
    proxy.kill()
    files = Files(own.folder / "state" / "run-0")
    damage(files)
    before = files.database.read_bytes()
    again = own.processes.spawn(*proxy.process.popen.args[1:], env={"AREAL_RUN_UID": "run-0"})  # type: ignore[index]
    assert again.wait() == 2
    assert again.wait_log("error: cannot open the journal") and again.wait_log("hint: move the folder away")
    outcome.callers("the data proxy does not start; the error has the cause and the next step")
    assert files.database.read_bytes() == before
    outcome.recorded("the file is unchanged")
    files.folder.rename(files.folder.with_name("set-aside"))
    proxy.restart()
    assert isinstance(scene_at(own).ask(), Reply)
    outcome.healed("served after the folder is moved")


# -- clocks


@pytest.fixture
def clock(tmp_path: Path, processes: Processes, tokenizer: Path) -> Iterator[tuple[Fleet, Callable[[float], None]]]:
    """A data proxy whose wall clock the test moves."""
    offset = tmp_path / "offset"
    offset.write_text("0")
    with running_fleet(tmp_path, tokenizer, warped_by=offset) as fleet:

        def jump(seconds: float) -> None:
            new = offset.with_name("new-offset")
            new.write_text(str(seconds))
            new.replace(offset)

        yield fleet, jump


@pytest.mark.parametrize(
    ("seconds", "what"),
    [
        pytest.param(-86_400, "back by a day", marks=fault(CLOCK, "back by a day", "in a session")),
        pytest.param(600, "forward by ten minutes", marks=slow_fault(CLOCK, "forward by ten minutes", "in a session")),
    ],
)
def test_clock_jump_during_session_loses_nothing(
    clock: tuple[Fleet, Callable[[float], None]], outcome: Outcome, seconds: float, what: str
) -> None:
    fleet, jump = clock
    scene = scene_at(fleet, turns=2)
    sealed = scene_at(fleet)
    assert _reward(sealed).status == 200
    jump(seconds)
    outcome.callers(failure(scene.ask()))
    assert scene.kept() == sealed.kept() == NOTHING_MORE
    outcome.recorded("everything")
    assert scene.exported() and sealed.exported()
    outcome.healed("exported; a repeated export is the same")


@fault(CLOCK, "forward by two days", "while sessions are idle")
def test_clock_jump_beyond_deadlines_ends_idle_sessions(
    clock: tuple[Fleet, Callable[[float], None]], outcome: Outcome
) -> None:
    fleet, jump = clock
    scene = scene_at(fleet)

    def gone() -> bool:
        return bool(fleet.admin("GET", f"/rl/sessions/{scene.rollout.session_id}").status == 404)

    jump(2 * 86_400)
    wait_until(gone, what="expired")
    outcome.callers(status_of(scene.rollout.post(CHAT, scene.body())))
    outcome.recorded("expired sessions are dropped without a reward")
    assert scene_at(fleet).exported()
    outcome.healed("new sessions are served")
