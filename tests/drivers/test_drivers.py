"""Drivers written for AReaL, with a small local model and data set and not a line changed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from areal.training.metrics import read_metrics
from tests.drivers.conftest import House
from tests.services.processes import REPOSITORY

HERE = Path(__file__).parent
MODEL = REPOSITORY / "examples" / "reverse_digits" / "model"
SMALL = (
    "actor.backend=fsdp:d1",
    f"actor.path={MODEL}",
    "actor.dtype=float32",
    "actor.gradient_checkpointing=false",
    "+total_train_steps=2",
    "train_dataset.batch_size=4",
    "valid_dataset.batch_size=4",
)


@pytest.fixture(scope="module")
def gsm8k(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of GSM8K's form that the small model can spell."""
    folder = tmp_path_factory.mktemp("gsm8k")
    for split, count in (("train", 12), ("test", 4)):
        rows = [
            {"question": str(number), "answer": f"#### {str(number)[::-1]}"} for number in range(1234, 1234 + count)
        ]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def drive(name: str, config: str, gsm8k: Path, runs: Path, *overrides: str, house: House | None = None) -> list[dict]:
    """The metrics of a run of ``python name.py --config config key=value ...``."""
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    if house is not None:
        environment |= house.environment()
    data = (f"train_dataset.path={gsm8k}", f"valid_dataset.path={gsm8k}", f"cluster.fileroot={runs}")
    argv = [sys.executable, str(HERE / name), "--config", str(HERE / config), *SMALL, *data, *overrides]
    ran = subprocess.run(argv, env=environment, cwd=runs, capture_output=True, text=True, timeout=170)
    assert ran.returncode == 0, ran.stderr[-4000:]
    (metrics,) = runs.rglob("metrics.jsonl")
    return read_metrics(metrics)


@pytest.mark.slow
def test_gsm8k_sft_runs_as_it_is(tmp_path: Path, gsm8k: Path) -> None:
    lines = drive("gsm8k_sft.py", "gsm8k_sft.yaml", gsm8k, tmp_path, "valid_dataset.max_length=64")
    assert lines[-1]["step"] == 2 and lines[-1]["loss"] > 0


RL = (
    "actor.weight_update_mode=shm",
    "actor.ppo_n_minibatches=1",
    "gconfig.max_new_tokens=8",
    "gconfig.n_samples=2",
    "rollout.max_concurrent_rollouts=8",
)


def test_gsm8k_rl_runs_as_it_is(tmp_path: Path, gsm8k: Path, house: House) -> None:
    lines = drive("gsm8k_rl.py", "gsm8k_grpo.yaml", gsm8k, tmp_path, *RL, house=house)
    assert [line["step"] for line in lines] == [1, 2]
    assert all(0.0 <= line["reward/mean"] <= 1.0 and line["staleness/max"] <= 2 for line in lines)
    assert sum(1 for _ in tmp_path.rglob("trajectories-v*.jsonl")) == 2


@pytest.mark.slow
def test_agent_of_openais_client_runs_as_it_is(tmp_path: Path, gsm8k: Path, house: House) -> None:
    lines = drive("gsm8k_agent.py", "gsm8k_grpo.yaml", gsm8k, tmp_path, *RL, house=house)
    assert [line["step"] for line in lines] == [1, 2]
