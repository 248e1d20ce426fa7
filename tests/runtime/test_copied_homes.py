"""A copy of a home leaves the processes of the original alone; a home that was moved keeps its own."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from areal.errors import ArealError, Conflict
from areal.runtime import records
from areal.runtime.backends.base import Backend, Phase
from areal.runtime.backends.local import LocalBackend
from areal.runtime.backends.ray import RayBackend
from areal.runtime.runs import is_copy

from .conftest import MakeBackend
from .remote_backend import RemoteBackend
from .support import FORKING_COMPONENT, alive, python, run_spec, until_phase


def copied(tmp_path: Path, name: str = "copy") -> Path:
    shutil.copytree(tmp_path / "home", tmp_path / name)
    return tmp_path / name


@pytest.fixture
def pair(make_local: MakeBackend, tmp_path: Path) -> Iterator[tuple[LocalBackend, LocalBackend]]:
    """A home with a run that lives, and a copy of it."""
    original = make_local()
    original.start(run_spec())
    copied(tmp_path)
    yield original, make_local("copy")
    shutil.rmtree(tmp_path / "copy")  # its records are not its own to stop


def test_copied_run_is_unknown_naming_original_and_next_step(
    pair: tuple[LocalBackend, LocalBackend],
) -> None:
    original, copy = pair

    state = copy.observe()["r1"]

    assert state.phase is Phase.UNKNOWN
    assert state.reason == (
        f"its processes belong to {original.store.folder('r1')}, and this is a copy: "
        f"use that home, or remove {copy.store.folder('r1')} to start it here"
    )


def test_commands_of_copied_home_signal_no_original_process(pair: tuple[LocalBackend, LocalBackend]) -> None:
    original, copy = pair
    before = original.observe()["r1"]

    for command in (lambda: copy.stop("r1", grace_s=0), lambda: copy.kick("r1"), lambda: copy.forget("r1")):
        with pytest.raises(Conflict, match="this is a copy"):
            command()
    for problem in copy.inspect():
        assert not problem.repairable, problem

    assert original.observe()["r1"] == before and alive(before.pid or 0)
    assert original.stop("r1").was_alive


def test_copied_run_can_be_forgotten_and_started_again(
    pair: tuple[LocalBackend, LocalBackend],
) -> None:
    original, copy = pair
    copy.forget("r1", unprovable=True)

    own = copy.start(run_spec())

    assert own.phase is Phase.RUNNING and own.pid != original.observe()["r1"].pid
    assert copy.stop("r1", grace_s=0).was_alive
    assert original.observe()["r1"].phase is Phase.RUNNING


def test_stop_of_dead_copied_run_sweeps_nothing_of_original(make_local: MakeBackend, tmp_path: Path) -> None:
    left = tmp_path / "left"
    original = make_local()
    state = original.start(run_spec(argv=python(FORKING_COMPONENT, str(left), "wipe")))
    until_phase(original, "r1", Phase.RUNNING)
    while not (left.exists() and left.read_text().strip()):
        os.sched_yield()
    copy = LocalBackend(copied(tmp_path), tmp_path / "leases")
    os.kill(state.shim_pid or 0, 9)
    until_phase(original, "r1", Phase.DEAD)

    report = copy.stop("r1", grace_s=0)

    assert report.swept_pids == () and alive(int(left.read_text()))
    assert copy.observe()["r1"].phase is Phase.EXITED
    assert int(left.read_text()) in original.stop("r1").swept_pids


def test_moved_home_controls_its_processes(make_local: MakeBackend, tmp_path: Path) -> None:
    left = tmp_path / "left"
    started = make_local().start(run_spec(argv=python(FORKING_COMPONENT, str(left), "setsid")))
    while not (left.exists() and left.read_text().strip()):
        os.sched_yield()
    (tmp_path / "home").rename(tmp_path / "moved")
    moved = make_local("moved")

    assert moved.observe()["r1"].phase is Phase.RUNNING
    report = moved.stop("r1", grace_s=0)

    assert report.was_alive and not alive(started.pid or 0)
    assert not alive(int(left.read_text()))
    assert moved.observe()["r1"].phase is Phase.EXITED


def test_moved_home_starts_successor_on_shared_port(make_local: MakeBackend, tmp_path: Path) -> None:
    first = make_local()
    (port,) = first.claim_ports(1, owner="Model/qwen")
    first.release_claims()
    first.start(run_spec(shared_ports=(port,)))
    shutil.copytree(tmp_path / "home", tmp_path / "copy")
    copy = LocalBackend(tmp_path / "copy", tmp_path / "leases")
    with pytest.raises(ArealError, match=f"port {port} is held"):
        copy.start(run_spec("r2", shared_ports=(port,)))
    (tmp_path / "home").rename(tmp_path / "moved")

    successor = make_local("moved").start(run_spec("r2", shared_ports=(port,)))

    assert successor.phase is Phase.RUNNING


def test_original_home_moved_before_copy_keeps_processes(make_local: MakeBackend, tmp_path: Path) -> None:
    make_local().start(run_spec())
    (tmp_path / "home").rename(tmp_path / "moved")
    shutil.copytree(tmp_path / "moved", tmp_path / "home")

    moved, copy = make_local("moved"), LocalBackend(tmp_path / "home", tmp_path / "leases")
    assert moved.observe()["r1"].phase is Phase.RUNNING
    assert f"its processes belong to {moved.store.folder('r1')}" in copy.observe()["r1"].reason
    with pytest.raises(Conflict, match="this is a copy"):
        copy.stop("r1", grace_s=0)
    shutil.rmtree(tmp_path / "home")


def test_folder_copy_differs_from_link_and_move(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    made = str(home), home.stat().st_ino
    copy = copied(tmp_path)
    link = tmp_path / "link"
    link.symlink_to(home)

    assert not is_copy(str(home), *made) and not is_copy(str(link), *made)
    assert is_copy(str(copy), *made)
    home.rename(tmp_path / "moved")
    assert not is_copy(str(tmp_path / "moved"), *made) and not is_copy(str(copy), *made)


def test_copied_cluster_run_is_unknown_and_job_continues(remote: Backend, tmp_path: Path) -> None:
    remote.start(run_spec())
    before = until_phase(remote, "r1", Phase.RUNNING)
    copy = RemoteBackend(copied(tmp_path), None, lambda point: None)
    assert copy.jobs([]).keys() == {"r1"}  # the scheduler would let it

    state = copy.observe()["r1"]
    with pytest.raises(Conflict, match="this is a copy"):
        copy.stop("r1", grace_s=0)

    assert state.phase is Phase.UNKNOWN and "this is a copy" in state.reason
    assert remote.observe()["r1"] == before
    shutil.rmtree(tmp_path / "copy")


def test_copied_home_has_new_ray_name_and_moved_one_keeps_it(tmp_path: Path) -> None:
    name = RayBackend(tmp_path / "home")._home_id()
    copy = RayBackend(copied(tmp_path))._home_id()

    assert copy != name
    assert RayBackend(tmp_path / "copy")._home_id() == copy
    assert RayBackend(tmp_path / "home")._home_id() == name
    (tmp_path / "home").rename(tmp_path / "moved")
    assert RayBackend(tmp_path / "moved")._home_id() == name


def test_ray_name_of_earlier_version_is_kept(tmp_path: Path) -> None:
    file = tmp_path / "home" / "clusters" / "ray" / "home"
    file.parent.mkdir(parents=True)
    file.write_text("0a1b2c3d")

    assert RayBackend(tmp_path / "home")._home_id() == "0a1b2c3d"


def test_run_of_earlier_version_belongs_to_home_not_copy(make_local: MakeBackend, tmp_path: Path) -> None:
    local = make_local()
    local.start(run_spec())
    for name in (records.INTENT, records.INTENT_COPY):
        path = Path(local.store.folder("r1"), name)
        intent = json.loads(path.read_text())
        del intent["folder"], intent["inode"]
        path.write_text(json.dumps(intent))

    copy = LocalBackend(copied(tmp_path), tmp_path / "leases")
    assert local.observe()["r1"].phase is Phase.RUNNING
    assert f"its processes belong to {local.store.folder('r1')}, and this is a copy" in copy.observe()["r1"].reason
    for command in (lambda: copy.stop("r1", grace_s=0), lambda: copy.kick("r1"), lambda: copy.forget("r1")):
        with pytest.raises(Conflict, match="this is a copy"):
            command()
    assert local.stop("r1").was_alive
