"""What the shared part of backends of schedulers promises, on a cluster of one node."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from areal.errors import Conflict
from areal.reconcilers.home_view import process_row
from areal.runtime.backends.base import Backend, Cause, Job, Phase, ProblemKind, RunState
from areal.runtime.backends.cluster import ClusterBackend

from .remote_backend import SETTINGS_VARIABLE, RemoteBackend
from .support import processes_under, run_spec, until, until_phase

SCRIPT = """
import os, sys
from pathlib import Path
from areal.runtime.backends.base import RunSpec
from tests.runtime.remote_backend import RemoteBackend

def crash(name):
    if name == sys.argv[3]:
        os._exit(137)

backend = RemoteBackend(Path(sys.argv[2]), None, crash)
if sys.argv[1] == "start":
    backend.start(RunSpec("r1", "Model/qwen", "engine", 0, ("sleep", "1000")))
backend.stop("r1")
"""


@pytest.fixture
def cluster(remote: Backend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ClusterBackend:
    assert isinstance(remote, ClusterBackend)
    monkeypatch.setenv(SETTINGS_VARIABLE, str(tmp_path / "cluster.json"))
    set_cluster(tmp_path)
    return remote


def set_cluster(tmp_path: Path, **settings: object) -> None:
    new = tmp_path / "cluster.new"
    new.write_text(json.dumps(settings))
    new.rename(tmp_path / "cluster.json")


@pytest.mark.parametrize(
    ("point", "phases"),
    [
        ("intent-after", (Phase.INTENDED,)),
        ("pid-after", (Phase.INTENDED,)),
        ("go-after", (Phase.QUEUED, Phase.STARTING, Phase.RUNNING)),
    ],
)
def test_caller_dying_during_start_leaks_no_job(
    cluster: ClusterBackend, tmp_path: Path, point: str, phases: tuple[Phase, ...]
) -> None:
    died = subprocess.run([sys.executable, "-c", SCRIPT, "start", str(tmp_path / "home"), point])

    assert died.returncode == 137 and cluster.observe()["r1"].phase in phases
    cluster.stop("r1", grace_s=1)
    cluster.forget("r1")
    assert cluster.observe() == {} and not processes_under(tmp_path)
    cluster.start(run_spec())
    until_phase(cluster, "r1", Phase.RUNNING)


@pytest.mark.parametrize("point", ["stop-before", "stop-signalled", "stop-after"])
def test_interrupted_stop_is_finished_by_next_one(cluster: ClusterBackend, tmp_path: Path, point: str) -> None:
    cluster.start(run_spec())
    until_phase(cluster, "r1", Phase.RUNNING)

    died = subprocess.run([sys.executable, "-c", SCRIPT, "stop", str(tmp_path / "home"), point])

    assert died.returncode == 137
    cluster.stop("r1", grace_s=1)
    assert cluster.observe()["r1"].phase is Phase.EXITED and not processes_under(tmp_path)


def test_queued_run_is_stopped_and_forgotten_without_a_process(cluster: ClusterBackend, tmp_path: Path) -> None:
    set_cluster(tmp_path, held=True)
    state = cluster.start(run_spec())
    assert (state.phase, state.reason, state.node) == (Phase.QUEUED, "Resources", "")
    with pytest.raises(Conflict, match="is alive"):
        cluster.forget("r1")

    assert cluster.stop("r1").was_alive

    state = cluster.observe()["r1"]
    assert (state.phase, state.reason) == (Phase.EXITED, "stopped")
    cluster.forget("r1")
    assert cluster.observe() == {}


def test_unreachable_scheduler_makes_runs_unknown(cluster: ClusterBackend, tmp_path: Path) -> None:
    cluster.start(run_spec())
    until_phase(cluster, "r1", Phase.RUNNING)
    set_cluster(tmp_path, away=True)
    cluster.release_claims()

    state = until_phase(cluster, "r1", Phase.UNKNOWN)

    assert state.reason == "the remote cluster does not answer"
    with pytest.raises(Conflict, match="does not answer"):
        cluster.stop("r1")
    with pytest.raises(Conflict, match="does not answer"):
        cluster.forget("r1")
    set_cluster(tmp_path)
    until_phase(cluster, "r1", Phase.RUNNING)


def test_run_stopped_by_scheduler_keeps_its_reason(cluster: ClusterBackend, tmp_path: Path) -> None:
    cluster.start(run_spec())
    until_phase(cluster, "r1", Phase.RUNNING)
    set_cluster(tmp_path, cause="preempted")

    cluster.end_job("r1", cluster.observe()["r1"], 1.0)  # SIGTERM, as by a scheduler: areal was asked nothing
    until(lambda: not processes_under(tmp_path), "the job's processes to end")

    until(lambda: cluster.observe()["r1"].cause is Cause.PREEMPTED, "the scheduler's word")
    state = cluster.observe()["r1"]
    assert state.phase is Phase.EXITED and state.last_exit is not None and state.last_exit.reason == "preempted"
    assert process_row(state)["reason"] == "preempted"


def test_job_without_a_record_is_found_and_cancelled(cluster: ClusterBackend, tmp_path: Path) -> None:
    cluster.start(run_spec())
    until_phase(cluster, "r1", Phase.RUNNING)
    (tmp_path / "home" / "clusters" / "remote" / "runs" / "r1").rename(tmp_path / "lost")

    (problem,) = cluster.inspect()

    assert (problem.trouble, problem.subject) == (ProblemKind.STRAY_PROCESS, "r1")
    assert "cancelled" in cluster.repair(problem)
    assert not cluster.inspect()
    until(lambda: not processes_under(tmp_path), "the job's processes to end")


def test_outdated_answer_does_not_hide_submission(cluster: ClusterBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster.start(run_spec("r1"))
    asked, answer = threading.Event(), threading.Event()
    real = RemoteBackend.jobs

    def slow(self: RemoteBackend, uids: list[str]) -> dict[str, Job]:
        found = dict(real(self, uids))
        if threading.current_thread() is not threading.main_thread():
            asked.set()
            answer.wait(10)
        return found

    monkeypatch.setattr(RemoteBackend, "jobs", slow)
    cluster._forget_jobs()
    seen: list[dict[str, RunState]] = []
    other = threading.Thread(target=lambda: seen.append(cluster.observe()))
    other.start()
    assert asked.wait(10)
    second = threading.Timer(0.1, answer.set)
    second.start()

    state = cluster.start(run_spec("r2"))

    other.join()
    second.join()
    assert state.phase is not Phase.INTENDED and cluster.observe()["r2"].phase is not Phase.INTENDED


def test_ports_are_unused_by_other_runs_of_home(cluster: ClusterBackend) -> None:
    ports = cluster.claim_ports(50, owner="Model/a")
    cluster.start(run_spec("r1", ports=ports[:1]))
    cluster.release_claims()

    again = cluster.claim_ports(50, owner="Model/b", prefer=ports)

    assert again[:49] == ports[1:] and again[49] not in ports


def test_ports_are_distinct_with_fewer_than_runs(cluster: ClusterBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("areal.runtime.backends.cluster._PORTS", range(9001, 9051))
    assert cluster.claim_ports(1, owner="Model/a", prefer=[9001]) == (9001,)

    ports = cluster.claim_ports(50, owner="Model/b", prefer=range(9002, 9051))

    assert sorted(ports) == list(range(9001, 9051))
