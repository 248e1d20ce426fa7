"""docs/reference/cli.md is what the tree says today."""

from __future__ import annotations

from pathlib import Path

import pytest

from areal.cli import reference


def test_repository_page_is_current() -> None:
    assert reference.main(["--check"]) == 0, "run python -m areal.cli.reference --write"


def test_page_is_independent_of_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    before = reference.page()
    monkeypatch.setenv("COLUMNS", "30")
    assert reference.page() == before


def test_check_fails_on_stale_page_and_write_repairs_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "docs" / "cli.md"
    monkeypatch.setattr(reference, "PAGE", page)
    assert reference.main(["--check"]) == 1
    assert "is stale" in capsys.readouterr().err
    assert reference.main(["--write"]) == 0
    assert reference.main(["--check"]) == 0
    page.write_text(page.read_text() + "more")
    assert reference.main(["--check"]) == 1


@pytest.mark.parametrize("words", [[], ["--nothing"], ["--write", "--check"]])
def test_unknown_arguments_are_wrong_usage(words: list[str]) -> None:
    assert reference.main(words) == 2


def test_page_has_a_section_for_every_command() -> None:
    text = reference.page()
    for path, _, leaf in reference.commands():
        assert f"\n### areal {' '.join(path)}\n" in text
        assert leaf.help in text
