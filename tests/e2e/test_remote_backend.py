"""A service and its model on a cluster: jobs that are placed later, at another address, and observed by their records
and their scheduler alone."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import ROOT, Box
from tests.runtime.remote_backend import NAME, NODE, SETTINGS_VARIABLE

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

    def chat(self, text: str) -> str:
        return self.box.ok("inf", "chat", "-m", text).out.strip()


@pytest.fixture
def cluster(box: Box, tmp_path: Path) -> Cluster:
    return Cluster(box, tmp_path)


def test_apply_chat_kill_and_delete_on_a_cluster(box: Box, cluster: Cluster) -> None:
    manifest = box.manifest(service=f"scheduler: {{type: {NAME}}}")

    out = box.ok("apply", "-f", manifest).out
    assert "inferenceservice/default created: Ready" in out and "model/reverse created: Ready" in out
    assert cluster.url == f"http://{cluster.address}:{box.port}"
    assert cluster.chat("1234").isdigit()
    assert "model/reverse unchanged" in box.ok("apply", "-f", manifest).out

    processes = box.processes()
    assert {row["node"] for row in processes.values()} == {NODE}
    assert processes["engine/0"]["jobId"] == f"job-{processes['engine/0']['uid']}"
    wide = box.ok("get", "processes", "-o", "wide").out
    assert NODE in wide and f"job-{processes['engine/0']['uid']}" in wide
    assert "started pid" in box.ok("logs", "model/reverse", "-c", "engine").out
    assert box.ok("doctor").code == 0

    os.kill(processes["engine/0"]["pid"], 9)
    box.ok("apply", "-f", manifest)
    assert cluster.chat("1234").isdigit()

    box.ok("delete", "inferenceservice/default", "--cascade", "--yes")
    assert box.living() == []
