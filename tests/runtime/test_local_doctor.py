"""What does not add up is found, named, and repaired only where it is proved."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest

from areal.errors import ArealError
from areal.runtime import records
from areal.runtime.backends.base import Phase, ProblemKind
from areal.runtime.backends.local import LocalBackend
from areal.runtime.leases import port_owner

from .conftest import Spawn
from .support import FORKING_COMPONENT, alive, log_text, processes_under, python, run_spec, until


def test_inspect_of_a_healthy_home_finds_nothing(local: LocalBackend) -> None:
    assert local.inspect() == ()
    local.start(run_spec("living", ports=local.claim_ports(1, owner="Model/qwen")))
    local.start(run_spec("stopped"))
    local.stop("stopped")

    assert local.inspect() == ()


def test_stray_processes_of_a_deleted_record_are_found_and_ended(local: LocalBackend, tmp_path: Path) -> None:
    state = local.start(run_spec())
    shutil.rmtree(local.store.folder("r1"))

    (problem,) = local.inspect()
    action = local.repair(problem)

    assert problem.trouble is ProblemKind.STRAY_PROCESS
    assert set(problem.pids) == {state.pid, state.shim_pid}
    assert "ended" in action
    assert processes_under(tmp_path) == []
    assert local.inspect() == ()


def test_orphans_of_a_killed_shim_are_found_and_swept(local: LocalBackend, tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    state = local.start(run_spec(argv=python(FORKING_COMPONENT, str(pid_file))))
    until(lambda: "forked" in log_text(local, "r1"), "the grandchild")
    os.kill(state.shim_pid or 0, signal.SIGKILL)
    until(lambda: not alive(state.pid or 0), "the component to die")

    problems = {problem.trouble: problem for problem in local.inspect()}
    assert set(problems) == {ProblemKind.ORPHANS, ProblemKind.DEAD_RECORD}
    assert problems[ProblemKind.ORPHANS].pids == (int(pid_file.read_text()),)
    local.repair(problems[ProblemKind.ORPHANS])

    assert local.inspect() == ()
    assert processes_under(tmp_path) == []


def test_dead_record_is_repaired_into_an_ended_run(local: LocalBackend, tmp_path: Path) -> None:
    state = local.start(run_spec())
    os.kill(state.shim_pid or 0, signal.SIGKILL)
    until(lambda: not processes_under(tmp_path), "the component to die with its shim")

    log = Path(local.store.folder("r1"), records.LOG_FOLDER, records.CURRENT_LOG)
    written_at = log.stat().st_mtime
    assert local.observe()["r1"].logged_at == written_at
    (problem,) = local.inspect()
    local.repair(problem)

    ended = local.observe()["r1"]
    assert ended.phase is Phase.EXITED
    assert ended.logged_at == written_at, "the record of its end keeps when it was last seen"
    assert local.inspect() == ()


def test_never_started_intent_is_forgotten(local: LocalBackend) -> None:
    os.close(local.store.create(run_spec()))

    (problem,) = local.inspect()
    local.repair(problem)

    assert problem.trouble is ProblemKind.NEVER_STARTED
    assert local.observe() == {}


def test_starting_run_is_not_reported(local: LocalBackend) -> None:
    seen: list[object] = []

    local.start(run_spec(), on_pid=lambda pid: seen.append(local.inspect()))

    assert seen == [()]


def test_unreadable_record_is_reported_and_not_repaired(local: LocalBackend) -> None:
    Path(local.store.folder("r1")).mkdir(parents=True)

    (problem,) = local.inspect()

    assert problem.trouble is ProblemKind.UNREADABLE
    with pytest.raises(ArealError, match="needs a person"):
        local.repair(problem)
    assert Path(local.store.folder("r1")).exists()


def test_lease_outliving_its_run_is_found_with_holder(local: LocalBackend, spawn: Spawn) -> None:
    lease = local.leases.acquire("port-20001", owner="Model/qwen", uid="r9")
    heir = spawn(["sleep", "1000"], pass_fds=[lease.fd])
    lease.close()

    (problem,) = local.inspect()

    assert (problem.trouble, problem.subject, problem.pids) == (
        ProblemKind.LEASE_WITHOUT_RUN,
        "port-20001",
        (heir.pid,),
    )
    assert f"{heir.pid} (sleep 1000)" in problem.message
    heir.kill()
    heir.wait()
    assert local.inspect() == ()


def test_leftover_folder_is_removed(local: LocalBackend) -> None:
    leftover = Path(local.store.root) / ".forgotten-r1-1"
    leftover.mkdir(parents=True)
    os.utime(leftover, (0, 0))

    (problem,) = local.inspect()
    local.repair(problem)

    assert problem.trouble is ProblemKind.LEFTOVER
    assert not leftover.exists()


def test_shared_port_without_first_holder_is_accepted(local: LocalBackend) -> None:
    (port,) = local.claim_ports(1, owner="Model/qwen")
    local.release_claims()
    local.start(run_spec("old", shared_ports=(port,)))
    local.start(run_spec("new", shared_ports=(port,)))
    local.stop("old")

    assert local.inspect() == ()


def test_run_without_folder_is_reported_once_with_its_port(local: LocalBackend, tmp_path: Path) -> None:
    (port,) = local.claim_ports(1, owner="Model/a")
    code = f"import socket, time; s = socket.create_server(('127.0.0.1', {port})); time.sleep(1000)"
    local.start(run_spec(argv=python(code), ports=(port,)))
    until(lambda: port_owner(port), "it to listen")
    assert "`areal get processes --home" in (port_owner(port) or pytest.fail()).remedy

    shutil.move(local.store.folder("r1"), tmp_path / "lost")

    (problem,) = local.inspect()
    assert problem.trouble is ProblemKind.STRAY_PROCESS
    assert "areal doctor --fix --yes --home" in (port_owner(port) or pytest.fail()).remedy
    local.repair(problem)
    assert port_owner(port) is None and local.inspect() == ()
