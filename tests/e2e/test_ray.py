"""The command line on a real Ray of two nodes: a service and its model, a node that dies, a command that dies, what a
cluster refuses, and a job over two nodes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.cluster.ray import HEAD, SECOND, RayCluster, ray_cluster
from tests.e2e.conftest import ROOT, Box

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(900)]
POINTS = ("intent-after", "pid-after", "go-after", "journal-append-after", "write-synced", "stop-signalled")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCluster]:
    with ray_cluster(tmp_path_factory.mktemp("ray")) as running:
        yield running


@pytest.fixture
def on_ray(box: Box, cluster: RayCluster) -> Iterator[Box]:
    yield box
    box.areal("delete", "inferenceservice/default", "--cascade", "--yes")
    assert cluster.live_jobs() == []


def manifest(box: Box, cluster: RayCluster, model: str = "") -> str:
    return box.manifest(service=f"scheduler: {{type: ray, ray: {{address: '{cluster.address}'}}}}", model=model)


def chat(box: Box) -> str:
    return box.ok("inf", "chat", "-m", "1234", "--temperature", "0").out.strip()


def test_service_and_model_survive_dead_node(on_ray: Box, cluster: RayCluster) -> None:
    file = manifest(on_ray, cluster, "replicas: 2")

    out = on_ray.ok("apply", "-f", file).out
    assert "inferenceservice/default created: Ready" in out and "model/reverse created: Ready" in out
    assert chat(on_ray).isdigit()
    assert "model/reverse unchanged" in on_ray.ok("apply", "-f", file).out
    processes = on_ray.processes()
    assert {row["node"] for row in processes.values()} <= {HEAD, SECOND}
    wide = on_ray.ok("get", "processes", "-o", "wide").out
    assert processes["engine/0"]["jobId"] in wide
    assert "started pid" in on_ray.ok("logs", "model/reverse", "-c", "engine").out
    assert on_ray.ok("doctor").code == 0

    lost = [name for name, row in processes.items() if row["node"] == SECOND]
    cluster.kill_node(SECOND)
    cluster.until(lambda: SECOND not in cluster.living_nodes(), "the cluster to notice")
    cluster.until(lambda: not set(lost) & on_ray.processes().keys(), "the runs to be lost")
    if lost:
        assert "node-lost" in on_ray.areal("diff", "-f", file).text
    on_ray.ok("apply", "-f", file)
    assert chat(on_ray).isdigit()
    cluster.start_node(SECOND)

    on_ray.ok("scale", "model/reverse", "--replicas", "1")
    assert "engine/1" not in on_ray.processes()


def test_quickstart_over_two_nodes_trains_then_answers(on_ray: Box, cluster: RayCluster) -> None:
    box = replace(on_ray, folder=ROOT)
    scheduler = json.dumps({"type": "ray", "ray": {"address": cluster.address}})
    overrides = ["total_train_steps=3", "actor.backend=fsdp:d2", "actor.weight_update_mode=disk"]

    box.ok(
        *("apply", "-f", "manifests/quickstart.yaml"),
        *("--set", f"inferenceservice/default:spec.gateway.port={box.port}"),
        *("--set", f"inferenceservice/default:spec.scheduler={scheduler}"),
        *("--set", f"trainjob/learn:spec.scheduler={scheduler}"),
        *("--set", 'trainjob/learn:spec.resources={"nodes": 2}'),
        *("--set", f"trainjob/learn:spec.overrides={json.dumps(overrides)}"),
    )
    box.ok("wait", "trainjob/learn", "--for", "completed", "--timeout", "600s")

    status = json.loads(box.ok("train", "status", "learn", "-o", "json").out)
    assert (status["phase"], status["step"]) == ("Succeeded", 3)
    assert chat(box).isdigit()
