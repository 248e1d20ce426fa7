"""Hints name the source that areal was installed from, and never the project of the name `areal` on an index."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import areal
from areal.installation import _command, install_command

PACKAGE = Path(areal.__file__).parent
ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("source", "command"),
    [
        ({"url": "file:///src/a%20b", "dir_info": {"editable": True}}, "pip install -e '/src/a b[train]'"),
        ({"url": "file:///src/areal", "dir_info": {}}, "pip install '/src/areal[train]'"),
        (
            {"url": "https://example.org/areal.git", "vcs_info": {"vcs": "git", "commit_id": "abc"}},
            "pip install 'arealctl[train] @ git+https://example.org/areal.git@abc'",
        ),
        (
            {"url": "https://example.org/areal.whl", "archive_info": {}},
            "pip install 'arealctl[train] @ https://example.org/areal.whl'",
        ),
        ({}, "pip install 'arealctl[train]'"),
        (None, "pip install -e '.[train]', in a checkout of areal's source"),
    ],
)
def test_install_command_names_the_source_of_each_form(source: dict[str, Any] | None, command: str) -> None:
    assert _command("train", source) == command


def test_install_command_never_uses_index() -> None:
    assert not re.search(r"'areal\[train\]'", install_command("train"))


def test_no_text_recommends_index_package() -> None:
    install = re.compile(r"(?:pip|pipx|uv)[\w ]* (?:install|add) (?:-\S+ )*['\"]?areal\b(?![./])|\bareal\[")
    texts = [
        *PACKAGE.rglob("*.py"),
        *ROOT.glob("*.*"),
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "examples").rglob("*.*"),
    ]
    texts += [
        *(ROOT / "manifests").rglob("*.yaml"),
        *(ROOT / "benchmarks").rglob("*.*"),
        *(ROOT / ".github").rglob("*.*"),
    ]
    found = {
        f"{file.relative_to(ROOT)}: {line.strip()}"
        for file in texts
        if file.is_file() and file.suffix in (".py", ".md", ".yaml", ".yml", ".toml", ".txt")
        for line in file.read_text(encoding="utf-8").splitlines()
        if install.search(line)
    }
    assert found == set()


def metadata_of(folder: Path, name: str, **files: str) -> Path:
    info = folder / f"{name}-9.9.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 9.9\n")
    for file, text in {"WHEEL": "Wheel-Version: 1.0\n", **files}.items():
        (info / file.replace("_json", ".json")).write_text(text)
    return folder


def doctor(home: Path, folder: Path, path: Path) -> list[dict[str, str]]:
    """The findings about other projects of the name, as ``areal doctor`` prints them in ``folder``."""
    env = os.environ | {"PYTHONPATH": f"{path}:{ROOT}", "AREAL_HOME": str(home)}
    words = [sys.executable, "-P", "-m", "areal.cli", "doctor", "-o", "json"]
    done = subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, timeout=60)
    found: list[dict[str, str]] = json.loads(done.stdout)["items"]
    return [each for each in found if "another" in each["what"]]


def test_doctor_names_foreign_distribution_with_next_step(tmp_path: Path) -> None:
    (found,) = doctor(tmp_path / "home", tmp_path, metadata_of(tmp_path / "packages", "areal"))
    assert found["what"] == f"the distribution areal 9.9 in {tmp_path}/packages is another project"
    assert "command" in found["why"] and found["fixCommand"].startswith("pip uninstall areal, then pip install ")
    assert "[" not in found["fixCommand"]


@pytest.mark.parametrize("module", ["areal/__init__.py", "areal.py"])
@pytest.mark.parametrize("place", ["work", "path"])
def test_doctor_names_shadowing_package(tmp_path: Path, module: str, place: str) -> None:
    for each in ("work", "path"):
        (tmp_path / each).mkdir()
    file = tmp_path / place / module
    file.parent.mkdir(exist_ok=True)
    if place == "work":
        file.write_text("")
        (found,) = doctor(tmp_path / "home", tmp_path / "work", tmp_path / "path")
    else:  # behind this checkout on the path: another order hides it
        file.write_text("")
        (found,) = doctor(tmp_path / "home", tmp_path / "path", tmp_path / "work")
    assert found["what"] == f"another areal: {file}"
    assert str(file.parents[module.count("/")]) in found["fixCommand"]


def test_doctor_finds_no_foreign_areal(tmp_path: Path) -> None:
    assert doctor(tmp_path / "home", tmp_path, tmp_path) == []
    editable = json.dumps({"url": ROOT.as_uri(), "dir_info": {"editable": True}})
    renamed = metadata_of(tmp_path / "packages", "areal", direct_url_json=editable)
    assert doctor(tmp_path / "home", ROOT, renamed) == [], "this checkout under its old name"
