"""A training job while its servers come, go and are killed: it goes on, and what it trained on is what it says."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.e2e.conftest import MODEL, ROOT, Box
from tests.services.processes import wait_until

BATCH, STEPS, ETA = 4, 24, 2

# The shipped GRPO driver, which keeps what it published and what it trained on. It takes its time: there are faults to
# be had meanwhile.
DRIVER = """
import os, time
import torch
from pathlib import Path
from safetensors.torch import save_file
from areal.api.cli_args import GRPOConfig, load_expr_config
from areal.dataset import get_custom_dataset
from areal.training.drivers import _workflow
from areal.training.trainers.ppo import PPOTrainer

FOLDER = Path(os.environ["AREAL_RUN_FOLDER"])
ATTEMPT = int(os.environ["AREAL_ATTEMPT"])


class Recorded(PPOTrainer):
    def _publish(self, sample, version=None):
        number = self.step if version is None else version
        held = {name: tensor.clone() for name, tensor in self.actor.named_tensors(torch.float32)}
        (FOLDER / "versions").mkdir(exist_ok=True)
        save_file(held, FOLDER / "versions" / f"{ATTEMPT:02d}-{number:03d}.safetensors")
        return super()._publish(sample, version)

    def train_step(self):
        time.sleep(0.25)
        taken, version = [], self.rollout.get_version()
        take = self.source.take
        self.source.take = lambda: taken.append(take()) or taken[-1]
        try:
            metrics = super().train_step()
        finally:
            self.source.take = take
        (FOLDER / "trained").mkdir(exist_ok=True)
        columns = ("input_ids", "attention_mask", "loss_mask", "logprobs", "versions")
        kept = {name: taken[0].batch[name] for name in columns}
        aside = FOLDER / "trained" / "aside"
        positions = list(taken[0].positions)
        torch.save({"batch": kept, "positions": positions, "attempt": ATTEMPT, "version": version}, aside)
        aside.rename(FOLDER / "trained" / f"{ATTEMPT:02d}-{self.step:03d}.pt")
        return metrics


def main(args):
    config, _ = load_expr_config(args, GRPOConfig)
    rows = get_custom_dataset("train", config.train_dataset, None, type="rl")
    with Recorded(config, rows, None) as trainer:
        trainer.train(**_workflow(config))
"""

BACKOFF = "restart: {backoff: {initialSeconds: 0.5, jitter: 0}}"
CONFIG = f"""
experiment_name: elastic
trial_name: t
seed: 1
total_train_steps: {STEPS}
tokenizer_path: ${{actor.path}}
driver: recorded:main
train_dataset: {{path: {ROOT}/examples/reverse_digits/train.jsonl, batch_size: {BATCH}}}
reward_fn: examples.reverse_digits.reward:reversed_digits
gconfig: {{n_samples: 4, max_new_tokens: 8, temperature: 1.0}}
rollout: {{model: reverse, max_head_offpolicyness: {ETA}, max_concurrent_rollouts: 8}}
actor:
  path: {MODEL}
  backend: fsdp:d1
  dtype: float32
  weight_update_mode: MODE
  optimizer: {{lr: 3.0e-4, weight_decay: 0.0}}
  kl_ctl: 0.0
  reward_norm: {{mean_level: group, std_level: group, group_size: 4}}
recover: {{mode: auto, freq_steps: 5}}
"""


class Run:
    """A job that trains the model of a service, both on this box."""

    def __init__(self, box: Box, mode: str, replicas: int) -> None:
        self.box = box
        self.folder = box.home / "jobs" / "learn"
        box.write(DRIVER, "recorded.py")
        box.write(CONFIG.replace("MODE", mode), "grpo.yaml")
        job = (
            "---\napiVersion: areal.dev/v1alpha1\nkind: TrainJob\nmetadata: {name: learn}\nspec:\n  config: grpo.yaml\n"
            "  rollout: {service: default, model: reverse}\n"
            f"  env: {{OMP_NUM_THREADS: '1', PYTHONPATH: '{ROOT}'}}\n"
            "  restart: {policy: OnFailure, maxRestarts: 3, backoff: {initialSeconds: 0.1, jitter: 0}}\n"
        )
        manifest = Path(box.manifest(model=f"replicas: {replicas}\n{BACKOFF}"))
        manifest.write_text(manifest.read_text() + job)
        box.ok("apply", "-f", str(manifest))

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.box.areal("train", "status", "learn", "--json").out)
        return found

    def reached(self, step: int) -> None:
        """Wait until it has trained ``step`` steps, in whatever attempt."""
        trained = self.folder / "trained"

        def steps() -> list[int]:
            return [int(path.stem[3:]) for path in trained.glob("*.pt")]

        wait_until(lambda: max(steps(), default=0) >= step, 120, f"step {step}")

    def trained(self) -> list[dict[str, Any]]:
        """What each step of the final weights was trained on, in order: of a step that was done again, the last."""
        latest = {path.stem[3:]: path for path in sorted((self.folder / "trained").glob("*.pt"))}
        return [torch.load(latest[step], weights_only=False) for step in sorted(latest)]

    def kill(self, process: str) -> None:
        os.kill(self.box.pids()[process], signal.SIGKILL)


def check(run: Run, attempts: int = 1) -> None:
    run.box.ok("wait", "trainjob/learn", "--for", "completed", "--timeout", "250s")
    now = run.status()
    output = run.box.areal("train", "logs", "learn", "-n", "60").out + run.box.areal("logs", "model/reverse").out
    assert (now["phase"], now["step"], now["attempt"]) == ("Succeeded", STEPS, attempts), output
    steps = run.trained()
    positions = [position for step in steps for position in step["positions"]]
    assert len(positions) == len(set(positions)) == STEPS * BATCH, "none is lost, none trained on twice"
    for step in steps:
        mask = step["batch"]["loss_mask"].bool()
        versions = step["batch"]["versions"][mask]
        assert step["version"] - ETA <= int(versions.min()) <= int(versions.max()) <= step["version"]
        _check_logprobs(run, step, mask)


@torch.no_grad()
def _check_logprobs(run: Run, step: dict[str, Any], mask: torch.Tensor) -> None:
    """Each token's log-probability is that of the version which it carries, by a plain forward pass."""
    batch, attempt = step["batch"], step["attempt"]
    for version in batch["versions"][mask].unique().tolist():
        logits = _model(run, attempt, version)(
            input_ids=batch["input_ids"], attention_mask=batch["attention_mask"].long()
        ).logits
        told = torch.log_softmax(logits[:, :-1].float(), -1).gather(2, batch["input_ids"][:, 1:, None])[..., 0]
        ours = mask[:, 1:] & (batch["versions"][:, 1:] == version)
        gap = (told - batch["logprobs"][:, 1:])[ours].abs().max()
        assert gap < 1e-3, f"version {version} did not sample this: {gap}"


def _model(run: Run, attempt: int, version: int) -> Any:
    loaded = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    loaded.load_state_dict(
        load_file(run.folder / "versions" / f"{attempt:02d}-{version:03d}.safetensors"), strict=False
    )
    loaded.tie_weights()
    return loaded


def _scale(run: Run) -> None:
    run.box.ok("scale", "model/reverse", "--replicas", "3")
    run.reached(12)
    run.box.ok("scale", "model/reverse", "--replicas", "1")


def _engine(run: Run) -> None:
    run.kill("engine/0")


def _data_proxy(run: Run) -> None:
    run.kill("data-proxy/0")


def _router(run: Run) -> None:
    run.kill("router/0")
    run.reached(14)
    run.kill("engine/0")  # its successor is found by a router that has the list of workers


def _both(run: Run) -> None:
    run.kill("engine/0")
    run.reached(14)
    run.kill("data-proxy/1")


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("trouble", "mode", "replicas"),
    [
        pytest.param(_engine, "shm", 1, marks=pytest.mark.slow),
        pytest.param(_data_proxy, "shm", 1, marks=pytest.mark.slow),
        pytest.param(_data_proxy, "xccl", 2, marks=pytest.mark.slow),
        pytest.param(_both, "disk", 2, marks=pytest.mark.slow),
        pytest.param(_router, "shm", 1, marks=pytest.mark.slow),
        pytest.param(_scale, "shm", 1, marks=pytest.mark.slow),
        pytest.param(_scale, "disk", 2, marks=pytest.mark.slow),
        pytest.param(_scale, "xccl", 1, marks=pytest.mark.slow),
    ],
)
def test_job_survives_server_trouble_and_trains_each_prompt_once(
    box: Box, trouble: Callable[[Run], None], mode: str, replicas: int
) -> None:
    run = Run(box, mode, replicas)
    run.reached(6)
    trouble(run)
    check(run)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("mode", ["shm", "disk"])
def test_job_with_killed_trainer_keeps_its_servers(box: Box, mode: str) -> None:
    run = Run(box, mode, 1)
    servers = {name: pid for name, pid in run.box.pids().items() if name != "driver/0"}
    run.reached(8)
    run.kill("driver/0")
    check(run, attempts=2)
    assert {name: pid for name, pid in run.box.pids().items() if name in servers} == servers
