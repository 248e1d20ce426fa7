"""Every manifest of manifests/ is ready to apply, and so is every overlay."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from areal.resources.documents import OVERLAY_FILE
from areal.resources.render import RenderRequest, render
from areal.resources.resource import Rendered
from tests.cli.conftest import Areal, areal, clean_environment  # noqa: F401 - fixtures

ROOT = Path(__file__).resolve().parents[1]
FILES = sorted(path for path in (ROOT / "manifests").rglob("*.yaml") if path.name != OVERLAY_FILE)
OVERLAYS = sorted((ROOT / "manifests").rglob(OVERLAY_FILE))
CASES = [
    *(["-f", str(path.relative_to(ROOT))] for path in FILES if "apiVersion: areal.dev" in path.read_text()),
    *(["-k", str(path.parent.relative_to(ROOT))] for path in OVERLAYS),
    *(
        ["-k", str(path.parent.relative_to(ROOT)), "--profile", profile]
        for path in OVERLAYS
        for profile in yaml.safe_load(path.read_text()).get("profiles", {})
    ),
]


@pytest.mark.parametrize("flags", CASES, ids=" ".join)
def test_manifest_and_its_rendering_are_valid(
    areal: Areal,  # noqa: F811
    flags: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(ROOT)
    checked = areal("validate", *flags)
    assert checked.code == 0, checked.err
    rendered = areal("render", *flags)
    assert rendered.code == 0 and "${{" not in rendered.out
    again = tmp_path / "rendered.yaml"
    again.write_text(rendered.out)
    assert areal("render", "-f", str(again)).out == rendered.out


def team(name: str, profile: str | None = None) -> Rendered:
    return render(RenderRequest(overlay=str(ROOT / "manifests" / "teams" / name), profile=profile))


def test_teams_share_template_but_no_name_or_port() -> None:
    teams = {name: team(name).resources for name in ("research", "production")}
    names = [str(item.ref) for found in teams.values() for item in found]
    assert len(names) == len(set(names)) == 7
    ports = {item.spec["gateway"]["port"] for found in teams.values() for item in found if "gateway" in item.spec}
    assert ports == {8081, 8082}
    assert {item.labels["team"] for item in teams["research"]} == {"research"}


def test_gpu_profile_moves_team_models_to_gpus() -> None:
    backends = {item.spec["backend"] for item in team("production", "gpu").resources if item.kind == "Model"}
    assert backends == {"sglang:t2"}
