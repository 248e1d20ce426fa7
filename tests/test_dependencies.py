"""Every dependency is explained, is imported by what it is for, and nothing else is explained."""

from __future__ import annotations

import contextlib
import re
import tomllib
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

REPOSITORY = Path(__file__).parents[1]
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
PAGE = (REPOSITORY / "docs" / "dependencies.md").read_text()
MODULES = {
    "pillow": "PIL",
    "pyyaml": "yaml",
    "prometheus-client": "prometheus_client",
    "huggingface-hub": "huggingface_hub",
    "megatron-core": "megatron",
    "nvidia-ml-py": "pynvml",
    "openai-agents": "agents",
    "opentelemetry-sdk": "opentelemetry.sdk",
    "opentelemetry-exporter-otlp-proto-http": "opentelemetry.exporter.otlp.proto.http",
    "opentelemetry-instrumentation-httpx": "opentelemetry.instrumentation",
}
AS_PROGRAMS = ("vllm", "sglang", "mkdocs-material")  # started, or imported by themselves


def named(requirements: list[str]) -> set[str]:
    names = {re.split(r"[\[<>=; ]", each)[0].lower() for each in requirements}
    return names - {PROJECT["name"]}


def explained() -> set[str]:
    """Packages of the tables' cells before the last, ``for``."""
    rows = [line.split("|")[1:-1] for line in PAGE.splitlines() if line.startswith("| `")]
    extras = set(PROJECT["optional-dependencies"])
    cells = [row[1] if set(re.findall(r"`([^`]+)`", row[0])) <= extras and len(row) == 3 else row[0] for row in rows]
    return {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}


def test_dependency_page_matches_project() -> None:
    extras = PROJECT["optional-dependencies"]
    wanted = named(PROJECT["dependencies"]) | {name for each in extras.values() for name in named(each)}
    assert explained() == wanted


RUNTIME = sorted(
    named(PROJECT["dependencies"])
    | {name for extra, each in PROJECT["optional-dependencies"].items() if "dev" not in extra for name in named(each)}
)


@pytest.mark.parametrize("package", RUNTIME)
def test_installed_package_is_imported(package: str) -> None:
    if package in AS_PROGRAMS:
        return
    module = MODULES.get(package, package)
    pattern = re.compile(rf"^\s*(?:import|from) {module}\b|import_module\(\"{module}|_package\([^)]*\"{module}\"", re.M)
    assert any(pattern.search(file.read_text()) for file in (REPOSITORY / "areal").rglob("*.py")), module


def extras_not_provided(requirements: list[str]) -> set[str]:
    """Extras that ``requirements``, and what they require in turn, ask of an installed package under a name that it
    does not have. pip before 23.3 takes names literally: it warns, and installs without the extra."""
    missing, seen, pending = set(), set(), [(Requirement(each), "") for each in requirements]
    while pending:
        requirement, extra = pending.pop()
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        with contextlib.suppress(PackageNotFoundError):
            found = distribution(requirement.name)
            provided = found.metadata.get_all("Provides-Extra") or []
            missing |= {f"{requirement.name}[{each}]" for each in requirement.extras if each not in provided}
            for wanted in ("", *requirement.extras):
                if (requirement.name, wanted) not in seen:
                    seen.add((requirement.name, wanted))
                    pending += [(Requirement(each), wanted) for each in found.requires or []]
    return missing


@pytest.mark.parametrize("extra", ["embedded,train", "dev"])
def test_extra_of_dependency_exists(extra: str) -> None:
    extras, names, requirements = PROJECT["optional-dependencies"], set(extra.split(",")), PROJECT["dependencies"][:]
    while names:
        wanted = [Requirement(each) for name in names for each in extras[name]]
        requirements += [str(each) for each in wanted if each.name != PROJECT["name"]]
        names = {name for each in wanted if each.name == PROJECT["name"] for name in each.extras}
    assert len(requirements) > 10 and extras_not_provided(requirements) == set()
