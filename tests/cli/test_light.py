"""What the light commands may not import, as seen in ``sys.modules`` of a process of their own."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Spawner

LIBRARIES = ("pydantic", "yaml", "httpx", "http.client", "asyncio", "jsonschema", "torch", "aiohttp", "numpy", "ray")
MODELS = tuple(f"areal.resources.{name}" for name in ("specs", "fields", "validation", "render"))
HEAVY = (
    *LIBRARIES,
    *MODELS,
    "psutil",
    "ssl",
    "importlib.metadata",
    "areal.services",
    "areal.training",
    "areal.client.http",
)
OTHER_HALF = ("socket", "subprocess", "shutil", "email", "calendar")  # of the standard library: for what acts or probes
EXECUTING = (
    *(f"areal.reconcilers.{name}" for name in ("converge", "execute", "launch", "outcomes", "operations")),
    "areal.state.journal",
    "areal.reconcilers.kinds.inference_launch",
)
SUSPENDED = """
apiVersion: areal.dev/v1alpha1
kind: InferenceService
metadata: {{name: default}}
spec: {{suspend: true}}
---
apiVersion: areal.dev/v1alpha1
kind: Model
metadata: {{name: m1}}
spec: {{backend: embedded, path: {folder}}}
"""
SHOW = """
import json, sys
sys.argv[0] = 'areal'
from areal.cli.main import main
code = main()
sys.stderr.write("\\n" + json.dumps([code, sorted(sys.modules)]))
"""


def modules(err: str) -> tuple[int, set[str]]:
    code, names = json.loads(err.rpartition("\n")[2])
    return code, set(names)


@pytest.mark.parametrize(
    "words",
    [
        ("--help",),
        ("inf", "--help"),
        ("get", "--help"),
        ("apply", "--help"),
        ("inf", "run", "--help"),
        ("version",),
        ("get",),
        ("get", "models", "-o", "json"),
        ("get", "models", "-l", "tier=prod", "-o", "jsonpath={.items[*].metadata.name}"),
        ("get", "model/m1", "--show-origin"),
        ("get", "processes"),
        ("inf", "ps", "--all"),
        ("inf", "models"),
        ("agent", "run", "--help"),
        ("agent", "ps", "--all"),
        ("events",),
        ("history", "model/m1"),
        ("config", "view"),
        ("config", "get-contexts"),
    ],
    ids=" ".join,
)
def test_light_command_imports_no_heavy_modules(
    words: tuple[str, ...], spawn: Spawner, record: Callable[..., Any], home: Any
) -> None:
    record("InferenceService", "default", {"gateway": {"port": 8080}})
    record("Model", "m1", {"backend": "embedded", "path": "./m1"}, labels={"tier": "prod"})
    result = spawn(*words, code=SHOW).finish()
    code, names = modules(result.err)
    assert code == 0, result.err
    unneeded = HEAVY if "--help" in words else (*HEAVY, *OTHER_HALF)  # click's help asks shutil for the terminal
    assert sorted(name for name in unneeded if name in names) == []


def test_unchanged_diff_imports_no_executor_or_http_client(spawn: Spawner, home: Any, tmp_path: Path) -> None:
    (tmp_path / "service.yaml").write_text(SUSPENDED.format(folder=tmp_path))
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer.json").write_text("{}")
    assert spawn("apply", "-f", str(tmp_path / "service.yaml")).finish().code == 0
    code, names = modules(spawn("diff", "-f", str(tmp_path / "service.yaml"), code=SHOW).finish().err)
    assert code == 0
    wanted = ("pydantic", "yaml", "areal.resources.specs", "areal.resources.fields", "areal.resources.validation")
    heavy = {*HEAVY, *OTHER_HALF, *EXECUTING} - {*wanted, "areal.resources.render"}
    assert sorted(name for name in heavy if name in names) == []


def test_config_file_imports_only_its_parser(spawn: Spawner, record: Callable[..., Any], home: Any) -> None:
    record("Model", "m1", {"backend": "embedded", "path": "./m1"})
    home.config.write_text("currentContext: local\ndefaults:\n  output: table\n")
    code, names = modules(spawn("get", code=SHOW).finish().err)
    assert code == 0
    assert [name for name in HEAVY if name in names] == ["yaml"]


@pytest.mark.parametrize("line", ["areal ", "areal get mod", "areal describe model/", "areal inf chat --service "])
def test_completion_imports_no_heavy_modules_or_state(line: str, spawn: Spawner, record: Callable[..., Any]) -> None:
    record("Model", "m1", {"backend": "embedded", "path": "./m1"})
    words = line.split(" ")
    result = spawn(code=SHOW, _AREAL_COMPLETE="bash_complete", COMP_WORDS=line, COMP_CWORD=str(len(words) - 1)).finish()
    code, names = modules(result.err)
    assert code == 0, result.err
    assert sorted(name for name in (*HEAVY, "areal.state.objects") if name in names) == []


def test_help_imports_no_verb(spawn: Spawner) -> None:
    _, names = modules(spawn("--help", code=SHOW).finish().err)
    ours = {"cli", "cli.main", "cli.options", "interrupt", "lazy", "terminal"}
    assert {name for name in names if name.startswith("areal.")} == {f"areal.{name}" for name in ours}
