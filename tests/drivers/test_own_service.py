"""``python driver.py`` and nothing else: the service that the configuration lays out comes and goes with the run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from areal.errors import NoCapacity
from areal.state.job_metrics import steps_of
from tests.drivers.test_drivers import HERE, RL, SMALL
from tests.services.processes import REPOSITORY

pytestmark = pytest.mark.slow


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("AREAL_")}
    return {
        **kept,
        "PYTHONPATH": str(REPOSITORY),
        "OMP_NUM_THREADS": "1",
        "AREAL_HOME": str(tmp_path / "home"),
    }


def argv(gsm8k: Path, runs: Path, *overrides: str) -> list[str]:
    data = (f"train_dataset.path={gsm8k}", f"valid_dataset.path={gsm8k}", f"cluster.fileroot={runs}")
    words = (*SMALL, *RL, *data, "rollout.backend=embedded:d1", *overrides)
    return [sys.executable, str(HERE / "gsm8k_rl.py"), "--config", str(HERE / "gsm8k_grpo.yaml"), *words]


def objects(environment: dict[str, str]) -> list[str]:
    words = [sys.executable, "-m", "areal.cli.main", "get", "--all", "-o", "name"]
    ran = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=60, check=True)
    return ran.stdout.split()


def test_driver_without_service_starts_and_removes_its_own(
    tmp_path: Path, gsm8k: Path, environment: dict[str, str]
) -> None:
    ran = subprocess.run(argv(gsm8k, tmp_path), env=environment, capture_output=True, text=True, timeout=170)
    assert ran.returncode == 0, ran.stderr[-4000:]
    (metrics,) = tmp_path.rglob("metrics.jsonl")
    assert [line["step"] for line in steps_of(metrics)] == [1, 2]
    assert objects(environment) == []


@pytest.mark.timeout(400)
def test_run_after_killed_one_gets_service_again(tmp_path: Path, gsm8k: Path, environment: dict[str, str]) -> None:
    words = argv(gsm8k, tmp_path, "total_train_steps=10000")
    with subprocess.Popen(words, env=environment, stderr=subprocess.PIPE, text=True) as driver:
        assert driver.stderr is not None
        assert any(line.startswith("step ") for line in driver.stderr), "it has not trained"
        driver.send_signal(signal.SIGKILL)
    words = argv(gsm8k, tmp_path, "rollout.shutdown_server_on_exit=true")
    ran = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=170)
    assert ran.returncode == 0, ran.stderr[-4000:]
    assert objects(environment) == []


def test_unstartable_engine_is_one_line_without_leftovers(
    tmp_path: Path, gsm8k: Path, environment: dict[str, str]
) -> None:
    words = argv(gsm8k, tmp_path, "rollout.backend=sglang:d1")
    without = {**environment, "CUDA_VISIBLE_DEVICES": ""}
    ran = subprocess.run(words, env=without, capture_output=True, text=True, timeout=170)
    assert ran.returncode == NoCapacity.exit_code, ran.stderr[-4000:]
    assert "Traceback" not in ran.stderr
    assert "error: the run's own inference service, areal inf run: Model/gsm8k-grpo-trial0 needs 1 GPUs" in ran.stderr
    assert objects(environment) == []
