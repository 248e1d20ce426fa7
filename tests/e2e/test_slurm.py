"""A service, its model and a training job on a real Slurm: what runs on one machine runs there, by one line more."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.cluster.slurm import NODES, SlurmCluster
from tests.e2e.conftest import ROOT, Box, make_box, tear_down

pytestmark = pytest.mark.slurm
SCHEDULER = "scheduler: {type: slurm}"


@pytest.fixture
def box(tmp_path: Path, slurm_cluster: SlurmCluster) -> Iterator[Box]:
    made = make_box(tmp_path)
    made.env |= slurm_cluster.env
    yield made
    tear_down(made)
    assert slurm_cluster.jobs() == []


def apply(box: Box, model: str = "", *, name: str = "manifest.yaml") -> None:
    box.ok("apply", "-f", box.manifest(service=SCHEDULER, model=model, name=name))
    processes = box.processes()
    box.host = str(urlsplit(processes["gateway/0"]["url"]).hostname)


@pytest.mark.extended
def test_apply_chat_cancel_and_delete_on_slurm(box: Box, slurm_cluster: SlurmCluster) -> None:
    apply(box)

    processes = box.processes()
    jobs = {line.split()[1]: line.split()[0] for line in slurm_cluster.jobs()}
    assert {row["uid"]: row["jobId"] for row in processes.values()} == jobs
    assert {row["node"] for row in processes.values()} <= set(NODES)
    assert box.host in NODES.values()
    assert box.chat("1234").isdigit()
    assert "unchanged" in box.ok("apply", "-f", str(box.folder / "manifest.yaml")).out
    wide = box.ok("get", "processes", "-o", "wide").out
    assert all(job_id in wide for job_id in jobs.values())
    assert "started pid" in box.ok("logs", "model/reverse", "-c", "engine").out

    slurm_cluster.command("scancel", processes["engine/0"]["jobId"])
    box.ok("reconcile")
    assert box.processes()["engine/0"]["jobId"] not in jobs.values()
    assert box.chat("1234").isdigit()
    assert box.ok("doctor").code == 0

    box.ok("delete", "inferenceservice/default", "--cascade", "--yes")
    assert slurm_cluster.jobs() == []


@pytest.mark.slow
def test_queued_run_gives_reason_and_survives_timeout(box: Box, slurm_cluster: SlurmCluster) -> None:
    held = slurm_cluster.command(
        "sbatch", "--parsable", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap", "sleep 1000"
    ).strip()
    until(lambda: "RUNNING" in "".join(slurm_cluster.jobs()), "the other job")
    manifest = box.manifest(service=SCHEDULER)

    waiting = box.areal("apply", "-f", manifest, "--timeout", "15s")

    assert waiting.code == 7 and "Resources" in waiting.text, waiting.text
    assert "Resources" in box.ok("describe", "inferenceservice/default").out
    slurm_cluster.command("scancel", held)
    apply(box)
    assert box.chat("1234").isdigit()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_scale_and_killed_processes_on_slurm(box: Box, slurm_cluster: SlurmCluster) -> None:
    apply(box)
    before = slurm_cluster.jobs()
    box.ok("scale", "model/reverse", "--replicas", "2")
    assert len(slurm_cluster.jobs()) == len(before) + 2

    for name in ("engine/0", "data-proxy/1", "router/0"):
        os.kill(box.processes()[name]["pid"], signal.SIGKILL)
    box.ok("reconcile")

    assert len(slurm_cluster.jobs()) == len(before) + 2  # their supervisors start them again
    assert box.chat("1234").isdigit()
    box.ok("scale", "model/reverse", "--replicas", "1")
    assert sorted(slurm_cluster.jobs()) == sorted(before)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_processes_of_dead_node_return_on_another(box: Box, slurm_cluster: SlurmCluster) -> None:
    apply(box, "replicas: 2")
    (node,) = {row["node"] for row in box.processes().values()}  # the first has room for all
    slurm_cluster.kill_node(node)
    try:
        until(lambda: not slurm_cluster.jobs(), "Slurm to give up the node's jobs")
        drift = box.areal("diff", "--drift")
        assert "node-lost" in drift.text
        apply(box, "replicas: 2")
        assert {row["node"] for row in box.processes().values()} == set(NODES) - {node}
        assert box.chat("1234").isdigit()
    finally:
        slurm_cluster.start_node(node)
        until(lambda: slurm_cluster.node_states().count("down") == 0, "the node to be back")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_quickstart_over_two_nodes_trains_then_answers(box: Box) -> None:
    box = replace(box, folder=ROOT)
    overrides = ["total_train_steps=3", "actor.backend=fsdp:d2", "actor.weight_update_mode=disk"]
    out = box.ok(
        *("apply", "-f", "manifests/quickstart.yaml"),
        *("--set", f"inferenceservice/default:spec.gateway.port={box.port}"),
        *("--set", 'inferenceservice/default:spec.scheduler={"type": "slurm"}'),
        *("--set", 'trainjob/learn:spec.scheduler={"type": "slurm"}'),
        *("--set", 'trainjob/learn:spec.resources={"nodes": 2}'),
        *("--set", f"trainjob/learn:spec.overrides={json.dumps(overrides)}"),
    ).out
    assert "trainjob/learn created" in out
    box.host = str(urlsplit(box.processes()["gateway/0"]["url"]).hostname)

    box.ok("wait", "trainjob/learn", "--for", "completed", "--timeout", "600s")

    status = json.loads(box.ok("train", "status", "learn", "-o", "json").out)
    assert (status["phase"], status["step"]) == ("Succeeded", 3)
    steps = [json.loads(line) for line in (box.home / "jobs" / "learn" / "metrics.jsonl").read_text().splitlines()]
    assert [step["version"] for step in steps if step["step"]] == [1, 2, 3]
    assert box.chat("1234").isdigit()


def until(condition: Callable[[], bool], what: str, patience_s: float = 120) -> None:
    deadline = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.2)
