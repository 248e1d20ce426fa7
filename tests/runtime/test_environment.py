"""The variables that a run inherits: absolute paths, and nothing of the caller's terminal or interpreter."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal.runtime.environment import inherited

AREAL = Path(__file__).resolve().parents[2] / "areal"
entries = st.lists(st.sampled_from(["", ".", "src", "/opt/x", "../y", "~/z"]), max_size=4).map(os.pathsep.join)


def test_inherited_makes_paths_absolute_and_drops_empty_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    found = inherited({"PYTHONPATH": ":src:/x:", "HF_HOME": "hub", "AREAL_HOME": ".areal", "PATH": "bin:/bin"})

    assert found["PYTHONPATH"] == f"{tmp_path}/src:/x"
    assert found["HF_HOME"] == f"{tmp_path}/hub" and found["AREAL_HOME"] == f"{tmp_path}/.areal"
    assert found["PATH"] == f"{tmp_path}/bin:/bin"


def test_inherited_without_home_uses_users_home() -> None:
    assert inherited({})["HOME"].startswith("/")
    assert inherited({"HOME": ""})["HOME"].startswith("/")


@pytest.mark.parametrize("name", ["PYTHONINSPECT", "PYTHONSAFEPATH", "PYTHONSTARTUP", "COLUMNS", "PWD"])
def test_inherited_omits_variables_describing_caller(name: str) -> None:
    assert name not in inherited({name: "1"})


@given(st.dictionaries(st.sampled_from(["PATH", "PYTHONPATH", "TMPDIR", "HOME", "X"]), entries))
def test_inherited_has_no_relative_paths_and_is_idempotent(environ: dict[str, str]) -> None:
    found = inherited(environ)

    assert inherited(found) == found
    assert found.get("X") == environ.get("X")
    for name in ("PATH", "PYTHONPATH"):
        assert all(part.startswith(("/", "~")) for part in found.get(name, "/").split(os.pathsep) if found.get(name))


def test_own_modules_start_without_working_folder_on_path() -> None:
    """``module_argv`` is the one place that spells the flags."""
    spelled = [
        f"{file.relative_to(AREAL)}:{number}"
        for file in AREAL.rglob("*.py")
        for number, line in enumerate(file.read_text().splitlines(), 1)
        if 'sys.executable, "-m"' in line or '[python, "-m"' in line
    ]

    assert spelled == []
