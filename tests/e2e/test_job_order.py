"""A job that depends on another one starts when that one has succeeded, and says what it waits for until then."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import MODEL, Box
from tests.runtime.test_gpus import STAND_IN, card
from tests.services.processes import wait_until

# Notes its start, waits for a file, and writes the folder that the next one reads.
DRIVER = """
import os, shutil, sys, time
from pathlib import Path

def main(args):
    given = dict(item.split("=", 1) for item in args)
    name, folder = given["name"], Path(given["folder"])
    if given.get("reads") and not (folder / given["reads"]).is_dir():
        sys.exit("its input is not there")
    with open(folder / "started", "a") as log:
        log.write(name + "\\n")
    while not (folder / f"{name}.end").exists():
        time.sleep(0.02)
    if given.get("model"):
        shutil.copytree(given["model"], folder / "made")
    return int((folder / f"{name}.end").read_text() or 0)
"""


def job(name: str, folder: Path, *needs: str, **given: str) -> str:
    overrides = [f"{key}={value}" for key, value in {"name": name, "folder": str(folder), **given}.items()]
    return f"""
apiVersion: areal.dev/v1alpha1
kind: TrainJob
metadata: {{name: {name}, dependsOn: {json.dumps([f"TrainJob/{need}" for need in needs])}}}
spec: {{driver: "chain:main", restart: {{policy: Never}}, resources: {{gpus: 0}}, overrides: {json.dumps(overrides)}}}
"""


def served(folder: Path, port: int) -> str:
    return f"""
apiVersion: areal.dev/v1alpha1
kind: InferenceService
metadata: {{name: default}}
spec: {{gateway: {{port: {port}}}}}
---
apiVersion: areal.dev/v1alpha1
kind: Model
metadata: {{name: tuned, dependsOn: [TrainJob/first]}}
spec: {{service: default, backend: "embedded:d1", path: {folder / "made"}, tokenizerPath: {folder / "made"}}}
"""


@pytest.fixture
def chain(box: Box) -> Iterator[Box]:
    box.write(DRIVER, "chain.py")
    yield box
    for name in ("first", "second", "third", "other"):
        (box.folder / f"{name}.end").write_text("0")


def status(box: Box, ref: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(box.ok("get", ref, "-o", "json").out)["status"]
    return found


def started(box: Box) -> list[str]:
    log = box.folder / "started"
    return log.read_text().split() if log.exists() else []


def end(box: Box, name: str, code: int = 0) -> None:
    staged = box.folder / f"{name}.staged"
    staged.write_text(str(code))
    staged.rename(box.folder / f"{name}.end")


@pytest.mark.extended
@pytest.mark.timeout(180)
def test_jobs_of_folder_run_in_dependency_order(chain: Box) -> None:
    folder = chain.folder
    manifests = [job("third", folder, "second"), job("second", folder, "first", reads="made")]
    service = served(folder, chain.port)
    path = chain.write("---".join([*manifests, job("first", folder, model=str(MODEL)), service]), "all.yaml")

    planned = chain.areal("diff", "-f", path).out
    assert "TrainJob/second create (waits for TrainJob/first)" in planned
    assert "start TrainJob/second" not in planned
    done = chain.ok("apply", "-f", path)
    assert "waits for TrainJob/first" in done.out + done.err
    wait_until(lambda: started(chain) == ["first"], 30, "the first runs")
    waiting = status(chain, "trainjob/second")
    assert (waiting["phase"], waiting["message"]) == ("Pending", "waits for TrainJob/first, which is Running")
    assert status(chain, "trainjob/third")["phase"] == status(chain, "model/tuned")["phase"] == "Pending"
    assert "waits for TrainJob/first, which is Running" in chain.ok("describe", "trainjob/second").out
    assert chain.areal("diff", "-f", path).code == 0, "nothing is to be done meanwhile"
    manifest = chain.ok("get", "trainjob/second", "-o", "manifest").out
    assert "suspend" not in manifest and "dependsOn" in manifest

    end(chain, "first")
    wait_until(lambda: started(chain) == ["first", "second"], 60, "the second follows by itself")
    assert status(chain, "trainjob/third")["message"] == "waits for TrainJob/second, which is Running"
    chain.ok("wait", "model/tuned", "--for", "ready", "--timeout", "60s")
    end(chain, "second", code=1)
    failed = chain.areal("wait", "trainjob/third", "--for", "completed", "--timeout", "60s")
    assert failed.code == 8 and "waits for TrainJob/second, which has failed" in failed.err
    assert status(chain, "trainjob/third")["phase"] == "Pending"
    assert started(chain) == ["first", "second"]
    again = chain.areal("apply", "-f", path)
    assert again.code == 8 and "waits for TrainJob/second, which has failed (attempt 1: exited 1" in again.err, (
        again.err
    )
    assert "trainjob/third unchanged: waits for TrainJob/second, which has failed" in again.out

    (folder / "second.end").unlink()
    chain.ok("restart", "trainjob/second")
    end(chain, "second")
    end(chain, "third")
    chain.ok("wait", "trainjob/third", "--for", "completed", "--timeout", "60s")
    assert started(chain) == ["first", "second", "second", "third"]
    assert chain.areal("diff", "-f", path).code == 0


@pytest.mark.extended
def test_waiting_job_is_started_by_resume_or_reconcile(chain: Box) -> None:
    path = chain.write(
        "---".join([job("first", chain.folder), job("second", chain.folder, "first")])
        + f"---{job('third', chain.folder, 'first')}",
        "all.yaml",
    )
    chain.ok("apply", "-f", path)
    refused = chain.areal("restart", "trainjob/second")
    assert refused.code == 5 and "waits for TrainJob/first" in refused.err
    chain.ok("resume", "trainjob/second")
    wait_until(lambda: sorted(started(chain)) == ["first", "second"], 30, "a person has started it")
    assert chain.areal("diff", "-f", path).code == 0, "it is not stopped again"
    chain.ok("suspend", "trainjob/first")
    assert status(chain, "trainjob/third")["message"].startswith("waits for TrainJob/first, which is Stopped")
    chain.ok("reconcile")
    assert sorted(started(chain)) == ["first", "second"]
    assert "third suspended" in chain.ok("suspend", "trainjob/third").out
    chain.ok("resume", "trainjob/first")
    end(chain, "first")
    chain.ok("wait", "trainjob/first", "--for", "completed", "--timeout", "60s")
    chain.ok("reconcile")
    assert status(chain, "trainjob/third")["phase"] == "Stopped" and "third" not in started(chain)


@pytest.mark.extended
def test_job_without_capacity_starts_when_another_ends(chain: Box) -> None:
    (chain.folder / "pynvml.py").write_text(STAND_IN)
    (chain.folder / "nvml.json").write_text(json.dumps([card("GPU-a")]))
    chain.env |= {"PYTHONPATH": str(chain.folder), "NVML_STATE": str(chain.folder / "nvml.json")}
    chain.env |= {"CUDA_VISIBLE_DEVICES": "0"}

    def on_the_gpu(name: str, *needs: str) -> str:
        return job(name, chain.folder, *needs).replace("gpus: 0", "gpus: 1")

    waiting = [on_the_gpu(name, "first") for name in ("second", "third")]
    path = chain.write("---".join([job("first", chain.folder), on_the_gpu("other"), *waiting]), "all.yaml")
    chain.ok("apply", "-f", path)
    end(chain, "first")

    def noted(name: str) -> bool:
        return "NotStarted" in chain.ok("describe", f"trainjob/{name}").out

    wait_until(lambda: noted("second") and noted("third"), 60, "there is no room for either")
    message = status(chain, "trainjob/second")["message"]
    assert message.startswith("TrainJob/first has succeeded; it starts when another job ends or a process is stopped")
    drift = chain.areal("diff", "--drift")
    assert drift.code == 10 and "trainjob/second blocked" in drift.out.lower(), drift
    end(chain, "other")
    wait_until(lambda: {"second", "third"} & {*started(chain)}, 60, "the end of another job starts one")
    (one,) = {"second", "third"} & {*started(chain)}
    chain.ok("suspend", f"trainjob/{one}")
    wait_until(lambda: {"second", "third"} <= {*started(chain)}, 60, "a command makes room for the other")


@pytest.mark.extended
def test_command_interrupts_start_of_object_after_job(chain: Box) -> None:
    folder = chain.folder
    chain.write("import time\ntime.sleep(600)\n", "sitecustomize.py")  # its engine starts for ever
    service = served(folder, chain.port).replace("path:", f"env: {{PYTHONPATH: {folder}}}, path:")
    service += service[service.rindex("---") :].replace("name: tuned", "name: other")
    path = chain.write("---".join([job("first", folder, model=str(MODEL)), service]), "all.yaml")
    chain.ok("apply", "-f", path)
    end(chain, "first")

    def begun(*refs: str) -> bool:
        rows = json.loads(chain.ok("get", "processes", "-o", "json").out)["items"]
        found = {(row["owner"], row["component"]) for row in rows if row["state"] == "running"}
        return found >= {("", "reconcile"), *((ref, "engine") for ref in refs)}

    wait_until(
        lambda: begun("Model/tuned", "Model/other"), 60, "both models start, and the command that starts them is listed"
    )
    assert chain.ok("suspend", "model/tuned").out == "model/tuned suspended\n"
    wait_until(lambda: begun("Model/other"), 60, "the other one goes on to start")
    assert "model/tuned deleted" in chain.ok("delete", "model/tuned", "--yes").out
    assert "model/other deleted" in chain.ok("delete", "model/other", "--yes").out
    wait_until(lambda: "reconcile" not in str(chain.processes()), 60, "nothing is left to start")
