"""``areal init``: the command that it ends with works as it is printed, for each kind and for the quickstart."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.e2e.conftest import MODEL, Box, box  # noqa: F401 - fixture
from tests.hub_standin import files_of, hub_standin

pytestmark = [pytest.mark.extended, pytest.mark.timeout(300)]


def printed(box: Box, *words: str) -> str:  # noqa: F811
    """What ``areal init`` names as the next command."""
    wrote = box.ok("init", *words).err
    return wrote.strip().rpartition("; next: ")[2]


def run(box: Box, command: str, **env: str) -> str:  # noqa: F811
    """The command, by a shell in which `areal` is this one."""
    areal = f'areal() {{ {shlex.quote(sys.executable)} -P -m areal.cli "$@"; }}; '
    given = {**os.environ, "AREAL_HOME": str(box.home), "OMP_NUM_THREADS": "1", **box.env, **env}
    done = subprocess.run(
        ["bash", "-c", areal + command], cwd=box.folder, env=given, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.mark.parametrize("kind", ["inferenceservice", "model", "agentservice"])
def test_command_printed_by_init_makes_object_ready(box: Box, kind: str) -> None:  # noqa: F811
    (box.folder / "a b").mkdir()
    command = printed(box, kind, "mine", "--out", "a b/my file.yaml")
    assert command == "cd 'a b' && areal apply -f 'my file.yaml'"
    service = "mine" if kind == "inferenceservice" else "default"
    port = f" --set inferenceservice/{service}:spec.gateway.port={box.port}"
    if kind == "agentservice":
        port += f" --set agentservice/mine:spec.gateway.port={box.port + 1}"
    with hub_standin() as hub:
        hub.repository("Qwen/Qwen3-0.6B").push(files_of(MODEL), "first")
        out = run(box, command + port, HF_ENDPOINT=hub.url, HF_HOME=str(box.folder / "hf"))
    assert f"{kind}/mine created: Ready" in out


def test_command_printed_by_init_of_job_trains(box: Box) -> None:  # noqa: F811
    command = printed(box, "trainjob", "mine", "--out", "job.yaml")
    short = " --set trainjob/mine:spec.overrides=" + shlex.quote(json.dumps(["total_train_steps=2"]))
    with hub_standin() as hub:
        hub.repository("Qwen/Qwen3-0.6B").push(files_of(MODEL), "first")
        env = {"HF_ENDPOINT": hub.url, "HF_HOME": str(box.folder / "hf")}
        run(box, command + short, **env)
        run(box, "areal wait trainjob/mine --for completed --timeout 240s", **env)


def test_quickstart_commands_work_in_its_folder(box: Box) -> None:  # noqa: F811
    command = printed(box, "quickstart", "q")
    assert command == "cd q && areal apply -f quickstart.yaml"
    inside = replace(box, folder=box.folder / "q")
    port = f" --set inferenceservice/default:spec.gateway.port={box.port}"
    run(box, command + port + " --set trainjob/learn:spec.overrides=" + shlex.quote('["total_train_steps=2"]'))
    run(inside, "areal wait trainjob/learn --for completed")
    assert run(inside, "areal inf chat -m 1234 --temperature 0").strip().isdigit()
    run(inside, "areal delete inferenceservice/default --cascade --yes")
    assert inside.living() == [] and Path(inside.folder, "examples").is_dir()
