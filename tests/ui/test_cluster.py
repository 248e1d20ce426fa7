"""The page over a home whose processes run on a real Slurm."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.cluster.slurm import NODES, SlurmCluster
from tests.e2e.conftest import Box
from tests.e2e.test_slurm import apply, box  # noqa: F401 - fixture
from tests.ui.conftest import Page, eventually, page_of

pytestmark = [pytest.mark.slurm, pytest.mark.extended]


@pytest.fixture
def page(box: Box) -> Iterator[Page]:  # noqa: F811
    apply(box)
    with page_of(box) as it:
        yield it


def test_page_shows_cluster_processes_and_cancelled_gateway(
    box: Box,  # noqa: F811
    page: Page,
    slurm_cluster: SlurmCluster,
) -> None:
    assert {row["status"]["phase"] for row in page.read("home")["objects"]} == {"Ready"}
    found = page.read("object", kind="model", name="reverse")
    assert {row["node"] for row in found["processes"]} <= set(NODES)
    assert all(row["cpuPercent"] is None and row["node"] in NODES for row in page.read("top")["processes"])
    assert page.read("logs", kind="model", name="reverse")["lines"]
    assert [row["state"] for row in page.read("weights")["replicas"]] == ["ready"]
    asked = {"service": "default", "model": "reverse", "messages": [{"role": "user", "content": "1234"}]}
    parts = page.ask("/api/chat", method="POST", body=json.dumps(asked).encode())[1].splitlines()
    assert json.loads(parts[-1])["finishReason"]
    assert "sessions" in page.read("sessions", kind="inferenceservice", name="default")
    slurm_cluster.command("scancel", box.processes()["gateway/0"]["jobId"])
    row = eventually(
        lambda: (it := page.read("home")["objects"][0])["status"]["phase"] not in ("Ready", "Progressing") and it, 60
    )
    assert row["status"]["message"]
    status, error = page.failure("sessions", kind="inferenceservice", name="default")
    assert status >= 400 and "it is " in error["message"], error
