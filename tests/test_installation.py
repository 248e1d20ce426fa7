"""Hints name the source that areal was installed from."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import areal
from areal.installation import _command, install_command

PACKAGE = Path(areal.__file__).parent


@pytest.mark.parametrize(
    ("source", "command"),
    [
        ({"url": "file:///src/a%20b", "dir_info": {"editable": True}}, "pip install -e '/src/a b[train]'"),
        ({"url": "file:///src/areal", "dir_info": {}}, "pip install '/src/areal[train]'"),
        (
            {"url": "https://example.org/areal.git", "vcs_info": {"vcs": "git", "commit_id": "abc"}},
            "pip install 'areal[train] @ git+https://example.org/areal.git@abc'",
        ),
        (
            {"url": "https://example.org/areal.whl", "archive_info": {}},
            "pip install 'areal[train] @ https://example.org/areal.whl'",
        ),
        (None, "pip install -e '.[train]', in a checkout of areal's source"),
    ],
)
def test_install_command_names_the_source_of_each_form(source: dict[str, Any] | None, command: str) -> None:
    assert _command("train", source) == command


def test_install_command_of_this_installation_is_no_index() -> None:
    assert not re.search(r"'areal\[train\]'", install_command("train"))


def test_no_message_sends_a_user_to_the_package_of_that_name_on_an_index() -> None:
    said = re.compile(r"pip install (-U )?['\"]?areal")
    found = [str(file) for file in PACKAGE.rglob("*.py") if said.search(file.read_text(encoding="utf-8"))]
    assert found == [str(PACKAGE / "installation.py")]
