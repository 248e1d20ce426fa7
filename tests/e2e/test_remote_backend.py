"""A service and its model on a cluster: jobs that are placed later, at another address, and observed by their records
and their scheduler alone."""

from __future__ import annotations

import json
import os
import re
import socket
from pathlib import Path
from typing import Any

import pytest

from areal.client.command import free_port
from areal.runtime import procfs
from tests.e2e.conftest import ROOT, Box
from tests.runtime.remote_backend import NAME, NODE, REASON, SETTINGS_VARIABLE

DRIVER = """
import os

def main(args):
    print("told", os.environ["AREAL_INFERENCE_ADDR"], "on", os.environ["AREAL_NODE_ADDRESS"], flush=True)
"""
ENTRY_POINT = f"[areal.backends]\n{NAME} = tests.runtime.remote_backend:RemoteBackend\n"


def own_address() -> str:
    """An address of this machine that is not loopback, where it has one: keys are asked for there."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return "127.0.0.2"
        return str(probe.getsockname()[0])


class Cluster:
    def __init__(self, box: Box, tmp: Path) -> None:
        package = tmp / "packages" / "areal_remote-1.0.dist-info"
        package.mkdir(parents=True)
        (package / "METADATA").write_text("Metadata-Version: 2.1\nName: areal-remote\nVersion: 1.0\n")
        (package / "entry_points.txt").write_text(ENTRY_POINT)
        self.box, self._file = box, tmp / "cluster.json"
        self.address = own_address()
        box.env |= {"PYTHONPATH": os.pathsep.join((str(package.parent), str(ROOT)))}
        box.env |= {SETTINGS_VARIABLE: str(self._file)}
        self.set()

    def set(self, **settings: Any) -> None:
        new = self._file.with_suffix(".new")
        new.write_text(json.dumps({"address": self.address, **settings}))
        new.rename(self._file)

    @property
    def url(self) -> str:
        return str(json.loads(self.box.ok("get", "inferenceservice/default", "-o", "json").out)["status"]["address"])

    def processes_of(self, uid: str) -> list[int]:
        """All of a run on its node, the node program first."""
        folder = f"{self.box.home}/clusters/{NAME}/runs/{uid}"
        found = []
        for stat in procfs.processes():
            environment = procfs.environment(stat.pid).get(procfs.RUN_DIR_VARIABLE, "")
            if environment == folder or folder in procfs.command_line(stat.pid):
                found.append(stat.pid)
        return sorted(found)

    def chat(self, text: str) -> str:
        return self.box.ok("inf", "chat", "--temperature", "0", "-m", text).out.strip()


@pytest.fixture
def cluster(box: Box, tmp_path: Path) -> Cluster:
    return Cluster(box, tmp_path)


@pytest.mark.extended
def test_cluster_supports_apply_chat_kill_and_delete(box: Box, cluster: Cluster) -> None:
    manifest = box.manifest(service=f"scheduler: {{type: {NAME}}}")

    out = box.ok("apply", "-f", manifest).out
    assert "inferenceservice/default created: Ready" in out and "model/reverse created: Ready" in out
    assert cluster.url == f"http://{cluster.address}:{box.port}"
    assert cluster.chat("1234").isdigit()

    wide = box.ok("get", "processes", "-o", "wide").out
    processes = box.processes()
    engine = processes["engine/0"]
    assert {row["node"] for row in processes.values()} == {NODE}
    assert engine["jobId"] == f"job-{engine['uid']}" and engine["jobId"] in wide and NODE in wide

    used = json.loads(box.ok("top", "-o", "json").out)[
        "items"
    ]  # the pids are of another machine, as far as areal knows
    assert {(row["cpuPercent"], row["memoryBytes"], row["processes"], row["node"]) for row in used} == {
        (None, None, None, NODE)
    }
    assert box.ok("top").out.count("Unknown") == 2 * len(used) == 8

    os.kill(engine["pid"], 9)
    box.ok("apply", "-f", manifest)
    assert box.ok("doctor").code == 0
    assert "started pid" in box.ok("logs", "model/reverse", "-c", "engine").out

    box.ok("delete", "inferenceservice/default", "--cascade", "--yes")
    assert box.living() == []


@pytest.mark.slow
def test_queue_is_shown_and_awaited(box: Box, cluster: Cluster) -> None:
    manifest = box.manifest(service=f"scheduler: {{type: {NAME}}}")
    greedy = box.manifest(service=f"scheduler: {{type: {NAME}}}", model="resources: {gpus: 3}", name="greedy.yaml")
    refused = box.areal("apply", "-f", greedy)
    assert refused.code == 10 and "no node has 3 GPUs" in refused.err and box.ok("get", "-o", "name").out == ""

    cluster.set(held=True)
    late = box.areal("apply", "-f", manifest, "--timeout", "5s")
    assert late.code == 7 and f": {REASON}" in late.err and "queued since" in late.err, late.text
    assert "queued" in box.ok("get", "processes").out
    page = box.ok("describe", "inferenceservice/default").out
    assert "router/0: queued since" in page and REASON in page
    waited = box.areal("wait", "inferenceservice/default", "--for", "ready", "--timeout", "1s")
    assert waited.code == 7 and REASON in waited.err

    cluster.set()
    box.ok("apply", "-f", manifest)
    assert cluster.chat("1234").isdigit()

    cluster.set(held=True)
    box.areal("scale", "model/reverse", "--replicas", "2", "--timeout", "5s")
    assert cluster.chat("1234").isdigit()
    box.ok("delete", "inferenceservice/default", "--cascade", "--yes")
    assert box.living() == []


@pytest.mark.slow
def test_lost_node_differs_from_silent_scheduler(box: Box, cluster: Cluster) -> None:
    manifest = box.manifest(service=f"scheduler: {{type: {NAME}}}", model="replicas: 2")
    box.ok("apply", "-f", manifest)
    before = box.processes()

    cluster.set(away=True)
    told = json.loads(box.ok("get", "model/reverse", "-o", "json").out)["status"]
    assert told["phase"] == "Unknown" and "the remote cluster does not answer" in json.dumps(told)
    refused = box.areal("delete", "model/reverse", "--yes")
    assert refused.code == 5 and "does not answer" in refused.text
    assert re.search(rf"remove clusters/{NAME}/runs/reverse-\S+ from the areal home", refused.text)
    changed = box.manifest(service=f"scheduler: {{type: {NAME}}}\nlogLevel: warning", model="replicas: 2", name="other")
    left = box.areal("apply", "-f", changed, "--yes")
    assert left.code == 9 and "inferenceservice/default configured: not converged: router/0 cannot be seen" in left.text
    assert box.areal("apply", "-f", manifest, "--yes").code == 9, "what runs there is not known"
    found = box.areal("doctor")
    assert found.code == 1 and "error: the remote cluster does not answer" in found.out.splitlines()
    cluster.set()
    assert box.pids() == {name: row["pid"] for name, row in before.items()}

    for pid in [pid for name in ("engine/1", "router/0") for pid in cluster.processes_of(before[name]["uid"])]:
        os.kill(pid, 9)
    cluster.set(cause="node-lost", address="127.0.0.2")  # what follows is placed elsewhere
    drift = box.areal("diff", "--drift")
    assert "node-lost" in drift.text, drift.text
    box.ok("apply", "-f", manifest)
    after = box.processes()
    assert after["engine/0"]["pid"] == before["engine/0"]["pid"]
    assert {after[name]["url"].split(":")[1] for name in ("engine/1", "router/0", "gateway/0")} == {"//127.0.0.2"}
    assert "unchanged" in box.ok("apply", "-f", manifest).out
    assert cluster.chat("1234").isdigit()
    box.ok("restart", "model/reverse")
    assert cluster.chat("1234").isdigit()


@pytest.mark.slow
def test_cluster_driver_gets_address_of_its_service(box: Box, cluster: Cluster) -> None:
    box.ok("apply", "-f", box.manifest(service=f"scheduler: {{type: {NAME}}}"))
    box.write(DRIVER, "told.py")
    job = box.write(
        "apiVersion: areal.dev/v1alpha1\nkind: TrainJob\nmetadata: {name: told}\nspec:\n"
        f"  scheduler: {{type: {NAME}}}\n  driver: told:main\n"
        "  rollout: {service: default, model: reverse}\n  resources: {gpus: 2}\n",
        "job.yaml",
    )
    box.ok("apply", "-f", job)
    box.ok("wait", "trainjob/told", "--for", "completed", "--timeout", "60s")
    log = box.ok("logs", "trainjob/told").out
    assert f"told http://{cluster.address}:{box.port}" in log and f"on {cluster.address}" in log


@pytest.mark.slow
def test_agents_of_a_cluster_answer_and_are_recorded(box: Box, cluster: Cluster) -> None:
    manifest = ("-f", str(ROOT / "manifests/agents.yaml"))
    ports = {"inferenceservice/default": free_port(), "agentservice/reverser": box.port}
    fields: dict[str, object] = {f"{ref}:spec.gateway.port": port for ref, port in ports.items()}
    fields |= {f"{ref}:spec.scheduler.type": NAME for ref in ports}
    sets = [word for path, value in fields.items() for word in ("--set", f"{path}={value}")]
    box.folder = ROOT
    out = box.ok("apply", *manifest, *sets).out
    assert f"agentservice/reverser created: Ready at http://{cluster.address}:{box.port}" in out
    assert box.ok("agent", "chat", "-m", "1234").out.strip()
    assert "agentservice/reverser unchanged" in box.ok("apply", *manifest, *sets).out
    box.ok("delete", *manifest, "--yes")
    assert box.living() == []
