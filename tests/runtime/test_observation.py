"""Observing is cheap, has no effects, and says unknown rather than guess."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from areal.errors import Conflict
from areal.runtime import observation, records
from areal.runtime.backends.base import Phase
from areal.runtime.backends.local import LocalBackend
from areal.runtime.identity import Liveness, ProcessIdentity
from areal.runtime.observation import repair_run
from areal.runtime.runs import spec_to_record

from .conftest import Spawn
from .support import alive, run_spec


def edit(local: LocalBackend, name: str, **changes: object) -> None:
    path = Path(local.store.folder("r1")) / name
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def snapshot(root: str) -> dict[str, tuple[int, bytes]]:
    files = (path for path in Path(root).rglob("*") if path.is_file())
    return {str(path): (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


def test_observe_writes_nothing(local: LocalBackend) -> None:
    local.start(run_spec())
    before = snapshot(local.store.root)

    local.observe()

    assert snapshot(local.store.root) == before


DAMAGED = ["", "{", "[]", "{}", "\x00\x00", '{"pid": "x"}', "[" * 100_000]


@pytest.mark.parametrize("text", [*DAMAGED, None])
def test_run_with_damaged_intent_keeps_its_owner(local: LocalBackend, text: str | None) -> None:
    local.start(run_spec())
    whole = local.observe()["r1"]
    folder = Path(local.store.folder("r1"))

    def damage(name: str) -> None:
        (folder / name).write_text(text) if text is not None else (folder / name).unlink()

    damage(records.INTENT)
    assert local.observe()["r1"] == whole
    damage(records.INTENT_COPY)
    assert local.observe()["r1"].phase is Phase.UNKNOWN
    (folder / records.INTENT_COPY).write_text(json.dumps({**spec_to_record(whole.spec), "stop_grace_s": 5.0}))
    assert local.stop("r1").was_alive


@pytest.mark.parametrize("name", [records.ID, records.CONFIG])
@pytest.mark.parametrize("text", [*DAMAGED, None, "a folder"])
def test_repairable_damaged_record_is_named_and_repaired(local: LocalBackend, name: str, text: str | None) -> None:
    local.start(run_spec(config={"port": 1}, argv=("sh", "-c", "sleep 1000")))
    before = local.observe()["r1"]
    path = Path(local.store.folder("r1")) / name
    path.unlink() if text in (None, "a folder") else path.write_text(str(text))
    if text == "a folder":
        path.mkdir()

    found = local.observe()["r1"]
    assert replace(found, damage="") == before and str(path) in found.damage
    (problem,) = local.inspect()
    local.repair(problem)
    assert local.observe()["r1"] == before and not local.inspect()
    path.unlink()
    assert local.stop("r1").was_alive
    path.unlink(missing_ok=True)
    assert local.observe()["r1"].phase is Phase.EXITED, "its own record of its end is enough"


@pytest.mark.parametrize("text", [*DAMAGED, "a folder"])
def test_lost_record_of_running_component_is_named_and_repaired(local: LocalBackend, text: str) -> None:
    local.start(run_spec(argv=("sh", "-c", "sleep 1000 & wait")))
    before = local.observe()["r1"]
    path = Path(local.store.folder("r1")) / records.CHILD
    path.unlink() if text == "a folder" else path.write_text(text)
    if text == "a folder":
        path.mkdir()

    found = local.observe()["r1"]
    assert replace(found, damage="", started_at=before.started_at) == before and str(path) in found.damage
    assert before.started_at is not None and found.started_at == pytest.approx(before.started_at, abs=0.1)
    (problem,) = local.inspect()
    local.repair(problem)
    assert not local.inspect() and local.observe()["r1"].pid == before.pid
    path.write_text(text) if text != "a folder" else path.unlink()
    assert local.stop("r1").was_alive


def test_component_without_record_is_starting_until_shim_had_time(
    local: LocalBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    local.start(run_spec())
    before = local.observe()["r1"]
    (Path(local.store.folder("r1")) / records.CHILD).unlink()
    assert local.observe()["r1"].phase is Phase.STARTING
    monkeypatch.setattr("areal.runtime.observation._RECORDED_S", 0.0)
    found = local.observe()["r1"]
    assert (found.phase, found.pid) == (Phase.RUNNING, before.pid) and records.CHILD in found.damage


def test_damaged_record_without_component_is_unknown_with_reason(
    local: LocalBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    local.start(run_spec())
    (Path(local.store.folder("r1")) / records.CHILD).write_text("{")
    monkeypatch.setattr("areal.runtime.observation._component_of", lambda identity: None)
    state = local.observe()["r1"]
    assert state.phase is Phase.UNKNOWN and "cannot be read" in state.reason
    repair_run(local.store, "r1")  # of a component that has ended since the plan was made
    assert local.observe()["r1"] == state


def test_observe_of_a_folder_without_intent_is_unknown(local: LocalBackend) -> None:
    Path(local.store.folder("r1")).mkdir(parents=True)

    state = local.observe()["r1"]

    assert (state.phase, state.reason) == (Phase.UNKNOWN, "intent.json is missing")


def test_unreadable_run_does_not_affect_others(local: LocalBackend) -> None:
    local.start(run_spec("good"))
    Path(local.store.folder("bad")).mkdir()

    assert {uid: state.phase for uid, state in local.observe().items()} == {
        "good": Phase.RUNNING,
        "bad": Phase.UNKNOWN,
    }


@pytest.mark.parametrize(
    ("changes", "phase", "reason"),
    [
        ({"machine_id": "other"}, Phase.UNKNOWN, "another machine"),
        ({"boot_id": "other"}, Phase.DEAD, "the machine was restarted"),
        ({"pid_namespace": "pid:[1]"}, Phase.UNKNOWN, "another pid namespace"),
        ({"start_ticks": 1}, Phase.DEAD, "died without a word"),
    ],
)
def test_run_with_foreign_identity_is_dead_only_on_proof(
    local: LocalBackend, changes: dict[str, object], phase: Phase, reason: str
) -> None:
    started = local.start(run_spec())
    path = Path(local.store.folder("r1")) / records.ID
    own = path.read_text()

    edit(local, records.ID, **changes)
    state = local.observe()["r1"]

    assert state.phase is phase
    assert reason in state.reason
    path.write_text(own)
    assert local.observe()["r1"] == started


def test_run_that_ends_while_it_is_observed_has_ended(local: LocalBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    uid = local.start(run_spec()).spec.uid

    def dead_after_its_stop(identity: ProcessIdentity) -> Liveness:
        local.stop(uid)
        return Liveness.DEAD

    monkeypatch.setattr(observation, "liveness", dead_after_its_stop)

    assert local.observe([uid])[uid].phase is Phase.EXITED


def test_run_of_removed_container_is_dead_by_its_life_lock(local: LocalBackend) -> None:
    local.start(run_spec())
    local.stop("r1")
    (Path(local.store.folder("r1")) / records.EXIT).unlink()
    edit(local, records.ID, pid_namespace="pid:[1]")

    assert local.observe()["r1"].phase is Phase.DEAD


def test_stop_of_a_recycled_pid_signals_no_process(local: LocalBackend, spawn: Spawn) -> None:
    """The record of a dead run whose pid was given to a stranger."""
    local.start(run_spec())
    local.stop("r1")
    (Path(local.store.folder("r1")) / records.EXIT).unlink()
    stranger = spawn(["sleep", "1000"], start_new_session=True)
    edit(local, records.ID, pid=stranger.pid, session_id=stranger.pid)

    report = local.stop("r1")

    assert not report.was_alive and report.swept_pids == ()
    assert stranger.poll() is None


def test_stop_and_forget_of_other_machines_run_are_refused(local: LocalBackend) -> None:
    state = local.start(run_spec())
    path = Path(local.store.folder("r1")) / records.ID
    own = path.read_text()
    edit(local, records.ID, machine_id="other")

    with pytest.raises(Conflict, match="another machine"):
        local.stop("r1")
    with pytest.raises(Conflict, match="may be alive"):
        local.forget("r1")

    assert alive(state.pid or 0)
    path.write_text(own)


def test_forget_of_unprovable_run_needs_confirmation(local: LocalBackend) -> None:
    local.start(run_spec())
    local.stop("r1")
    (Path(local.store.folder("r1")) / records.EXIT).unlink()
    edit(local, records.ID, machine_id="other")

    local.forget("r1", unprovable=True)

    assert local.observe() == {}


def test_stop_with_damaged_identity_still_finds_shim(local: LocalBackend) -> None:
    state = local.start(run_spec())
    (Path(local.store.folder("r1")) / records.ID).write_text("{")

    report = local.stop("r1")

    assert report.was_alive
    assert not alive(state.pid or 0) and not alive(state.shim_pid or 0)


def test_observe_of_many_runs_is_cheap(local: LocalBackend) -> None:
    """A promise in processor time; of three tries, as neighbours on the same core can only add to it."""
    local.start(run_spec("r0", spec={"engineArgs": {str(n): n for n in range(50)}}))
    for number in range(1, 300):
        shutil.copytree(local.store.folder("r0"), local.store.folder(f"r{number}"), copy_function=os.link)

    def spent_s() -> float:
        began = time.process_time()
        assert len(local.observe()) == 300
        return time.process_time() - began

    assert min(spent_s() for _ in range(3)) < 0.1
    for number in range(1, 300):
        shutil.rmtree(local.store.folder(f"r{number}"))


def test_reading_commands_import_only_light_modules() -> None:
    source = (
        "import sys; from pathlib import Path; from areal.runtime.backends import open_backend\n"
        "backend = open_backend('local', Path(sys.argv[1])); backend.observe(); backend.log_paths('r1')\n"
        "print(*sys.modules)"
    )
    output = subprocess.run(
        [sys.executable, "-c", source, os.devnull + "-home"], capture_output=True, text=True, check=True
    ).stdout.split()

    assert {"pydantic", "psutil", "yaml", "httpx", "http.client", "asyncio", "torch", "click"}.isdisjoint(output)
