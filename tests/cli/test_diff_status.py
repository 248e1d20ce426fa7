"""Exit status 1 of a command whose 1 is an answer: ``diff`` says "differences" with it, and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from areal.cli.main import run
from areal.state.home import Home
from tests.cli.conftest import AREAL, REPOSITORY, Areal

SERVICE = """apiVersion: areal.dev/v1alpha1
kind: InferenceService
metadata: {name: default}
spec: {suspend: true}
"""
ON_SLURM = """apiVersion: areal.dev/v1alpha1
kind: InferenceService
metadata: {name: default}
spec: {scheduler: {type: slurm}}
---
apiVersion: areal.dev/v1alpha1
kind: Model
metadata: {name: m}
spec: {backend: vllm, path: org/name, resources: {gpus: 1}}
"""
MODES = [("-f", "service.yaml"), ("-f", "service.yaml", "--format", "github"), ("-f", "service.yaml", "-o", "json")]
MODES += [("-f", "service.yaml", "-o", "name"), ("-f", "service.yaml", "--out", "plan.json"), ("--drift",)]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "service.yaml").write_text(SERVICE)
    return tmp_path


def test_diff_exits_1_for_new_object_and_0_otherwise(areal: Areal) -> None:
    assert areal("diff", "-f", "service.yaml").code == 1
    assert areal("apply", "-f", "service.yaml").code == 0
    assert areal("diff", "-f", "service.yaml").code == 0


@pytest.mark.parametrize("mode", MODES, ids=" ".join)
@pytest.mark.parametrize(
    "config", ["a: [", "no: such", "[]", "defaults: {output: wides}", "defaults: 3", b"\xff", "contexts: {a: 1}"]
)
def test_diff_with_broken_config_exits_neither_0_nor_1(
    areal: Areal, home: Home, mode: tuple[str, ...], config: str | bytes
) -> None:
    home.root.mkdir()
    (home.root / "config.yaml").write_bytes(config if isinstance(config, bytes) else config.encode())
    if b"output" in (home.root / "config.yaml").read_bytes() and "-o" in mode:
        pytest.skip("the flag stands over the default")
    assert areal("diff", *mode).code in (2, 70)


@pytest.mark.parametrize("mode", [mode for mode in MODES if "-f" in mode], ids=" ".join)
def test_diff_without_scheduler_commands_does_not_exit_1(
    areal: Areal, folder: Path, monkeypatch: pytest.MonkeyPatch, mode: tuple[str, ...]
) -> None:
    monkeypatch.setenv("PATH", str(folder / "no-commands"))
    (folder / "service.yaml").write_text(ON_SLURM)
    refused = areal("diff", *mode)
    assert refused.code == 10 and "--assume-capacity" in refused.err
    assert areal("diff", *mode, "--assume-capacity").code == 1


@pytest.mark.parametrize("out", [".", "service.yaml/plan.json", "/proc/plan.json", "/dev/full/plan.json"])
def test_diff_unable_to_save_plan_exits_2(areal: Areal, out: str) -> None:
    refused = areal("diff", "-f", "service.yaml", "--out", out)
    assert refused.code == 2, refused.err


def test_diff_does_not_replace_device_with_plan(areal: Areal, folder: Path) -> None:
    os.mkfifo(pipe := folder / "pipe")
    refused = areal("diff", "-f", "service.yaml", "--out", str(pipe))
    assert refused.code == 2 and "it is not a regular file" in refused.err
    assert pipe.is_fifo()


@pytest.mark.parametrize("mode", MODES, ids=" ".join)
def test_diff_of_unreadable_record_exits_neither_0_nor_1(
    areal: Areal, home: Home, record: Callable[..., Any], mode: tuple[str, ...]
) -> None:
    record("InferenceService", "default", {"suspend": True})
    for file in home.root.rglob("object.json"):  # without its revisions, too, an apply would replace it
        file.write_text("{")
    assert areal("diff", *mode).code not in (0, 1)


@pytest.mark.parametrize("mode", MODES, ids=" ".join)
@pytest.mark.parametrize("root", ["a\0b", "service.yaml", "service.yaml/home"])
def test_diff_with_impossible_home_exits_neither_0_nor_1(
    areal: Areal, home: Home, mode: tuple[str, ...], root: str
) -> None:
    assert areal("diff", *mode, "--home", root).code not in (0, 1)


@pytest.mark.parametrize(
    "error", [RuntimeError("a"), MemoryError(), RecursionError(), OSError(28, "full"), KeyError(1)]
)
@pytest.mark.parametrize(
    ("words", "module", "name"),
    [
        (("diff", "-f", "service.yaml"), "areal.reconcilers.apply", "diff"),
        (("diff", "--drift"), "areal.reconcilers.prepare", "drift"),
        (("diff", "--drift"), "areal.reconcilers.prepare", "Backends"),
        (("inf", "status"), "areal.cli.inf.status", "HomeView"),
        (("agent", "status"), "areal.cli.agent.service", "HomeView"),
        (("train", "status", "x"), "areal.cli.train", "HomeView"),
        (("doctor",), "areal.reconcilers.doctor", "doctor"),
    ],
    ids=str,
)
def test_unexpected_failure_exits_70_where_1_is_a_result(
    areal: Areal, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], module: str, name: str, error: Exception
) -> None:
    def failing(*args: Any, **given: Any) -> Any:
        raise error

    __import__(module)
    monkeypatch.setattr(sys.modules[module], name, failing)
    assert areal(*words).code == 70


def test_unexpected_failure_exits_1_elsewhere(areal: Areal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("areal.cli.get.show_table", None)
    assert areal("get").code == 1


def test_diff_with_unimportable_module_exits_70(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "areal.cli.apply", None)
    assert run(["diff", "--drift"]) == 70


@pytest.mark.parametrize("mode", MODES, ids=" ".join)
def test_diff_into_full_disk_exits_neither_0_nor_1(folder: Path, mode: tuple[str, ...]) -> None:
    with Path("/dev/full").open("w") as full:
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
        words = [sys.executable, "-c", AREAL, "diff", *mode, "-v"]
        done = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, env=environment, timeout=60, check=False)
    assert done.returncode not in (0, 1), done.stderr
