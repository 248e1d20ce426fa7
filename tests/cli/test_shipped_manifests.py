"""The manifests that come with areal are valid."""

from __future__ import annotations

import pytest

from tests.e2e.conftest import ROOT

from .conftest import Areal

MANIFESTS = ROOT / "manifests"
FILES = sorted(path for path in MANIFESTS.rglob("*.yaml") if "teams" not in path.parts)


@pytest.mark.parametrize("file", FILES, ids=lambda path: str(path.relative_to(MANIFESTS)))
def test_shipped_manifest_is_valid(areal: Areal, file: object) -> None:
    result = areal("validate", "-f", str(file))

    assert result.code == 0, result


@pytest.mark.parametrize("team", ["search", "assistant"])
def test_team_overlay_sets_account_of_every_job(areal: Areal, team: str) -> None:
    rendered = areal("render", "-k", str(MANIFESTS / "slurm" / "teams" / team))

    assert rendered.code == 0
    assert f"account: {team}" in rendered.out and f"name: {team}-qwen-32b" in rendered.out
