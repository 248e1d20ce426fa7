"""Every dependency is explained, is imported by what it is for, and nothing else is explained."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
PAGE = (REPOSITORY / "docs" / "dependencies.md").read_text()
MODULES = {
    "pyyaml": "yaml",
    "prometheus-client": "prometheus_client",
    "huggingface-hub": "huggingface_hub",
    "math-verify": "math_verify",
    "megatron-core": "megatron",
    "nvidia-ml-py": "pynvml",
    "openai-agents": "agents",
}
AS_PROGRAMS = ("vllm", "sglang")  # started, or imported by themselves


def named(requirements: list[str]) -> set[str]:
    names = {re.split(r"[\[<>=; ]", each)[0].lower() for each in requirements}
    return names - {"areal"}


def explained() -> set[str]:
    """Packages of the tables' cells before the last, ``for``."""
    rows = [line.split("|")[1:-1] for line in PAGE.splitlines() if line.startswith("| `")]
    extras = set(PROJECT["optional-dependencies"])
    cells = [row[1] if set(re.findall(r"`([^`]+)`", row[0])) <= extras and len(row) == 3 else row[0] for row in rows]
    return {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}


def test_every_dependency_is_explained_and_no_other() -> None:
    extras = PROJECT["optional-dependencies"]
    wanted = named(PROJECT["dependencies"]) | {name for each in extras.values() for name in named(each)}
    assert explained() == wanted


RUNTIME = sorted(
    named(PROJECT["dependencies"])
    | {name for extra, each in PROJECT["optional-dependencies"].items() if "dev" not in extra for name in named(each)}
)


@pytest.mark.parametrize("package", RUNTIME)
def test_package_that_is_installed_is_imported(package: str) -> None:
    if package in AS_PROGRAMS:
        return
    module = MODULES.get(package, package)
    pattern = re.compile(rf"^\s*(?:import|from) {module}\b|import_module\(\"{module}|_package\([^)]*\"{module}\"", re.M)
    assert any(pattern.search(file.read_text()) for file in (REPOSITORY / "areal").rglob("*.py")), module
