"""The SDK's names: all there, and paid for when they are used."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys

import pytest

HEAVY = (
    "aiohttp",
    "httptools",
    "numpy",
    "torch",
    "transformers",
    "omegaconf",
    "orjson",
    "yaml",
    "asyncio",
    "uvloop",
    "openai",
)
SHOW = "import json, sys, {}; print(json.dumps(sorted(sys.modules)))"


@pytest.mark.parametrize(
    "package", ["areal", "areal.client", "areal.api", "areal.dataset", "areal.workflow", "areal.utils"]
)
def test_package_imports_no_heavy_modules(package: str) -> None:
    ran = subprocess.run([sys.executable, "-c", SHOW.format(package)], capture_output=True, text=True, check=True)
    assert [name for name in json.loads(ran.stdout) if name in HEAVY] == []


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("areal.client.inference", ("torch", "transformers", "omegaconf")),
        ("areal.rollout.controller", ("torch", "transformers", "omegaconf", "openai")),
        ("areal.api.cli_args", ("torch", "transformers", "omegaconf", "httptools")),
        ("areal.rollout.rows", ("torch", "transformers", "httptools")),
        ("areal.reward.worker", ("torch", "asyncio", "httptools", "numpy")),
    ],
)
def test_module_imports_only_its_needs(module: str, heavy: tuple[str, ...]) -> None:
    ran = subprocess.run([sys.executable, "-c", SHOW.format(module)], capture_output=True, text=True, check=True)
    assert [name for name in json.loads(ran.stdout) if name in heavy] == []


@pytest.mark.parametrize("package", ["areal", "areal.client", "areal.dataset"])
def test_every_exported_name_exists(package: str) -> None:
    module = importlib.import_module(package)
    assert all(getattr(module, name) is not None for name in module.__all__)
    assert set(module.__all__) <= set(dir(module)) or package == "areal.dataset"
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        module.nothing  # noqa: B018
