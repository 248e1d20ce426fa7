"""A real engine serves and learns: GRPO by a TrainJob, its weights by each transfer, on a CPU.

AREAL_VLLM_PYTHON=/path/to/python pytest -m vllm tests/e2e/test_engines.py
AREAL_SGLANG_PYTHON=/path/to/python pytest -m sglang tests/e2e/test_engines.py
"""

from __future__ import annotations

import json
import os
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import MODEL, ROOT, Box
from tests.services.inference.engines.conformance.engines import REAL, SGLANG_ON_CPU, SGLANG_ON_CPU_FLAGS

pytestmark = pytest.mark.timeout(1500)
STEPS = 60


def engine_of(name: str, folder: Path) -> dict[str, Any]:
    """``env`` and ``engineArgs`` of an engine on a CPU. SGLang leaves files behind, in ``folder``."""
    env = {"AREAL_ENGINE_PYTHON": os.environ[REAL[name]], "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    if name == "vllm":
        arguments: dict[str, Any] = {"enforceEager": True, "maxModelLen": 128, "maxNumSeqs": 32}
        # vLLM binds the worker of each replica to the same first core, where a busy one leaves another no time to start
        env |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        return {"env": env, "engineArgs": {"dtype": "float32", **arguments}}
    env |= {"PYTHONPATH": str(SGLANG_ON_CPU), "SGLANG_USE_CPU_ENGINE": "1", "TMPDIR": str(folder)}
    names = [each.removeprefix("--") for each in SGLANG_ON_CPU_FLAGS]
    values = [True if after.startswith("--") else after for after in (*SGLANG_ON_CPU_FLAGS[1:], "--")]
    given = zip(SGLANG_ON_CPU_FLAGS, names, values, strict=True)
    arguments = {name: value for flag, name, value in given if flag.startswith("--")}
    return {"env": env, "engineArgs": {"dtype": "float32", "sampling-backend": "pytorch", **arguments}}


def manifest(box: Box, model: Path, name: str, mode: str) -> str:
    overrides = {
        "actor.path": str(model),
        "actor.weight_update_mode": mode,
        "actor.use_decoupled_loss": True,  # then the trainer says how far its log-probabilities are from the engine's
        "rollout.max_head_offpolicyness": 0,
        "evaluator.eval_before_train": False,
        "total_train_steps": STEPS,
    }
    engine = engine_of(name, box.folder)
    listed = json.dumps([f"{name}={json.dumps(value)}" for name, value in overrides.items()])
    return f"""
apiVersion: areal.dev/v1alpha1
kind: InferenceService
metadata: {{name: default}}
spec: {{gateway: {{port: {box.port}}}}}
---
apiVersion: areal.dev/v1alpha1
kind: Model
metadata: {{name: reverse}}
spec:
  backend: {name}:d1
  path: {model}
  resources: {{gpus: 0}}
  env: {json.dumps(engine["env"])}
  engineArgs: {json.dumps(engine["engineArgs"])}
---
apiVersion: areal.dev/v1alpha1
kind: TrainJob
metadata: {{name: learn}}
spec:
  rollout: {{service: default, model: reverse}}
  config: examples/reverse_digits/grpo.yaml
  overrides: {listed}
  env: {{OMP_NUM_THREADS: "1"}}
"""


@pytest.mark.parametrize("mode", ["xccl", "disk"])
@pytest.mark.parametrize("name", [pytest.param(name, marks=getattr(pytest.mark, name)) for name in REAL])
def test_engine_learns_and_logprobs_match_trainer(box: Box, name: str, mode: str) -> None:
    if REAL[name] not in os.environ:
        pytest.skip(f"{REAL[name]} names no Python that has {name}")
    path = box.write(manifest(box, MODEL, name, mode))
    box = replace(box, folder=ROOT)
    applied = box.areal("apply", "-f", path, "--timeout", "600s", timeout=660)
    assert applied.code == 0, applied.text
    waited = box.areal("wait", "trainjob/learn", "--for", "completed", "--timeout", "900s", timeout=960)
    lines = [json.loads(line) for line in (box.home / "jobs/learn/metrics.jsonl").read_text().splitlines()]
    assert waited.code == 0, f"{waited.text}\n{lines[-1:]}"
    assert json.loads(box.ok("train", "status", "learn", "-o", "json").out)["phase"] == "Succeeded"
    assert len(lines) == STEPS
    for line in lines:  # each step is sampled from the weights of the one before: they had arrived
        assert line["staleness/max"] == 0
        assert abs(line["mismatch_kl"]) < 1e-3, line
        assert abs(line["importance_weight"] - 1) < 1e-3, line
    rewards = [line["reward/mean"] for line in lines]
    waited_for = [sum(line.get(key, 0.0) for line in lines) for key in ("time/rollout", "time/weights", "time/step")]
    print(f"reward {statistics.mean(rewards[:10]):.2f} to {statistics.mean(rewards[-10:]):.2f}", end=" ")
    print(f"waited {waited_for[0] / waited_for[2]:.0%} for rollouts, {waited_for[1] / waited_for[2]:.0%} for weights")
    assert statistics.mean(rewards[-10:]) > statistics.mean(rewards[:10]) + 0.1, rewards
