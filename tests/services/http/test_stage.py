from __future__ import annotations

import json
from pathlib import Path

import pytest

from areal.services.http.process import report_stage


def test_stage_is_written_whole_where_the_environment_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "stage.json"
    monkeypatch.setenv("AREAL_STAGE_FILE", str(file))
    report_stage("loading", done=1, total=2)
    report_stage("serving")
    assert json.loads(file.read_text()) == {"stage": "serving", "done": None, "total": None}
    assert list(tmp_path.iterdir()) == [file]


def test_stage_without_a_file_is_nobodys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AREAL_STAGE_FILE", raising=False)
    report_stage("serving")
