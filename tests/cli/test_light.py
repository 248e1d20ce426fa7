"""What the light commands may not import, as seen in ``sys.modules`` of a process of their own."""

from __future__ import annotations

import json
from collections.abc import Callable
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
SHOW = """
import json, sys
sys.argv[0] = 'areal'
from areal.cli.main import run
code = run()
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
def test_light_command_imports_nothing_heavy(
    words: tuple[str, ...], spawn: Spawner, record: Callable[..., Any], home: Any
) -> None:
    record("InferenceService", "default", {"gateway": {"port": 8080}})
    record("Model", "m1", {"backend": "embedded", "path": "./m1"}, labels={"tier": "prod"})
    result = spawn(*words, code=SHOW).finish()
    code, names = modules(result.err)
    assert code == 0, result.err
    assert sorted(name for name in HEAVY if name in names) == []


def test_a_configuration_file_costs_its_parser_and_nothing_else(
    spawn: Spawner, record: Callable[..., Any], home: Any
) -> None:
    record("Model", "m1", {"backend": "embedded", "path": "./m1"})
    home.config.write_text("currentContext: local\ndefaults:\n  output: table\n")
    code, names = modules(spawn("get", code=SHOW).finish().err)
    assert code == 0
    assert [name for name in HEAVY if name in names] == ["yaml"]


@pytest.mark.parametrize("line", ["areal ", "areal get mod", "areal describe model/", "areal inf chat --service "])
def test_completion_imports_nothing_heavy_and_no_state(line: str, spawn: Spawner, record: Callable[..., Any]) -> None:
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
