"""The folder and the shell of a command are no part of what it starts."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.e2e.agents import COUNTER
from tests.e2e.conftest import MODEL, Box

pytestmark = [pytest.mark.timeout(300), pytest.mark.extended]

SHADOWS = ("random.py", "logging.py", "asyncio.py", "json.py", "torch/__init__.py", "aiohttp/__init__.py", "areal.py")
SOON = "restart: {backoff: {initialSeconds: 0.1, maxSeconds: 0.1, jitter: 0}, budget: {count: 100}}"


def checkout(box: Box) -> Path:
    """A working folder whose files have the names of modules that services import."""
    folder = box.folder / "checkout"
    for name in SHADOWS:
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("raise SystemExit(f'{__file__} was imported in the place of the module that was meant')\n")
    return folder


def areal(box: Box, folder: Path, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    """As the console script is: without the working folder on the import path."""
    return subprocess.run(
        [sys.executable, "-P", "-m", "areal.cli", *words],
        env={**os.environ, "AREAL_HOME": str(box.home), "OMP_NUM_THREADS": "1", **box.env, **env},
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=200,
    )


def test_services_do_not_depend_on_folder_of_apply(box: Box) -> None:
    folder = checkout(box)
    (folder / "manifest.yaml").write_text(
        Path(box.manifest(service=SOON, model=SOON)).read_text().replace(str(MODEL), os.path.relpath(MODEL, folder))
    )
    shell = {"AREAL_HOME": os.path.relpath(box.home, folder), "LC_ALL": "C"}
    applied = areal(box, folder, "apply", "-f", "manifest.yaml", **shell)
    assert applied.returncode == 0, applied.stderr
    shutil.rmtree(folder)

    before = box.pids()
    for pid in before.values():
        os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 120
    while len(after := box.pids()) < 4 or set(after.values()) & set(before.values()):
        assert time.monotonic() < deadline, after
        time.sleep(0.2)
    box.ok("wait", "inf/default", "model/reverse", "--for", "ready", "--timeout", "2m")

    assert box.chat("1234").isdigit()


def test_driver_imports_neighbours_but_not_shadowing_files(box: Box) -> None:
    folder = checkout(box)
    shutil.rmtree(folder / "torch")  # a package of its own before the installed ones is the user's choice
    shutil.rmtree(folder / "aiohttp")
    (folder / "areal.py").unlink()
    (folder / "tests").mkdir()
    (folder / "tests" / "__init__.py").write_text("HERE = True\n")
    (folder / "beside.py").write_text("VALUE = 7\n")
    (folder / "drive.py").write_text(
        "import random, subprocess, sys, time\nimport beside, tests\n"
        "def main(argv):\n"
        "    assert beside.VALUE == 7 and tests.HERE and random.random() < 1\n"
        "    import os\n"
        "    assert 'PYTHONSAFEPATH' not in os.environ, 'a program that the driver starts has its own folder'\n"
        "    print('driven', flush=True)\n    time.sleep(300)\n"
    )
    (folder / "job.yaml").write_text(
        "apiVersion: areal.dev/v1alpha1\nkind: TrainJob\nmetadata: {name: j}\n"
        "spec: {driver: 'drive:main', resources: {gpus: 0}, restart: {policy: OnFailure, maxRestarts: 1,"
        " backoff: {initialSeconds: 0.1}}}\n"
    )
    started = areal(box, folder, "apply", "-f", "job.yaml")
    assert started.returncode == 0, started.stderr
    deadline = time.monotonic() + 60
    while "driven" not in box.ok("logs", "trainjob/j").out:
        assert time.monotonic() < deadline, box.ok("logs", "trainjob/j").out
        time.sleep(0.2)

    shutil.rmtree(folder)
    os.kill(box.pids()["driver/0"], signal.SIGKILL)

    while box.phase("trainjob/j") != "Failed":
        assert time.monotonic() < deadline + 60
        time.sleep(0.2)
    status = json.loads(box.ok("get", "trainjob/j", "-o", "json").out)["status"]
    assert {each["type"]: each["reason"] for each in status["conditions"]}["Ready"] == "WorkingDirMissing"
    assert f"there is no working folder {folder}" in status["message"]
    again = box.areal("restart", "trainjob/j")
    assert again.code != 0 and f"spec.workingDir: there is no folder {folder}" in again.err


def test_agent_imports_its_folder_but_not_shadowing_files(box: Box) -> None:
    folder = checkout(box)
    (folder / "counter.py").write_text(COUNTER)
    for package in ("torch", "aiohttp"):
        shutil.rmtree(folder / package)
    (folder / "areal.py").unlink()
    (folder / "agents.yaml").write_text(
        "apiVersion: areal.dev/v1alpha1\nkind: AgentService\nmetadata: {name: counter}\n"
        f"spec: {{gateway: {{port: {box.port}}}, agent: 'counter:Counter'}}\n"
    )
    applied = areal(box, folder, "apply", "-f", "agents.yaml")
    assert applied.returncode == 0, applied.stderr

    output = box.ok("agent", "chat", "--service", "counter", "-m", "hello").out
    assert "one 0 hello" in output
