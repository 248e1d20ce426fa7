"""Leases, the embedded engine and the trainers on a free GPU: `CUDA_VISIBLE_DEVICES=0 pytest -m gpu -n 0`."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from typing import Any

import pytest

from areal.runtime.gpus import Gpu, list_gpus
from tests.e2e.conftest import ROOT, Box
from tests.services.processes import wait_until

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]
SHARED = '{"CUDA_VISIBLE_DEVICES": "0"}'


def first_gpu() -> Gpu:
    listing = list_gpus()
    assert listing.gpus, listing.reason
    return listing.gpus[0]


def sets(*pairs: str) -> list[str]:
    return [word for pair in pairs for word in ("--set", pair)]


def quickstart(box: Box, *overrides: str, on_gpu: bool) -> None:
    """The quickstart; ``on_gpu``: with its engine, so that the only GPU is shared without leases."""
    shared = (
        *("model/reverse:spec.engineArgs.kv-memory-gib=2", f"model/reverse:spec.env={SHARED}"),
        *("trainjob/learn:spec.resources.gpus=0", f"trainjob/learn:spec.env={SHARED}"),
    )
    box.ok(
        *("apply", "-f", "manifests/quickstart.yaml", "--timeout", "200s"),
        *sets(f"inferenceservice/default:spec.gateway.port={box.port}", *(shared if on_gpu else ())),
        *sets(f"trainjob/learn:spec.overrides={json.dumps(overrides)}"),
    )


def ended(box: Box) -> list[dict[str, Any]]:
    """The training steps of the job, which has succeeded. The first one is on policy but for rounding."""
    box.ok("wait", "trainjob/learn", "--for", "completed", "--timeout", "400s")
    status = json.loads(box.ok("train", "status", "learn", "-o", "json").out)
    assert (status["phase"], status["attempt"]) == ("Succeeded", 1), box.ok("train", "logs", "learn").out
    lines = (box.home / "jobs" / "learn" / "metrics.jsonl").read_text().splitlines()
    return [step for line in lines if (step := json.loads(line))["step"]]


def test_engine_leases_gpu_and_returns_it(box: Box) -> None:
    before = first_gpu()
    box.ok("apply", "-f", box.manifest(model="resources: {gpus: 1}"), "--timeout", "200s")
    assert box.chat("1234").isdigit()
    engine = box.processes()["engine/0"]
    assert before.uuid in json.dumps(engine)
    assert first_gpu().used_bytes > before.used_bytes + 2**26

    greedy = (
        "apiVersion: areal.dev/v1alpha1\nkind: TrainJob\nmetadata: {name: learn}\n"
        f"spec: {{config: {ROOT}/examples/reverse_digits/grpo.yaml, rollout: {{service: default, model: reverse}}}}\n"
    )
    refused = replace(box, folder=ROOT).areal("apply", "-f", box.write(greedy, "job.yaml"))
    assert refused.code == 10 and "needs 1 GPUs" in refused.err, refused.text

    os.kill(engine["pid"], signal.SIGKILL)
    wait_until(lambda: box.pids().get("engine/0") not in (None, engine["pid"]), 60, "another engine")
    wait_until(lambda: box.areal("inf", "chat", "-m", "1234", "--temperature", "0").code == 0, 60, "its answer")

    box.ok("delete", "inferenceservice/default", "--cascade", "--yes")
    wait_until(lambda: first_gpu().used_bytes <= before.used_bytes + 2**26, 20, "the memory is free")


def test_job_leases_gpu_beside_cpu_engine(box: Box) -> None:
    box = replace(box, folder=ROOT)
    quickstart(box, "total_train_steps=200", on_gpu=False)
    driver = wait_until(lambda: box.processes().get("driver/0"), 60, "the driver")
    assert first_gpu().uuid in json.dumps(driver)
    assert first_gpu().uuid not in json.dumps(box.processes()["engine/0"])
    wait_until(lambda: driver["pid"] in pids_on_gpu() or not box.processes().get("driver/0"), 60, "it computes there")
    steps = ended(box)
    assert len(steps) == 200
    assert abs(steps[0]["mismatch_kl"]) < 1e-4, "trainer on CUDA, engine on the CPU"


def pids_on_gpu() -> set[int]:
    return {process.pid for process in first_gpu().processes}


@pytest.mark.parametrize("mode", ["shm", "xccl", "disk"])
def test_weights_reach_engine_on_same_gpu(box: Box, mode: str) -> None:
    box = replace(box, folder=ROOT)
    quickstart(box, "total_train_steps=60", f"actor.weight_update_mode={mode}", on_gpu=True)
    assert abs(ended(box)[0]["mismatch_kl"]) < 1e-4


@pytest.mark.parametrize("backend", ["fsdp:d1", "megatron:d1"])
def test_quickstart_learns_on_a_gpu(box: Box, backend: str) -> None:
    box = replace(box, folder=ROOT)
    quickstart(box, f"actor.backend={backend}", on_gpu=True)
    steps = ended(box)
    assert sum(step["reward/mean"] for step in steps[-20:]) / 20 > 0.9


def test_bfloat16_weights_agree(box: Box) -> None:
    box = replace(box, folder=ROOT)
    quickstart(box, "total_train_steps=60", "actor.dtype=bfloat16", on_gpu=True)
    assert abs(ended(box)[0]["mismatch_kl"]) < 2e-2
