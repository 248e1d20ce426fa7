"""``kill -9`` of a trainer at any moment: it goes on by itself from its newest checkpoint, and the run ends as if
nothing had been. The driver notes the prompts that each step trained on; a step that is taken again counts once, as
last taken."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from areal.state.job_metrics import steps_of
from areal.training.checkpoints import Checkpoint
from tests.e2e.conftest import MODEL, Box

BATCH = 8
DRIVER = """
import json, os
from pathlib import Path

from areal import PPOTrainer, load_expr_config
from areal.api.cli_args import GRPOConfig

class Noting(PPOTrainer):
    def recover(self):
        resumed = super().recover()
        if not self.ranks.is_first:
            return resumed
        tell, notes = self.source.consumed, Path(os.environ["AREAL_RUN_FOLDER"], "notes.jsonl").open("a")
        def consumed(positions, step):
            tell(positions, step)
            line = {"step": step, "positions": positions, "version": self.actor.version}
            notes.write(json.dumps(line) + "\\n")
            notes.flush()
        self.source.consumed = consumed
        return resumed

def rows():
    asked = [f"{number:04d}" for number in range(0, 10000, 7)]
    return [{"messages": [{"role": "user", "content": text}], "answer": text[::-1]} for text in asked]

def reward(prompt, completions, prompt_ids, completion_ids, **data):
    return float(completions.strip() == data["answer"])

def main(args):
    config, _ = load_expr_config(args, GRPOConfig)
    kwargs = {"reward_fn": "noting:reward", "gconfig": config.gconfig, "tokenizer": config.actor.path}
    with Noting(config, rows()) as trainer:
        trainer.train(workflow="areal.workflow.rlvr:RLVRWorkflow", workflow_kwargs=kwargs)
"""
CONFIG = """
experiment_name: killed
trial_name: t
total_train_steps: {steps}
train_dataset: {{batch_size: {batch}}}
gconfig: {{n_samples: 4, max_new_tokens: 8}}
rollout: {{model: reverse, max_head_offpolicyness: 2, max_concurrent_rollouts: 16}}
actor:
  path: {model}
  dtype: float32
  weight_update_mode: {mode}
  optimizer: {{lr: 3.0e-4, beta2: 0.95, warmup_steps_proportion: 0.0}}
  ppo_n_minibatches: 1
  kl_ctl: 0.0
  reward_norm: {{mean_level: group, std_level: group, group_size: 4}}
recover: {{mode: auto, freq_steps: 3}}
"""
JOB = """
---
apiVersion: areal.dev/v1alpha1
kind: TrainJob
metadata: {{name: {name}}}
spec:
  driver: noting:main
  config: config.yaml
  rollout: {{service: default, model: reverse}}
  restart: {{policy: OnFailure, maxRestarts: 40, backoff: {{initialSeconds: 0.1, maxSeconds: 0.1, jitter: 0}}}}
  resources: {{processesPerNode: {ranks}}}
  env: {{OMP_NUM_THREADS: "1"}}
"""


@dataclass
class Job:
    """A job that runs, and how far it has come."""

    box: Box
    name: str
    steps: int

    @property
    def folder(self) -> Path:
        return self.box.home / "jobs" / self.name

    def processes(self) -> dict[int, int | None]:
        """Its driver, or the launcher and the ranks: their pids, and the rank of each."""
        found: dict[int, int | None] = {}
        for entry in Path("/proc").iterdir():
            try:
                ours = b"-m\0areal.training" in (entry / "cmdline").read_bytes()
                environ = (entry / "environ").read_bytes().decode(errors="replace").split("\0")
            except OSError:
                continue
            if ours and f"AREAL_RUN_FOLDER={self.folder}" in environ:
                rank = next((value[5:] for value in environ if value.startswith("RANK=")), None)
                found[int(entry.name)] = int(rank) if rank is not None else None
        return found

    def pid(self) -> int:
        """Of its driver, once there is one."""
        return next(iter(self.processes()), 0)

    def notes(self) -> list[dict[str, Any]]:
        """A line that was cut off is none."""
        try:
            lines = (self.folder / "notes.jsonl").read_text().splitlines()
        except FileNotFoundError:
            return []
        return [json.loads(line) for line in lines if line.endswith("}")]

    def kill(self, moment: Callable[[Job], object]) -> None:
        """At that moment of the attempt that runs, or is about to."""
        pid = until(self.pid)
        moment(self)
        os.kill(pid, signal.SIGKILL)
        until(lambda: self.pid() != pid)


def until(ready: Callable[[], Any], seconds: float = 200.0) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := ready()):
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.002)
    return found


def after_steps(job: Job, more: int = 1) -> None:
    known = len(job.notes())
    until(lambda: len(job.notes()) >= known + more)


def writing_a_checkpoint(job: Job) -> None:
    folder = job.folder / "checkpoints"
    stale = set(folder.glob("*.tmp"))  # of the one that was killed before

    def begun() -> bool:
        try:
            return any(path not in stale or not any(path.iterdir()) for path in folder.glob("*.tmp"))
        except FileNotFoundError:  # the trainer has just removed or renamed one
            return False

    until(begun)


def writing_weights(job: Job) -> None:
    after_steps(job)
    until(lambda: list((job.folder / "weights").glob("v*.tmp")))


def pushing_weights(job: Job) -> None:
    """They lie there, and the workers are about to take them: they stand still, or load."""
    after_steps(job)
    known = set((job.folder / "weights").glob("v*"))
    until(lambda: any(path.suffix == "" for path in set((job.folder / "weights").glob("v*")) - known))


def started(box: Box, name: str, steps: int, mode: str, ranks: int = 1, service: str = "", model: str = "") -> Job:
    box.write(DRIVER, "noting.py")
    box.write(CONFIG.format(steps=steps, batch=BATCH, model=MODEL, mode=mode), "config.yaml")
    manifest = Path(box.manifest(service=service, model=model))
    manifest.write_text(manifest.read_text() + JOB.format(name=name, ranks=ranks))
    box.ok("apply", "-f", str(manifest))
    return Job(box, name, steps)


def assert_nothing_lost(job: Job) -> None:
    """And nothing twice; versions grew; what is on disk is whole; the service answers."""
    done = job.box.areal("wait", f"trainjob/{job.name}", "--for", "completed", "--timeout", "600s", timeout=620)
    assert done.code == 0, done.text
    notes = job.notes()
    last_taken = {note["step"]: note["positions"] for note in notes}
    assert sorted(last_taken) == list(range(1, job.steps + 1))
    trained = [position for positions in last_taken.values() for position in positions]
    assert len(trained) == len(set(trained)) == BATCH * job.steps
    versions = [note["version"] for note in notes]
    assert versions == sorted(set(versions)), "a version means one set of weights"
    last = steps_of(job.folder / "metrics.jsonl")[-1]
    assert (last["step"], last["prompts/consumed"]) == (job.steps, len(trained))
    kept = [path for path in (job.folder / "checkpoints").iterdir() if path.suffix != ".tmp"]
    assert f"step_{job.steps}" in {path.name for path in kept}
    assert [Checkpoint(0, path).damage() for path in kept] == [None] * len(kept)
    assert job.box.chat("1234")


@pytest.mark.slow
def test_trainer_killed_during_checkpoint_or_step_loses_nothing(box: Box) -> None:
    job = started(box, "learn", steps=12, mode="shm")
    job.kill(writing_a_checkpoint)
    job.kill(after_steps)
    assert_nothing_lost(job)


def _moments(source: random.Random, mode: str) -> Iterator[Callable[[Job], object]]:
    """20 of them, in any order. Weights in memory cannot be watched for: there, chance has to find the moment."""
    pushes = [writing_weights] * 3 + [pushing_weights] * 3 if mode == "disk" else []
    named = [writing_a_checkpoint] * 5 + pushes

    def soon(job: Job) -> None:
        """While it starts, connects, samples or trains."""
        time.sleep(source.uniform(0.0, 6.0))

    def in_a_step(job: Job) -> None:
        after_steps(job, source.randint(1, 4))
        time.sleep(source.uniform(0.0, 0.3))

    moments = [*named, *[soon] * 4]
    moments += [in_a_step] * (20 - len(moments))
    source.shuffle(moments)
    return iter(moments)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("mode", ["disk", "shm"])
def test_trainer_killed_at_20_random_moments_loses_nothing(box: Box, mode: str) -> None:
    seed = int(os.environ.get("AREAL_TEST_SEED", "1"))
    job = started(box, "learn", steps=300, mode=mode)
    for number, moment in enumerate(_moments(random.Random(seed), mode), start=1):
        job.kill(moment)
        assert (job.folder / "checkpoints" / f"step_{job.steps}").exists() is False, f"it ended before kill {number}"
    assert_nothing_lost(job)
    calm = started(box, "calm", steps=300, mode=mode)
    assert_nothing_lost(calm)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("victim", [0, 1, None], ids=["first-rank", "second-rank", "launcher"])
def test_killed_rank_ends_attempt_and_next_one_continues(box: Box, victim: int | None) -> None:
    job = started(box, "learn", steps=12, mode="shm", ranks=2)
    until(lambda: len(job.notes()) >= 4)
    before = job.processes()
    assert sorted(before.values(), key=str) == [0, 1, None]
    os.kill(next(pid for pid, rank in before.items() if rank == victim), signal.SIGKILL)
    until(lambda: len(job.processes()) == 3 and not set(before) & set(job.processes()))
    assert_nothing_lost(job)
    assert not job.processes(), "no orphan"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("ranks", [1, 2])
def test_stopped_and_resumed_job_repeats_no_step(box: Box, ranks: int) -> None:
    job = started(box, "learn", steps=40, mode="shm", ranks=ranks)
    until(lambda: len(job.notes()) >= 4)
    box.ok("train", "stop", "learn", "--grace", "60s")
    assert not job.processes()
    stopped = job.notes()[-1]["step"]
    assert (job.folder / "checkpoints" / f"step_{stopped}").is_dir()
    box.ok("resume", "trainjob/learn")
    assert_nothing_lost(job)
    assert [note["step"] for note in job.notes()] == list(range(1, 41))
