from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from areal.services.http.metrics import Metrics

COUNT = """
from areal.services.http.metrics import Metrics
metrics = Metrics()
metrics.in_flight.inc()
metrics.requests.labels("/x", "200").inc()
"""


def test_processes_that_share_a_folder_are_added_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    env = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    for _ in range(2):
        subprocess.run([sys.executable, "-c", COUNT], env=env, check=True, timeout=60)
    (tmp_path / "gauge_livesum_0.db").touch()  # of a process that starts just now
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    text = Metrics().exposition().decode()
    assert 'areal_http_requests_total{route="/x",status="200"} 2.0' in text
    assert "areal_http_in_flight 2.0" in text


def test_folder_that_is_gone_has_nothing_to_add_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path / "gone"))
    assert Metrics().exposition() == b""
