"""A TrainJob whose episodes an AgentService runs: the guessing game, as it is shipped."""

from __future__ import annotations

import json
import statistics
from dataclasses import replace

import pytest

from areal.client.command import free_port
from tests.e2e.conftest import ROOT, Box
from tests.services.processes import wait_until

JOB = "trainjob/learn-to-guess"


def applied(box: Box, *overrides: str, port: int | None = None) -> str:
    """``port``: of the inference service; the agent service's is a free one."""
    return box.ok(
        *("apply", "-f", "examples/agents/guess_number/train.yaml"),
        *("--set", f"inferenceservice/default:spec.gateway.port={port or box.port}"),
        *("--set", f"agentservice/guess-number:spec.gateway.port={free_port()}"),
        *("--set", f"{JOB}:spec.overrides={json.dumps(overrides)}"),
    ).out


def rewards(box: Box) -> list[float]:
    lines = (box.home / "jobs" / "learn-to-guess" / "metrics.jsonl").read_text().splitlines()
    return [step["reward/mean"] for step in map(json.loads, lines) if step["step"]]


@pytest.mark.extended
def test_job_episodes_run_in_agent_service(box: Box) -> None:
    box = replace(box, folder=ROOT)
    applied(box, "total_train_steps=3")
    box.ok("wait", JOB, "--for", "completed", "--timeout", "200s")
    assert len(rewards(box)) == 3
    folder = str(box.home / "jobs" / "learn-to-guess" / "trajectories")
    shown = json.loads(box.ok("inf", "trajectories", "show", folder, "-o", "json").out)["items"]
    assert sum(len(episode["interactions"]) for episode in shown) > len(shown) > 0, "a game has several model calls"
    listing = ("agent", "sessions", "list", "--service", "guess-number", "-o", "json")
    wait_until(lambda: json.loads(box.ok(*listing).out)["items"] == [], what="the episodes' sessions to be closed")
    box.ok("delete", "inferenceservice/default", "--cascade", "--yes")
    assert box.living() == []


@pytest.mark.slow
def test_job_follows_moved_services(box: Box) -> None:
    box = replace(box, folder=ROOT)
    applied(box, "total_train_steps=12")
    metrics = box.home / "jobs" / "learn-to-guess" / "metrics.jsonl"
    wait_until(lambda: metrics.exists() and len(rewards(box)) >= 2, 120, "steps at the first addresses")
    driver = box.pids()["driver/0"]
    moved = applied(box, "total_train_steps=12", port=free_port())
    assert moved.count("processes are replaced") == 2, moved
    assert len(rewards(box)) < 12, "it is to train at the second addresses, too"
    assert box.pids()["driver/0"] == driver
    box.ok("wait", JOB, "--for", "completed", "--timeout", "200s")
    assert len(rewards(box)) == 12
    assert json.loads(box.ok("train", "status", "learn-to-guess", "--json").out)["attempt"] == 1
    box.ok("delete", "inferenceservice/default", "--cascade", "--yes")
    assert box.living() == []


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_agent_learns_the_game(box: Box, seed: int) -> None:
    box = replace(box, folder=ROOT)
    applied(box, f"seed={seed}")
    done = box.areal("wait", JOB, "--for", "completed", "--timeout", "800s", timeout=850)
    assert done.code == 0, done.text
    found = rewards(box)
    print(f"seed {seed}: {statistics.mean(found[:2]):.3f} -> {statistics.mean(found[-5:]):.3f}")
    assert len(found) == 80
    assert statistics.mean(found[:2]) < 0.3
    assert statistics.mean(found[-5:]) > 0.8
