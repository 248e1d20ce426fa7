"""A service and its model on a backend that another package brings: only its entry point says that it is there."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.e2e.conftest import ROOT, Box
from tests.runtime.second_backend import NAME, NODE

ENTRY_POINT = f"[areal.backends]\n{NAME} = tests.runtime.second_backend:SecondBackend\n"


@pytest.mark.slow  # test_remote_backend.py has the same of a backend that differs more
def test_apply_get_logs_and_delete_on_a_second_backend(box: Box, tmp_path: Path) -> None:
    package = tmp_path / "packages" / "areal_second-1.0.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: areal-second\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text(ENTRY_POINT)
    box.env["PYTHONPATH"] = os.pathsep.join((str(package.parent), str(ROOT)))
    manifest = box.manifest(service=f"scheduler: {{type: {NAME}}}")

    out = box.ok("apply", "-f", manifest).out
    assert f"inferenceservice/default created: Ready at {box.url}" in out and "model/reverse created: Ready" in out
    assert box.chat("1234").isdigit()
    assert "model/reverse unchanged" in box.ok("apply", "-f", manifest).out

    processes = box.processes()
    assert set(processes) == {"router/0", "gateway/0", "engine/0", "data-proxy/0"}
    assert {row["node"] for row in processes.values()} == {NODE}
    assert processes["engine/0"]["jobId"] == f"job-{processes['engine/0']['uid']}"
    runs = {path.name for path in (box.home / "second" / "runs").iterdir()}
    assert runs == {row["uid"] for row in processes.values()}
    assert not list((box.home / "runs").iterdir())

    assert "started pid" in box.ok("logs", "model/reverse", "-c", "engine").out
    assert box.ok("doctor").code == 0
    os.kill(processes["engine/0"]["pid"], 9)
    box.ok("apply", "-f", manifest)
    assert box.chat("1234").isdigit()

    box.ok("delete", "inferenceservice/default", "--cascade", "--yes")
    assert box.living() == []
    assert not list((box.home / "second" / "runs").iterdir())
    assert json.loads(box.ok("get", "-o", "json").out)["items"] == []


def test_apply_with_missing_backend_changes_nothing(box: Box) -> None:
    refused = box.areal("apply", "-f", box.manifest(service=f"scheduler: {{type: {NAME}}}"))

    assert refused.code == 3 and f'"{NAME}" is not one of local, ray, slurm' in refused.text
    assert box.ok("get", "-o", "name").out == ""
