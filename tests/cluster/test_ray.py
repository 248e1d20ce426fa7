"""The backend ``ray`` against a real Ray of two nodes: what the conformance suite does not ask of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from areal.errors import NoCapacity
from areal.runtime.backends.base import NODE_HOST, Cause, Phase, ProblemKind, RestartPolicy, RunSpec
from areal.runtime.backends.ray import RayBackend
from tests.cluster.ray import GPUS, HEAD, SECOND, RayCluster, ray_cluster
from tests.runtime.support import alive, log_text, processes_under, python, run_spec, until, until_phase

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]
NEVER = RestartPolicy("Never")
# Says where it is, and waits.
WHERE = (
    "import os, time; print(*(os.environ.get(n) for n in ('AREAL_NODE_RANK', 'AREAL_FIRST_NODE', 'AREAL_NODE_ADDRESS',"
    " 'CUDA_VISIBLE_DEVICES')), os.getcwd(), flush=True); time.sleep(1000)"
)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCluster]:
    with ray_cluster(tmp_path_factory.mktemp("ray")) as running:
        yield running


@pytest.fixture
def ray(tmp_path: Path, cluster: RayCluster) -> Iterator[RayBackend]:
    backend = RayBackend(tmp_path / "home")
    yield backend
    for uid in backend.observe():
        backend.stop(uid, grace_s=0.5)
    assert processes_under(tmp_path) == []
    until(lambda: cluster.live_jobs() == [], "Ray to have no job left")


def spec_at(cluster: RayCluster, uid: str = "r1", *, nodes: int = 1, gpus: int = 0, **settings: object) -> RunSpec:
    scheduler = {"type": "ray", "ray": {"address": cluster.address, **settings}}
    names = tuple(f"gpu-{number}" for number in range(gpus))
    return run_spec(
        uid, python(WHERE), scheduler=scheduler, nodes=nodes, gpus=names, url=f"http://{NODE_HOST}:7", restart=NEVER
    )


def on(address: str) -> dict[str, Any]:
    return {"resources": {f"node:{address}": 0.001}}


def test_run_has_its_node_its_gpus_and_the_copied_folder(ray: RayBackend, cluster: RayCluster, tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "mine.py").write_text("x = 1")

    ray.start(spec_at(cluster, gpus=2, workingDir=str(tmp_path / "work"), **on(SECOND)))
    state = until(lambda: [seen for seen in ray.observe().values() if seen.pid and seen.gpus], "its GPUs")[0]
    lines = until(lambda: [line for line in log_text(ray, "r1").splitlines() if line.startswith("0 ")], "its words")

    rank, first, here, visible, folder = lines[0].split()
    assert (rank, first, here) == ("0", SECOND, SECOND)
    assert (state.node, state.spec.url) == (SECOND, f"http://{SECOND}:7")
    assert state.gpus == tuple(visible.split(",")) and len(state.gpus) == 2
    assert (Path(folder) / "mine.py").read_text() == "x = 1"


def test_waiting_run_gives_reason_and_can_be_cancelled(ray: RayBackend, cluster: RayCluster) -> None:
    for number in range(2):
        ray.start(spec_at(cluster, f"full{number}", gpus=GPUS))
    until_phase(ray, "full0", Phase.RUNNING)
    until_phase(ray, "full1", Phase.RUNNING)
    ray.start(spec_at(cluster, "waits", gpus=GPUS))

    waits = until(
        lambda: [s for s in ray.observe(["waits"]).values() if s.reason.startswith("Resources")], "the reason"
    )[0]
    report = ray.stop("waits", grace_s=0.5)

    assert waits.phase is Phase.QUEUED and f"GPU {GPUS} " in waits.reason and waits.queued_at is not None
    assert report.was_alive
    assert ray.observe(["waits"])["waits"].phase is Phase.EXITED


def test_demand_over_gpus_of_a_node_is_refused(ray: RayBackend, cluster: RayCluster) -> None:
    scheduler = spec_at(cluster).scheduler
    with pytest.raises(NoCapacity, match=f"no node has GPU {GPUS + 1}: the most is {GPUS}"):
        ray.require_possible(scheduler, gpus=GPUS + 1, nodes=1)
    with pytest.raises(NoCapacity, match=r"3 nodes with .*, and 2 can have that"):
        ray.require_possible(scheduler, gpus=1, nodes=3)
    ray.require_possible(scheduler, gpus=GPUS, nodes=2)


def test_two_node_run_has_component_on_each_and_ends_as_one(ray: RayBackend, cluster: RayCluster) -> None:
    ray.start(spec_at(cluster, nodes=2, gpus=1))
    until_phase(ray, "r1", Phase.RUNNING)
    other = Path(ray.store.folder("r1"), "r1-node-1", "log", "current.log")

    def places() -> list[list[str]]:
        text = log_text(ray, "r1") + (other.read_text() if other.exists() else "")
        lines = [words for words in map(str.split, text.splitlines()) if len(words) == 5 and words[0] in ("0", "1")]
        return lines if len(lines) == 2 else []

    ranks = until(places, "both to say where they are")

    assert [words[0] for words in ranks] == ["0", "1"]
    assert ranks[0][1] == ranks[1][1] == ranks[0][2]
    until(lambda: ray.observe()["r1"].node == ranks[0][2], "the first node to be known")
    assert {words[2] for words in ranks} == {HEAD, SECOND}
    assert ray.stop("r1", grace_s=2.0).was_alive
    assert ray.observe()["r1"].phase is Phase.EXITED


def test_waiting_two_node_run_is_queued_and_cancelled(ray: RayBackend, cluster: RayCluster) -> None:
    ray.start(spec_at(cluster, "one", gpus=GPUS, **on(SECOND)))
    until_phase(ray, "one", Phase.RUNNING)
    ray.start(spec_at(cluster, nodes=2, gpus=1))

    state = until(
        lambda: [s for s in ray.observe(["r1"]).values() if s.reason.startswith("Resources: 2 x")], "the reason"
    )[0]

    assert state.phase is Phase.QUEUED
    ray.stop("r1")


def test_stray_job_is_found_by_its_home_and_ended(ray: RayBackend, cluster: RayCluster) -> None:
    ray.start(spec_at(cluster))
    pid = until_phase(ray, "r1", Phase.RUNNING).pid
    Path(ray.store.folder("r1")).rename(ray.home / "elsewhere")
    other_home = RayBackend(ray.home / "other")
    other_home._remember_address(cluster.address)

    problems = RayBackend(ray.home).inspect()

    assert [(problem.trouble, problem.subject) for problem in problems] == [(ProblemKind.STRAY_PROCESS, "r1")]
    assert other_home.inspect() == ()
    assert "cancelled" in RayBackend(ray.home).repair(problems[0])
    assert pid is not None and not alive(pid)
    assert RayBackend(ray.home).inspect() == ()


def test_repeated_submission_is_one_job(ray: RayBackend, cluster: RayCluster) -> None:
    ray.start(spec_at(cluster))
    spec = ray.observe()["r1"].spec

    ray.submit(spec, ray.store.folder("r1"))

    assert len(cluster.live_jobs()) == 1


def test_home_invisible_to_node_ends_run_with_clear_error(ray: RayBackend, cluster: RayCluster) -> None:
    spec = spec_at(cluster, python="/no/such/python")

    ray.start(spec)
    state = until_phase(ray, "r1", Phase.DEAD)

    assert "/no/such/python" in state.reason
    assert "/no/such/python" in log_text(ray, "r1")


@pytest.mark.slow
def test_killed_node_is_cause_and_other_runs_continue(ray: RayBackend, cluster: RayCluster) -> None:
    ray.start(spec_at(cluster, "here", **on(HEAD)))
    ray.start(spec_at(cluster, "there", **on(SECOND)))
    ray.start(spec_at(cluster, "both", nodes=2))
    for uid in ("here", "there", "both"):
        until_phase(ray, uid, Phase.RUNNING)

    cluster.kill_node(SECOND)
    there, both = (until_phase(ray, uid, Phase.DEAD, Phase.EXITED) for uid in ("there", "both"))

    assert (there.phase, there.cause) == (Phase.DEAD, Cause.NODE_LOST), there.reason
    assert (both.phase, both.cause) == (Phase.DEAD, Cause.NODE_LOST), both.reason
    assert ray.observe(["here"])["here"].phase is Phase.RUNNING
    cluster.start_node(SECOND)


@pytest.mark.slow
def test_lost_head_makes_runs_unknown_and_restarted_one_dead(
    ray: RayBackend, cluster: RayCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray.start(spec_at(cluster, **on(SECOND)))
    pid = until_phase(ray, "r1", Phase.RUNNING).pid
    assert pid is not None

    cluster.kill_head()
    away = until_phase(ray, "r1", Phase.UNKNOWN)
    cluster.start_head()
    restarted = ray.observe()["r1"]

    assert "does not answer" in away.reason
    assert restarted.phase is Phase.UNKNOWN and "was restarted" in restarted.reason
    until(lambda: not alive(pid), "the node to end what its old head had started")
    monkeypatch.setattr("areal.runtime.backends.ray_job.LOST_S", 0.0)
    lost = until_phase(ray, "r1", Phase.DEAD)
    assert lost.cause is Cause.NODE_LOST
    assert json.loads(Path(ray.store.folder("r1"), "ray.json").read_text())["address"] == cluster.address
    ray.stop("r1")
    ray.forget("r1")
