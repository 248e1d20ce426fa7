"""Completion of commands, flags and object names, as the shells ask for it."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Areal, Spawner

Record = Callable[..., Any]


def complete(spawn: Spawner, line: str, **env: str) -> list[str]:
    words = line.split(" ")
    process = spawn(_AREAL_COMPLETE="bash_complete", COMP_WORDS=line, COMP_CWORD=str(len(words) - 1), **env)
    return [item.partition(",")[2] for item in process.finish().out.splitlines() if item]


@pytest.fixture
def objects(record: Record) -> None:
    record("InferenceService", "default")
    record("Model", "qwen", {"backend": "embedded", "path": "./q"})
    record("Model", "llama", {"backend": "embedded", "path": "./l"})


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("areal ap", ["apply"]),
        ("areal inf sc", ["scaleup", "scaledown"]),
        ("areal agent sessions s", ["show", "switch"]),
        ("areal get model/", ["model/llama", "model/qwen"]),
        ("areal get models q", ["qwen"]),
        ("areal describe mdl/l", ["mdl/llama"]),
        ("areal inf chat --model q", ["qwen"]),
        ("areal inf chat --service ", ["default"]),
        ("areal get -o js", ["json", "jsonl", "jsonpath="]),
        ("areal init t", ["trainjob"]),
        ("areal config set o", ["output"]),
        ("areal config use-context l", ["local"]),
        ("areal get --show-o", ["--show-origin"]),
        ("areal logs model/qwen -c e", ["engine"]),
        ("areal get nonsense/", []),
        ("areal explain tr", ["trainjob"]),
        ("areal explain Tr", ["TrainJob"]),
        ("areal explain model.", ["model.metadata", "model.spec"]),
        ("areal explain TrainJob.spec.ro", ["TrainJob.spec.rollout"]),
        ("areal explain TrainJob.spec.rollout.", ["TrainJob.spec.rollout.service", "TrainJob.spec.rollout.model"]),
        ("areal explain inf.spec.models.exter", ["inf.spec.models.external"]),
        ("areal explain model.metadata.N", ["model.metadata.name"]),
        ("areal explain model.spec.path.", []),
        ("areal explain nothing.spec.", []),
    ],
)
def test_completion_offers_what_fits(spawn: Spawner, objects: None, line: str, offered: list[str]) -> None:
    assert complete(spawn, line) == offered


def test_completion_without_a_home_offers_kinds_and_nothing_fails(spawn: Spawner, tmp_path: Path) -> None:
    assert complete(spawn, "areal get infer", AREAL_HOME=str(tmp_path / "none")) == [
        "inferenceservices",
        "inferenceservice",
    ]


def test_completion_honours_a_home_given_on_the_line(spawn: Spawner, objects: None, home: Any) -> None:
    line = f"areal get --home {home.root} model/q"
    assert complete(spawn, line, AREAL_HOME="/nonexistent") == ["model/qwen"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_script_names_areal(areal: Areal, shell: str) -> None:
    result = areal("completion", shell)
    assert result.code == 0
    assert "_AREAL_COMPLETE" in result.out
    assert "areal" in result.out


def test_bash_script_is_accepted_by_bash(areal: Areal) -> None:
    script = areal("completion", "bash").out + "\ncomplete -p areal\n"
    done = subprocess.run(["bash", "-e"], input=script, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stderr
    assert "_areal_completion areal" in done.stdout
