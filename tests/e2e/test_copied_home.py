"""Commands at a copy of a home change nothing of the original; at the home, once it was moved, they go on."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest

from tests.e2e.conftest import Box


@pytest.mark.extended
def test_copied_home_is_unknown_and_leaves_original_unchanged(box: Box) -> None:
    manifest = box.write(
        "apiVersion: areal.dev/v1alpha1\nkind: InferenceService\nmetadata: {name: default}\n"
        f"spec:\n  gateway: {{port: {box.port}}}\n"
    )
    box.ok("apply", "-f", manifest)
    pids = box.pids()
    copy = replace(box, home=box.folder / "copied" / "home")
    shutil.copytree(box.home, copy.home)

    assert copy.phase("inferenceservice/default") == "Unknown"
    described = copy.ok("describe", "inferenceservice/default").out
    assert f"its processes belong to {box.home}/runs/" in described and f"remove {copy.home}/runs/" in described
    changed = box.write((box.folder / "manifest.yaml").read_text() + "  logLevel: debug\n", "changed.yaml")
    assert copy.areal("apply", "-f", changed, "--yes").code == 9
    assert copy.areal("restart", "inferenceservice/default").code != 0
    assert copy.areal("delete", "inferenceservice/default", "--yes").code != 0
    found = copy.areal("doctor", "--fix")
    assert "use that home" in found.out and "stop its processes" not in found.out
    assert box.pids() == pids and box.areal("diff", "--drift").code == 0

    moved = replace(box, home=box.folder / "moved")
    box.home.rename(moved.home)
    try:
        assert moved.pids() == pids
        moved.ok("reconcile", "inferenceservice/default", "--yes")  # their files are no longer where they know them
        assert moved.areal("diff", "--drift").code == 0 and not set(moved.pids().values()) & set(pids.values())
        moved.ok("delete", "inferenceservice/default", "--yes")
        assert moved.living() == []
    finally:
        moved.home.rename(box.home)
