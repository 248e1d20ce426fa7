"""A real vLLM serves and learns: GRPO by a TrainJob, its weights by each transfer, on a CPU.

AREAL_VLLM_PYTHON=/path/to/python pytest -m vllm tests/e2e/test_vllm.py
"""

from __future__ import annotations

import importlib.util
import json
import os
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import ROOT, Box

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1500)]
STEPS = 60


def small_model(folder: Path) -> Path:
    """The example's, with heads of a size that vLLM's kernels have."""
    import torch
    from transformers import LlamaForCausalLM

    spec = importlib.util.spec_from_file_location("recipe", ROOT / "examples/reverse_digits/make_model.py")
    assert spec is not None and spec.loader is not None
    recipe: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(recipe)
    torch.manual_seed(5)
    config = recipe.make_model().config
    config.update({"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32, "tie_word_embeddings": True})
    model = LlamaForCausalLM(config)
    recipe.fine_tune(model, 2e-3, 64, 0.12, 300)
    recipe.save(model, folder)
    return folder


def manifest(box: Box, model: Path, mode: str) -> str:
    overrides = {
        "actor.path": str(model),
        "actor.weight_update_mode": mode,
        "actor.use_decoupled_loss": True,  # then the trainer says how far its log-probabilities are from vLLM's
        "rollout.max_head_offpolicyness": 0,
        "evaluator.eval_before_train": False,
        "total_train_steps": STEPS,
    }
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
  backend: vllm:d1
  path: {model}
  resources: {{gpus: 0}}
  env: {{AREAL_ENGINE_PYTHON: "{os.environ["AREAL_VLLM_PYTHON"]}", VLLM_CPU_KVCACHE_SPACE: "1", OMP_NUM_THREADS: "1"}}
  engineArgs: {{dtype: float32, enforceEager: true, maxModelLen: 128, maxNumSeqs: 32}}
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


@pytest.mark.skipif("AREAL_VLLM_PYTHON" not in os.environ, reason="AREAL_VLLM_PYTHON names no Python that has vllm")
@pytest.mark.parametrize("mode", ["xccl", "disk"])
def test_vllm_learns_and_its_log_probabilities_stay_the_trainers(box: Box, mode: str) -> None:
    model = small_model(box.folder / "model")
    path = box.write(manifest(box, model, mode))
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
    assert statistics.mean(rewards[-10:]) > statistics.mean(rewards[:10]) + 0.1, rewards
