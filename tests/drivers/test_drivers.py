"""Drivers written for AReaL, with a small local model and data set and not a line changed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from areal.state.job_metrics import steps_of
from tests.drivers.conftest import Service
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


def drive(
    name: str, config: str, gsm8k: Path, runs: Path, *overrides: str, service: Service | None = None
) -> list[dict]:
    """The metrics of a run of ``python name.py --config config key=value ...``."""
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    if service is not None:
        environment |= service.environment()
    data = (f"train_dataset.path={gsm8k}", f"valid_dataset.path={gsm8k}", f"cluster.fileroot={runs}")
    argv = [sys.executable, str(HERE / name), "--config", str(HERE / config), *SMALL, *data, *overrides]
    ran = subprocess.run(argv, env=environment, cwd=runs, capture_output=True, text=True, timeout=170)
    assert ran.returncode == 0, ran.stderr[-4000:]
    (metrics,) = runs.rglob("metrics.jsonl")
    return steps_of(metrics)


@pytest.mark.slow
def test_gsm8k_sft_runs_unchanged(tmp_path: Path, gsm8k: Path) -> None:
    lines = drive("gsm8k_sft.py", "gsm8k_sft.yaml", gsm8k, tmp_path, "valid_dataset.max_length=64")
    assert lines[-1]["step"] == 2 and lines[-1]["loss"] > 0


RL = (
    "actor.weight_update_mode=shm",
    "actor.ppo_n_minibatches=1",
    "gconfig.max_new_tokens=8",
    "gconfig.n_samples=2",
    "rollout.max_concurrent_rollouts=8",
)


@pytest.mark.extended
def test_gsm8k_rl_runs_unchanged(tmp_path: Path, gsm8k: Path, service: Service) -> None:
    lines = drive("gsm8k_rl.py", "gsm8k_grpo.yaml", gsm8k, tmp_path, *RL, service=service)
    assert [line["step"] for line in lines] == [1, 2]
    assert all(0.0 <= line["reward/mean"] <= 1.0 and line["staleness/max"] <= 2 for line in lines)
    assert sum(1 for _ in tmp_path.rglob("trajectories-0*.jsonl")) == 2


@pytest.mark.slow
def test_openai_client_agent_runs_unchanged(tmp_path: Path, gsm8k: Path, service: Service) -> None:
    lines = drive("gsm8k_agent.py", "gsm8k_grpo.yaml", gsm8k, tmp_path, *RL, service=service)
    assert [line["step"] for line in lines] == [1, 2]


@pytest.mark.slow
def test_multi_turn_workflow_runs_unchanged(tmp_path: Path, gsm8k: Path, service: Service) -> None:
    lines = drive("gsm8k_multi_turn.py", "gsm8k_grpo.yaml", gsm8k, tmp_path, *RL, service=service)
    assert [line["step"] for line in lines] == [1, 2]
    dumped = [json.loads(line) for file in tmp_path.rglob("trajectories-0*.jsonl") for line in file.open()]
    turns = {turn for each in dumped for one in each["interactions"] for turn in one["turn_ids"]}
    assert {-1, 0, 1} <= turns


@pytest.mark.slow
def test_custom_config_workflow_and_reward_train(tmp_path: Path, gsm8k: Path, service: Service) -> None:
    own = ("n_trajs=2", "weights={right: 0.5, length: 0.5}", "evaluator.freq_steps=1", "gconfig.n_samples=1")
    lines = drive("own_workflow.py", "gsm8k_grpo.yaml", gsm8k, tmp_path, *RL, *own, service=service)
    assert [line["step"] for line in lines] == [1, 2]
    assert all(0.0 <= line["rollout/own/reward"] <= 1.0 for line in lines)
    assert all(line["eval-rollout/own/reward"] == pytest.approx(line["eval/reward/mean"]) for line in lines)
    (metrics,) = tmp_path.rglob("metrics.jsonl")
    assert all(json.loads(line)["bottleneck"] for line in metrics.open())


@pytest.mark.slow
@pytest.mark.parametrize("style", ["individual", "concat"])
def test_workflow_with_own_openai_client_exports_its_rewards(
    tmp_path: Path, gsm8k: Path, service: Service, style: str
) -> None:
    own = (f"export_style={style}", "gconfig.n_samples=1", "train_dataset.max_length=null")
    lines = drive("own_client.py", "gsm8k_grpo.yaml", gsm8k, tmp_path, *RL, *own, service=service)
    assert [line["step"] for line in lines] == [1, 2]
    dumped = [json.loads(line) for file in tmp_path.rglob("trajectories-0*.jsonl") for line in file.open()]
    rows = {len(each["interactions"]) for each in dumped}
    assert rows == ({2} if style == "individual" else {1})  # two conversations of two calls
    assert {each["sample"] for each in dumped} == {0, 1}


@pytest.mark.slow
def test_preference_reward_model_runs_unchanged(tmp_path: Path) -> None:
    for split, count in (("train", 8), ("test", 4)):
        pairs = [{"chosen": f"{n}={str(n)[::-1]}", "rejected": f"{n}=0000"} for n in range(1234, 1234 + count)]
        (tmp_path / "hh").mkdir(exist_ok=True)
        (tmp_path / "hh" / f"{split}.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    (tmp_path / "runs").mkdir()
    words = ("train_dataset.type=rw", "valid_dataset.type=rw")
    lines = drive("hh_rw.py", "gsm8k_sft.yaml", tmp_path / "hh", tmp_path / "runs", *words)
    assert lines[-1]["step"] == 2 and 0.0 <= lines[-1]["accuracy"] <= 1.0


@pytest.mark.slow
def test_agent_in_gymnasium_environment_trains(tmp_path: Path, gsm8k: Path, service: Service) -> None:
    lines = drive(
        "reversing_env.py", "gsm8k_grpo.yaml", gsm8k, tmp_path, *RL, "train_dataset.max_length=null", service=service
    )
    assert [line["step"] for line in lines] == [1, 2]


@pytest.mark.slow
def test_gsm8k_parquet_trains_with_broadcast_weights(tmp_path: Path, gsm8k: Path, service: Service) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    for split in ("train", "test"):
        rows = [json.loads(line) for line in (gsm8k / f"{split}.jsonl").open()]
        (tmp_path / "data" / "main").mkdir(parents=True, exist_ok=True)
        parquet.write_table(arrow.Table.from_pylist(rows), tmp_path / "data/main" / f"{split}-00000-of-00001.parquet")
    (tmp_path / "runs").mkdir()
    words = [word for word in RL if "weight_update_mode" not in word]  # as the file has it: xccl
    lines = drive("gsm8k_rl.py", "gsm8k_grpo.yaml", tmp_path / "data", tmp_path / "runs", *words, service=service)
    assert [line["step"] for line in lines] == [1, 2]


@pytest.mark.slow
def test_areal_lite_overrides_reach_driver(tmp_path: Path, gsm8k: Path, service: Service) -> None:
    """``python -m areal.cli.main train run ...``, everything set by overrides of the nested form."""
    (tmp_path / "lite.yaml").write_text("experiment_name: lite\ntrial_name: t\n")
    words = (
        "trainer.type=grpo",
        f"trainer.grpo.actor.path={MODEL}",
        "trainer.grpo.actor.dtype=float32",
        "trainer.grpo.actor.weight_update_mode=shm",
        "trainer.grpo.actor.kl_ctl=0.0",
        "trainer.grpo.actor.optimizer={lr: 1e-4}",
        "trainer.grpo.async_training=true",
        "trainer.grpo.gconfig.n_samples=2",
        "trainer.grpo.gconfig.max_new_tokens=8",
        "trainer.grpo.reward_fn=areal.reward.gsm8k:gsm8k_reward_fn",
        "allocation_mode=sglang.d1p1m1+d1p1m1",
        "min_required_servers=1",
        "shutdown_server_on_exit=false",
        "mode=torchrun",
        "total_train_steps=2",
        f"train_dataset.path={gsm8k}",
        "train_dataset.batch_size=2",
        f"rollout.gateway_addr={service.gateway.url}",
        f"rollout.admin_api_key_file={service.key_file}",
        "rollout.model=m",
    )
    argv = [sys.executable, "-m", "areal.cli.main", "train", "run", "--config", str(tmp_path / "lite.yaml"), *words]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    home = tmp_path / "home"
    environment["AREAL_HOME"] = str(home)
    ran = subprocess.run(argv, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=170)
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-2000:]
    assert [line["step"] for line in steps_of(home / "jobs" / "lite-t" / "metrics.jsonl")] == [1, 2]
