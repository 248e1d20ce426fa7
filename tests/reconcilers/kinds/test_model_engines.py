"""Asking an installed engine for its flags: once a version, and never at the price of an apply."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from areal.reconcilers.kinds.model_engines import engine_args_faults, installed_flags
from areal.resources.render import RenderRequest, render

FLAGS = [f"flag-{number}" for number in range(30)]


def python_with(folder: Path, version: str = "1.2.3", flags: list[str] = FLAGS) -> Path:
    """An executable that answers as a Python with an engine does, and counts how often it is asked for help."""
    shown = "\n".join(f"  --{name} VALUE, -{index}x VALUE  what it is for" for index, name in enumerate(flags))
    both = "  --enable-cache, --no-enable-cache\n"
    script = folder / "python"
    script.write_text(
        f'#!/bin/sh\nif [ "$1" = -c ]; then echo {version}; exit 0; fi\necho asked >> {folder}/asked\n'
        f"cat <<'END'\nusage: --not-this [--nor-this]\n{shown}\n{both}END\n"
    )
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return script


def asked(folder: Path) -> int:
    file = folder / "asked"
    return len(file.read_text().splitlines()) if file.exists() else 0


def test_flags_are_asked_for_once_a_version(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    for _ in range(2):
        flags = installed_flags("vllm", str(python_with(tmp_path)), cache)
        assert flags == {*FLAGS, "enable-cache", "no-enable-cache"}
    assert asked(tmp_path) == 1
    assert "new" in (installed_flags("vllm", str(python_with(tmp_path, "1.3", [*FLAGS, "new"])), cache) or ())
    assert asked(tmp_path) == 2


@pytest.mark.parametrize("damage", ["{", "7", ""])
def test_damaged_cache_is_asked_for_again(tmp_path: Path, damage: str) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / "vllm-1.2.3.json").write_text(damage)
    assert "flag-1" in (installed_flags("vllm", str(python_with(tmp_path)), cache) or ())


def test_engine_that_is_absent_or_mute_is_not_checked(tmp_path: Path) -> None:
    assert installed_flags("vllm", str(tmp_path / "nowhere"), tmp_path) is None
    assert installed_flags("sglang", "/bin/false", tmp_path) is None
    assert installed_flags("vllm", str(python_with(tmp_path, flags=["few"])), tmp_path) is None


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
def test_unknown_argument_is_an_error_at_its_place_with_the_one_that_was_meant(tmp_path: Path, backend: str) -> None:
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
