"""Checking engineArgs by an installed engine's source, and by its help once a version."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

import pytest

from areal.reconcilers.kinds import inference_launch, model_engines
from areal.reconcilers.kinds.engine_commands import ENGINE_COMMANDS
from areal.reconcilers.kinds.inference_launch import Launch
from areal.reconcilers.kinds.model_engines import (
    InstalledEngine,
    engine_args_faults,
    installed_engine,
    installed_flags,
    source_flags,
)
from areal.reconcilers.launch import Slot
from areal.resources.render import RenderRequest, render
from areal.resources.specs import InferenceServiceSpec
from areal.resources.validation import effective
from tests.reconcilers.worlds import model
from tests.services.inference.engines.conformance.engines import ON_GPU, SGLANG_ON_CPU

FLAGS = [f"flag-{number}" for number in range(30)]


def python_with(folder: Path, version: str = "1.2.3", flags: list[str] = FLAGS, delay: str = "") -> Path:
    """An executable that answers as a Python with an engine does, and counts how often it is asked for help."""
    shown = "\n".join(f"  --{name} VALUE, -{index}x VALUE  what it is for" for index, name in enumerate(flags))
    both = "  --enable-cache, --no-enable-cache\n"
    script = folder / "python"
    script.write_text(
        f'#!/bin/sh\nif [ "$1" = -c ]; then printf "{version}\\n{folder}/vllm\\n"; exit 0; fi\n'
        f"echo asked >> {folder}/asked\n{delay}cat <<'END'\nusage: --not-this [--nor-this]\n{shown}\n{both}END\n"
    )
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return script


def engine_with(folder: Path, version: str = "1.2.3", flags: list[str] = FLAGS) -> InstalledEngine:
    return installed_engine("vllm", {"AREAL_ENGINE_PYTHON": str(python_with(folder, version, flags))})


def asked(folder: Path) -> int:
    file = folder / "asked"
    return len(file.read_text().splitlines()) if file.exists() else 0


def test_flags_are_queried_once_per_version(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    for _ in range(2):
        flags = installed_flags(engine_with(tmp_path), cache)
        assert flags == {*FLAGS, "enable-cache", "no-enable-cache"}
    assert asked(tmp_path) == 1
    assert "new" in (installed_flags(engine_with(tmp_path, "1.3", [*FLAGS, "new"]), cache) or ())
    assert asked(tmp_path) == 2


@pytest.mark.parametrize("damage", ["{", "7", ""])
def test_damaged_cache_is_queried_again(tmp_path: Path, damage: str) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    of = engine_with(tmp_path)
    (cache / f"vllm-1.2.3-{of.digest}.json").write_text(damage)
    assert "flag-1" in (installed_flags(of, cache) or ())
    assert asked(tmp_path) == 1


def test_missing_or_silent_engine_is_not_checked_and_reported(tmp_path: Path) -> None:
    told: list[str] = []
    for engine, python in (("vllm", str(tmp_path / "nowhere")), ("sglang", "/bin/false")):
        of = installed_engine(engine, {"AREAL_ENGINE_PYTHON": python})
        assert installed_flags(of, tmp_path, told.append) is None
        assert told.pop() == f"engineArgs are not checked: {engine} is not installed in {python}"
    assert installed_flags(engine_with(tmp_path, flags=["few"]), tmp_path, told.append) is None
    assert told.pop() == "engineArgs are not checked: vllm --help lists no flags"


def write_source(folder: Path, flags: list[str]) -> None:
    """vLLM's: literals of options, and fields of the class that others are made from."""
    parser = folder / "vllm" / "engine" / "arg_utils.py"
    parser.parent.mkdir(parents=True)
    fields = "".join(f"    {name.replace('-', '_')}: int = 0\n" for name in flags)
    parser.write_text(f"class EngineArgs:\n{fields}\nparser.add_argument('--of-a-literal')\n")


def test_argument_found_in_parser_source_runs_no_help(tmp_path: Path) -> None:
    python = python_with(tmp_path)
    write_source(tmp_path, FLAGS)
    text = (
        MANIFEST.format(backend="vllm", python=python).replace("flag1", "flag-1").replace("flag-77", "no-of-a-literal")
    )
    assert not engine_args_faults(render(RenderRequest(files=("-",), stdin=text)).resources, tmp_path / "cache")
    assert asked(tmp_path) == 0


def test_argument_missing_in_source_is_looked_up_in_help(tmp_path: Path) -> None:
    python = python_with(tmp_path, flags=["flag1", *FLAGS])
    write_source(tmp_path, FLAGS)
    found = render(RenderRequest(files=("-",), stdin=MANIFEST.format(backend="vllm", python=python)))
    ((problem,),) = engine_args_faults(found.resources, tmp_path / "cache").values()
    assert problem.path == "spec.engineArgs.flag-77" and asked(tmp_path) == 1


def test_parser_source_follows_engine_environment(tmp_path: Path) -> None:
    """A manifest's PYTHONPATH is a fork of the engine: its arguments count, and not those of the installed one."""
    for name, flags in (("installed", FLAGS), ("fork", [*FLAGS, "of-the-fork"])):
        write_source(tmp_path / name, flags)
        (tmp_path / name / "vllm" / "__init__.py").touch()
        about = tmp_path / name / "vllm-1.0.dist-info"
        about.mkdir()
        (about / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 1.0\n")

    def faults(path: str, argument: str) -> int:
        text = MANIFEST.format(backend="vllm", python=sys.executable).replace("flag-77", argument)
        text = text.replace("flag1", "flag-1").replace("env: {", f"env: {{PYTHONPATH: {tmp_path / path}, ")
        resources = render(RenderRequest(files=("-",), stdin=text)).resources
        return len(engine_args_faults(resources, tmp_path / "cache"))

    assert faults("fork", "of-the-fork") == 0
    assert faults("fork", "flag-2") == faults("installed", "flag-2") == 0
    assert source_flags(installed_engine("vllm", {"PYTHONPATH": str(tmp_path / "installed")}), tmp_path) is not None
    assert "of-the-fork" not in (
        source_flags(installed_engine("vllm", {"PYTHONPATH": str(tmp_path / "installed")}), tmp_path) or ()
    )


def test_help_timeout_is_reported_and_retried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_engines, "_HELP_S", 0.05)
    text = MANIFEST.format(backend="vllm", python=python_with(tmp_path, delay="exec sleep 30\n"))
    resources = render(RenderRequest(files=("-",), stdin=text)).resources
    told: list[str] = []
    for _ in range(2):
        assert not engine_args_faults(resources, tmp_path / "cache", lambda ref, stage: told.append(stage))
    assert told[1] == told[3] == "engineArgs are not checked: vllm --help took more than 0.05 s"
    monkeypatch.undo()
    text = text.replace(str(tmp_path / "python"), str(python_with(tmp_path)))
    ((first, _),) = engine_args_faults(resources, tmp_path / "cache").values()
    assert "no such argument" in first.message


@pytest.mark.parametrize(
    "engine", [pytest.param(engine, marks=getattr(pytest.mark, engine)) for engine in ("vllm", "sglang")]
)
def test_real_parser_source_has_all_flags_of_help(tmp_path: Path, engine: str) -> None:
    python = os.environ.get(f"AREAL_{engine.upper()}_PYTHON")
    if not python:
        pytest.skip(f"AREAL_{engine.upper()}_PYTHON names no Python that has {engine}")
    env = {"PYTHONPATH": str(SGLANG_ON_CPU)} if engine == "sglang" and not ON_GPU else {}
    of = installed_engine(engine, {**env, "AREAL_ENGINE_PYTHON": python})
    source, listed = source_flags(of, tmp_path), installed_flags(of, tmp_path) or ()
    prose = ("json-arg", "help")  # of vLLM's example; others are cut at the end of a line
    flags = frozenset(name for name in listed if "." not in name and name not in prose and not name.endswith("-"))
    assert source is not None and flags and flags - set(source) == set()
    (tmp_path / "key").write_text("k")
    item = model({"service": "home", "backend": engine, "path": str(tmp_path), "lora": {"a": str(tmp_path)}})
    slot = Slot(uid="u", ref=str(item.ref), component="engine", replica=0, port=20001, host="10.0.0.1")
    launch = Launch(item, slot, str(tmp_path / "key"), "/home/data/qwen", "/home/routes.json")
    argv = inference_launch.engine(launch, effective("Model", item.spec), InferenceServiceSpec()).argv
    passed = {name.removeprefix("--") for name in argv if name.startswith("--")}
    assert len(passed) > 5 and (passed | {"api-key"}) - flags == set()
    switches = ENGINE_COMMANDS[engine].switches or ()
    assert [name for name in switches if f"no-{name}" in flags or name not in flags] == []


MANIFEST = """\
apiVersion: areal.dev/v1alpha1
kind: Model
metadata: {{name: m}}
spec:
  backend: {backend}
  path: Qwen/Qwen3-0.6B
  env: {{AREAL_ENGINE_PYTHON: {python}}}
  engineArgs:
    flag1: 3
    flag-77: 4
"""


@pytest.mark.parametrize("backend", ["vllm", "sglang:d2t2"])
def test_unknown_argument_error_gives_place_and_suggestion(tmp_path: Path, backend: str) -> None:
    flags = ["flag1", *FLAGS]
    text = MANIFEST.format(backend=backend, python=python_with(tmp_path, flags=flags))
    found = render(RenderRequest(files=("-",), stdin=text))
    ((problem,),) = engine_args_faults(found.resources, tmp_path / "cache").values()
    assert problem.pos.line == 10 and problem.path == "spec.engineArgs.flag-77"
    assert "did you mean" in problem.message


def test_embedded_engine_is_not_asked(tmp_path: Path) -> None:
    text = MANIFEST.format(backend="embedded", python=python_with(tmp_path)).replace("flag1: 3", "threads: 1")
    text = text.replace("    flag-77: 4\n", "")
    assert not engine_args_faults(render(RenderRequest(files=("-",), stdin=text)).resources, tmp_path / "cache")
    assert asked(tmp_path) == 0
