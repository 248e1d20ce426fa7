"""The state of an earlier commit is read as it is: nothing to change, nothing unknown; all of it can be deleted."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import Areal
from tests.e2e.earlier_home import unpack

REFS = ["inferenceservice/default", "inferenceservice/half", "model/reverse", "agentservice/counter", "trainjob/count"]


def files(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_earlier_home_is_unchanged_described_and_deleted(
    areal: Areal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unpack(tmp_path)
    monkeypatch.chdir(tmp_path / "work")
    before = files(tmp_path / "home")

    assert areal("diff", "-f", "objects.yaml", "-f", "half.yaml").out.splitlines()[0] == "5 unchanged"
    assert areal("diff", "--drift").code == 0
    shown = {row[0]: row[2] for row in areal("get", "all", "--all").rows[1:]}
    assert shown == dict.fromkeys(REFS, "Suspended") | {"trainjob/count": "Succeeded"}
    for ref in REFS:
        described = areal("describe", ref)
        assert described.code == 0 and "Unknown" not in described.out, described
    job = areal("train", "status", "count", "--json").json
    assert (job["phase"], job["step"], job["reward"], job["attempt"], job["exitCode"]) == ("Succeeded", 10, 1.0, 1, 0)
    assert "attempt 1 from 0" in areal("logs", "trainjob/count").out
    assert [row[0] for row in areal("history", "model/reverse").rows[1:]] == ["1", "2", "3"]
    assert "InferenceService/half" in areal("events").out
    assert files(tmp_path / "home") == before, "looking writes nothing"

    assert areal("doctor").code == 1, "the killed apply"
    assert areal("doctor", "--fix", "--yes").code == 0
    assert areal("apply", "-f", "objects.yaml", "-f", "half.yaml").out.splitlines() == [
        f"{ref} unchanged" for ref in REFS
    ]
    deleted = areal("delete", *REFS, "--yes")
    assert deleted.code == 0, deleted
    assert areal("get", "all", "--all").rows == [] and areal("doctor").code == 0
