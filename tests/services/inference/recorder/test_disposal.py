"""What is left of a deleted model's journals."""

from __future__ import annotations

from pathlib import Path

from areal.services.inference.recorder.changes import HITL_SESSION
from areal.services.inference.recorder.exporting import ExportRequest
from areal.services.inference.recorder.storage import DisposalReport, dispose
from tests.services.inference.recorder.support import Calls, start, vault_in
from tests.services.inference.recorder.test_store import rewarded


async def test_folder_without_finished_trajectory_is_removed(tmp_path: Path) -> None:
    root, calls = tmp_path / "model", Calls()
    vault = await vault_in(root)
    session, _ = await start(vault.own)
    await vault.own.record(session, calls.tokens([1]))
    await vault.own.record(HITL_SESSION, calls.tokens([1]))
    await vault.close()
    assert dispose(root) == DisposalReport()
    assert not root.exists()


async def test_unfetched_trajectory_is_kept_and_served_again(tmp_path: Path) -> None:
    root, calls = tmp_path / "model", Calls()
    vault, other = await vault_in(root), await vault_in(root, "other")
    _, session_id = await rewarded(vault, calls)
    await start(other.own)
    await other.close()
    await vault.close()
    (root / "a.models.json").write_text("[]")
    assert dispose(root) == DisposalReport(finished=1)
    assert [path.name for path in root.iterdir()] == ["a"]
    again = await vault_in(root, "successor")
    [tag] = await again.adopt(after_s=3600.0)
    journal = again.journals.get(tag)
    assert journal is not None
    _, exported = await journal.export(ExportRequest((session_id,)))
    assert len(exported.rows) == 1
    await again.close()
    assert dispose(root) == DisposalReport()


async def test_served_or_unreadable_journal_is_reported_and_kept(tmp_path: Path) -> None:
    vault = await vault_in(tmp_path, "served")
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "journal.db").write_bytes(b"no database at all" * 100)
    assert dispose(tmp_path) == DisposalReport(unreadable=("bad",), served=("served",))
    await start(vault.own)
    await vault.close()


def test_disposing_missing_folder_succeeds(tmp_path: Path) -> None:
    assert dispose(tmp_path / "never") == DisposalReport()
