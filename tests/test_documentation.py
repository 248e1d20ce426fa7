"""The pages under ``docs/``: the files that they name exist, and their links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
PAGES = sorted((REPOSITORY / "docs").rglob("*.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_architecture_names_files_that_exist() -> None:
    text = (REPOSITORY / "docs" / "architecture.md").read_text()
    named = set(re.findall(r"\bareal/[\w/]+(?:\.py)?", text))
    assert len(named) > 40
    assert sorted(name for name in named if not (REPOSITORY / name).exists()) == []


def test_architecture_names_classes_that_exist() -> None:
    text = (REPOSITORY / "docs" / "architecture.md").read_text()
    sources = "".join(file.read_text() for file in (REPOSITORY / "areal").rglob("*.py"))
    names = {name for name in re.findall(r"`([A-Z]\w+)`", text) if not name.endswith("Job")}
    assert sorted(name for name in names if not re.search(rf"\b{name}\b", sources)) == []
