"""A job that brings its own inference service: it is there while the driver runs, and nothing is left of it after."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import MODEL, Box
from tests.e2e.test_train import status, wait_phase
from tests.services.processes import wait_until

# Asks its service, then waits for a file.
DRIVER = """
import json, os, time, urllib.request
from pathlib import Path

def main(args):
    given = dict(item.split("=") for item in args if "=" in item)
    body = {"model": os.environ["AREAL_INFERENCE_MODEL"], "messages": [{"role": "user", "content": "1234"}]}
    key = Path(os.environ["AREAL_INFERENCE_KEY_FILE"]).read_text().strip()
    request = urllib.request.Request(
        os.environ["AREAL_INFERENCE_ADDR"] + "/v1/chat/completions",
        json.dumps(body).encode(),
        {"Authorization": f"Bearer {key}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        print("asked", body["model"], answer.status, "attempt", os.environ["AREAL_ATTEMPT"], flush=True)
    if given.get("fail") and os.environ["AREAL_ATTEMPT"] == "1":
        return 1
    while not Path(given["until"]).exists():
        time.sleep(0.02)
    return int(given.get("status", 0))
"""


@pytest.fixture
def jobs(box: Box) -> Box:
    box.write(DRIVER, "asking.py")
    box.write(
        "experiment_name: own\ndriver: asking:main\n"
        f"actor: {{path: {MODEL}}}\ntokenizer_path: ${{actor.path}}\nrollout: {{backend: embedded:d1}}\n",
        "own.yaml",
    )
    return box


def objects(box: Box) -> list[str]:
    return sorted(box.ok("get", "--all", "-o", "name").out.split())


def servers(box: Box) -> dict[str, int]:
    return {name: pid for name, pid in box.pids().items() if name != "driver/0"}


ALL = ["inferenceservice/own", "model/own", "trainjob/own"]


@pytest.mark.slow
def test_service_of_job_is_suspended_and_deleted_with_it(jobs: Box) -> None:
    done = jobs.folder / "done"
    arguments = ("--config", "own.yaml", "--name", "own", "--restart", "on-failure", f"until={done}", "fail=1")
    jobs.ok("train", "start", *arguments)
    assert objects(jobs) == ALL
    assert "TrainJob/own" in jobs.ok("describe", "inferenceservice/own").out
    started = servers(jobs)
    assert sorted(started) == ["data-proxy/0", "engine/0", "gateway/0", "router/0"]
    wait_until(lambda: "asked own 200 attempt 2" in jobs.ok("train", "logs", "own").out, 90, "another attempt")
    assert servers(jobs) == started, "the next attempt finds them as they were"
    refused = jobs.areal("delete", "inferenceservice/own", "--yes")
    assert refused.code == 5 and "TrainJob/own" in refused.err
    stopped = jobs.ok("train", "stop", "own", "--grace", "5s")
    assert not jobs.living() and "the same command" not in stopped.err, "nothing is left to do"
    jobs.ok("resume", "trainjob/own")
    done.touch()
    wait_phase(jobs, "own", "Succeeded")
    wait_until(lambda: not jobs.living(), 60, "nothing of it runs")
    assert objects(jobs) == ALL
    assert jobs.ok("get", "-o", "name").out == jobs.ok("get", "processes", "-o", "name").out == ""
    jobs.ok("reconcile")
    assert not jobs.living(), "it rests for as long as its job does"
    jobs.ok("delete", "trainjob/own", "--yes")
    assert objects(jobs) == []
    assert list((jobs.home / "credentials").iterdir()) == []


@pytest.mark.slow
def test_foreground_run_leaves_nothing_running(jobs: Box) -> None:
    done = jobs.folder / "done"
    arguments = ("train", "run", "--config", "own.yaml", "--name", "own", f"until={done}")
    running = jobs.start(*arguments)
    assert running.stdout is not None
    for line in running.stdout:
        if line.startswith("asked"):
            break
    running.send_signal(signal.SIGINT)
    _, err = running.communicate(timeout=90)
    assert running.returncode == 130, err
    assert not jobs.processes()
    assert status(jobs, "own")["phase"] == "Stopped"
    done.touch()
    again = jobs.areal(*arguments, "status=7")
    assert again.code == 7 and "asked own 200 attempt 1" in again.out
    assert not jobs.processes()


@pytest.mark.slow
def test_run_interrupted_twice_leaves_nothing_running_either(jobs: Box) -> None:
    running = jobs.start("train", "run", "--config", "own.yaml", "--name", "own", f"until={jobs.folder / 'never'}")
    assert running.stdout is not None and running.stderr is not None
    for line in running.stdout:
        if line.startswith("asked"):
            break
    running.send_signal(signal.SIGINT)
    for line in running.stderr:
        if line.startswith("stopping"):
            break
    running.send_signal(signal.SIGINT)
    running.communicate(timeout=90)
    assert running.returncode == 130
    wait_until(lambda: not jobs.living(), 60, "nothing of it runs")
    assert status(jobs, "own")["phase"] == "Stopped"


@pytest.mark.slow
def test_service_outliving_job_is_reused_by_next_one(jobs: Box) -> None:
    done = jobs.folder / "done"
    done.touch()
    manifest: dict[str, Any] = {
        "apiVersion": "areal.dev/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"name": "own"},
        "spec": {"config": "own.yaml", "overrides": [f"until={done}", "shutdown_server_on_exit=false"]},
    }
    file = jobs.write(json.dumps(manifest), "job.yaml")
    jobs.ok("apply", "-f", file)
    wait_phase(jobs, "own", "Succeeded")
    started = servers(jobs)
    assert "unchanged" in jobs.ok("apply", "-f", file).out
    jobs.ok("delete", "trainjob/own", "--yes")
    jobs.ok("apply", "-f", file)
    wait_phase(jobs, "own", "Succeeded")
    assert servers(jobs) == started
    Path(file).write_text(json.dumps({**manifest, "spec": {"config": "own.yaml", "overrides": [f"until={done}"]}}))
    jobs.ok("delete", "trainjob/own", "--yes")
    refused = jobs.areal("apply", "-f", file)
    assert refused.code == 5 and "belongs to another owner" in refused.err
    assert servers(jobs) == started
