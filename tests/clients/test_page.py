"""``docs/clients.md`` says what the tests show."""

from __future__ import annotations

import importlib
from pathlib import Path

from tests.clients import known

HERE = Path(__file__).parent


def test_every_cell_has_a_test_and_page_lists_failures() -> None:
    for file in HERE.glob("test_*.py"):
        importlib.import_module(f"tests.clients.{file.stem}")
    absent = {(client, feature) for client, features in known.NOT_THEIRS.items() for feature in features}
    wanted = {(client, feature) for client in known.CLIENTS for feature in known.FEATURES} - absent
    assert wanted == known.COVERED
    page = (HERE.parents[1] / "docs" / "clients.md").read_text(encoding="utf-8")
    assert known.table() in page
    assert all(reason in page for reason in known.FAILS.values())
