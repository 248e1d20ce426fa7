"""Backends and train engines are known by their contracts: no module but their own names an implementation."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "areal"


@pytest.mark.parametrize(
    "name, homes",
    [
        ("LocalBackend", {"runtime/backends/local.py", "resources/kinds.py"}),
        ("FSDPEngine", {"training/engines/fsdp.py", "resources/kinds.py"}),
    ],
)
def test_implementation_is_named_by_itself_and_the_registry_only(name: str, homes: set[str]) -> None:
    naming = {
        str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py") if re.search(rf"\b{name}\b", path.read_text())
    }
    assert naming == homes
