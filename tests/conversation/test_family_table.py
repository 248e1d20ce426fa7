from __future__ import annotations

from tests.conversation.family_table import PAGE, page


def test_template_table_matches_documentation() -> None:
    written = PAGE.read_text(encoding="utf-8")
    assert page(written) == written, "python -m tests.conversation.family_table --write"
