"""Two ranks, started as a job starts them: the steps of one rank, and checkpoints that either number goes on from."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from areal.client.command import free_port
from areal.state.job_metrics import steps_of
from areal.training.checkpoints import Checkpoints
from areal.trajectories.reading import read_episodes
from tests.services.processes import Processes
from tests.services.weight_update.conftest import embedded_worker
from tests.training.trainers.reversing import MODEL, prompts, solved

REPOSITORY = Path(__file__).parents[3]
SFT = """
experiment_name: ranks
trial_name: sft
total_train_steps: 6
train_dataset: {{path: {folder}/rows.jsonl, batch_size: 16}}
recover: {{mode: auto, freq_steps: 3}}
model: {{path: {model}, dtype: float32, optimizer: {{lr: 5.0e-4}}, mb_spec: {{max_tokens_per_mb: 64}}}}
"""
GRPO = """
experiment_name: ranks
trial_name: grpo
total_train_steps: 4
tokenizer_path: {model}
train_dataset: {{path: {folder}/prompts.jsonl, batch_size: 8}}
reward_fn: tests.training.trainers.rewards:reversed_digits
gconfig: {{n_samples: 4, max_new_tokens: 8}}
rollout: {{model: m, max_head_offpolicyness: 0, max_concurrent_rollouts: 16}}
recover: {{mode: auto, freq_steps: 2}}
actor:
  path: {model}
  dtype: float32
  backend: "fsdp:d2"
  weight_update_mode: shm
  optimizer: {{lr: 3.0e-4}}
  ppo_n_minibatches: 2
  use_decoupled_loss: true
  kl_ctl: 0.0
  reward_norm: {{mean_level: group, std_level: group, group_size: 4}}
"""


def run(
    kind: str,
    ranks: int,
    folder: Path,
    *overrides: str,
    env: dict[str, str] | None = None,
    nodes: int = 1,
    drivers: str = "areal.training.drivers",
) -> list[dict[str, Any]]:
    """Its metrics. With ``nodes`` as a cluster starts it: ``ranks`` by a launcher on each, which meet at the address of
    this machine."""
    started = ["areal.training.launch", "--processes", str(ranks), "--"] if ranks * nodes > 1 else ["areal.training"]
    words = ["--driver", f"{drivers}:{kind}", "--", "--config", str(folder / f"{kind}.yaml"), *overrides]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "AREAL_RUN_FOLDER": str(folder / "run"), **(env or {})}
    if nodes > 1:
        meeting = ["--nodes", str(nodes), "--run", "one", "--port", str(free_port())]
        started = [*started[:-1], *meeting, "--"]
        variables |= dict.fromkeys(("AREAL_FIRST_NODE", "AREAL_NODE_ADDRESS"), own_ip())

    def launch(node: int) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", *started, *words],
            cwd=REPOSITORY,
            env={**variables, "AREAL_NODE_RANK": str(node)},
            capture_output=True,
            text=True,
            timeout=240,
        )

    with ThreadPoolExecutor() as launchers:
        ends = list(launchers.map(launch, range(nodes)))
    assert all(done.returncode == 0 for done in ends), "\n".join(done.stderr for done in ends)
    return steps_of(folder / "run" / "metrics.jsonl")


def own_ip() -> str:
    """The address of this machine that is not loopback, where it has one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # nothing is sent
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])


def _folder(tmp_path: Path, name: str) -> Path:
    folder = tmp_path / name
    folder.mkdir()
    rows = {"rows": solved(64), "prompts": prompts(64)}
    for what, given in rows.items():
        (folder / f"{what}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in given))
    (folder / "sft.yaml").write_text(SFT.format(folder=folder, model=MODEL))
    (folder / "grpo.yaml").write_text(GRPO.format(folder=folder, model=MODEL))
    return folder


def _cut_to(folder: Path, step: int) -> None:
    """As if the run had been killed after that checkpoint."""
    for checkpoint in Checkpoints(folder / "run" / "checkpoints").all():
        if checkpoint.step > step:
            shutil.rmtree(checkpoint.folder)


@pytest.mark.slow
def test_two_ranks_match_one_and_resume_each_other(tmp_path: Path) -> None:
    one, two = _folder(tmp_path, "one"), _folder(tmp_path, "two")
    curves = [[line["loss"] for line in run("sft", ranks, folder)] for ranks, folder in ((1, one), (2, two))]
    assert len(curves[0]) == 6
    assert curves[1] == pytest.approx(curves[0], rel=1e-4)
    for ranks, folder in ((2, one), (1, two)):
        _cut_to(folder, 3)
        lines = run("sft", ranks, folder)
        assert [line["loss"] for line in lines] == pytest.approx(curves[0], rel=1e-4)
        norms = [line["grad_norm"] for line in lines]
        assert all(norm > 0 for norm in norms)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_nodes_match_one_and_one_resumes_them(tmp_path: Path) -> None:
    folder = _folder(tmp_path, "two")
    curve = [line["loss"] for line in run("sft", 1, folder, nodes=2)]
    _cut_to(folder, 3)
    resumed = [line["loss"] for line in run("sft", 1, folder)]
    assert len(curve) == 6 and resumed == pytest.approx(curve, rel=1e-4)


@pytest.fixture
def service(tmp_path: Path) -> Iterator[dict[str, str]]:
    processes = Processes(tmp_path)
    try:
        _, proxy = embedded_worker(processes, "--state-dir", str(tmp_path / "journal"))
        router = processes.router()
        gateway = processes.gateway(router)
        processes.register(router, proxy, model="m")
        yield {"AREAL_INFERENCE_ADDR": gateway.url, "AREAL_INFERENCE_KEY_FILE": str(processes.key_file)}
    finally:
        processes.stop()


@pytest.mark.slow
def test_grpo_resumes_with_other_rank_counts(tmp_path: Path, service: dict[str, str]) -> None:
    folder = _folder(tmp_path, "run")
    lines: list[dict[str, Any]] = []
    for ranks, steps in ((2, 4), (1, 6), (2, 8)):
        words = (f"total_train_steps={steps}", f"actor.backend=fsdp:d{ranks}", "rollout.dump_to_file=true")
        lines = run("grpo", ranks, folder, *words, env=service)
        assert lines[-1]["step"] == steps
    assert [line["prompts/consumed"] for line in lines] == [8.0 * step for step in range(1, 9)]
    assert max(line["staleness/max"] for line in lines) == 0
    written = list(read_episodes(folder / "run" / "trajectories"))
    assert {each.step for each in written} == set(range(1, 9)) and len({each.group for each in written}) == 64
    assert all(row.advantage is not None for each in written for row in each.interactions), "of both ranks"
    versions = [line["version"] for line in lines]
    assert versions == sorted(set(versions))
    assert all(abs(line["mismatch_kl"]) < 1e-4 for line in lines), "the engine samples from what both ranks hold"
    newest = Checkpoints(folder / "run" / "checkpoints").newest()
    assert newest is not None
    prompts_state = newest.state()["algorithm"]["prompts"]
    assert prompts_state["frontier"] + len(prompts_state["beyond"]) == 64


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_grpo_broadcasts_weights_across_nodes_and_tensor_ranks(tmp_path: Path, service: dict[str, str]) -> None:
    """The engine's process meets the trainer at an address that is not loopback."""
    folder = _folder(tmp_path, "run")
    for backend, nodes, ranks, steps in (("fsdp:d2", 2, 1, 2), ("fsdp:d1t2", 1, 2, 4)):
        words = (f"total_train_steps={steps}", f"actor.backend={backend}", "actor.weight_update_mode=xccl")
        lines = run("grpo", ranks, folder, *words, env=service, nodes=nodes)
        assert lines[-1]["step"] == steps
    assert [line["prompts/consumed"] for line in lines] == [8.0 * step for step in range(1, 5)]
    assert all(abs(line["mismatch_kl"]) < 1e-4 for line in lines), "the engine samples from what the ranks hold"


@pytest.mark.slow
@pytest.mark.megatron
@pytest.mark.timeout(900)
@pytest.mark.parametrize("layout", ["d1t2"])
def test_grpo_learns_with_megatron(tmp_path: Path, service: dict[str, str], layout: str) -> None:
    pytest.importorskip("megatron.core", reason="megatron-core is not installed: pip install -e '.[megatron]'")
    folder, backend, drivers = _folder(tmp_path, "run"), f"megatron:{layout}", "tests.training.engines.megatron_drivers"
    run("sft", 2, folder, f"model.backend={backend}", *WARM_UP, drivers=drivers)
    shutil.move(folder / "run", folder / "warm")
    words = (f"actor.backend={backend}", f"actor.path={folder / 'warm' / 'models' / 'step_45'}", "total_train_steps=40")
    lines = run("grpo", 2, folder, *words, *RATHER_LONG, env=service, drivers=drivers)
    assert all(abs(line["mismatch_kl"]) < 1e-4 for line in lines), "the engine samples from what the ranks hold"
    rewards = [line["reward/mean"] for line in lines]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.2, rewards


WARM_UP = ("total_train_steps=45", "model.optimizer.lr=2e-3", "train_dataset.batch_size=64", "saver.freq_steps=45")
RATHER_LONG = (
    "train_dataset.batch_size=16",
    "gconfig.n_samples=8",
    "actor.ppo_n_minibatches=1",
    "recover.freq_steps=20",
)
