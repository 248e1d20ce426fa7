"""The history of updates as a file."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from areal.services.weight_update import pairs
from areal.services.weight_update.pairs import Mode, Pair, UpdateHistory

PAIR = Pair("p", Mode.DISK, ("http://t",), ("http://w",))


def note(path: Path | None, version: int) -> None:
    UpdateHistory(path).note(PAIR, version, time.time(), replicas={"http://w": 1.5})


def test_history_keeps_newest_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pairs, "_MOST_BYTES", 2000)
    file = tmp_path / "weight_updates.jsonl"
    for version in range(100):
        note(file, version)
        assert file.stat().st_size <= 2000
    versions = [json.loads(line)["version"] for line in file.read_text().splitlines()]
    assert versions == list(range(versions[0], 100)) and len(versions) > 3


def test_unwritable_history_does_not_fail_update(tmp_path: Path) -> None:
    note(tmp_path / "absent" / "file", 1)
    note(None, 1)
    assert list(tmp_path.iterdir()) == []
