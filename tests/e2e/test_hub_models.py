"""Manifests and configurations that name Hugging Face ids, with the embedded engine: from a filled cache, and from a
stand-in of the hub."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import MODEL, Box
from tests.hub_standin import HubStandin, files_of, fill_cache, hub_standin

pytestmark = pytest.mark.timeout(300)

NAME = "areal/reverse-digits"


@pytest.fixture
def standin() -> Iterator[HubStandin]:
    with hub_standin() as found:
        yield found


def manifest(box: Box, path: str = NAME, model: str = "") -> str:
    file = Path(box.manifest(model=model))
    file.write_text(file.read_text().replace(str(MODEL), path))
    return str(file)


def status(box: Box) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(box.ok("get", "model/reverse", "-o", "json").out)["status"]
    return found


@pytest.mark.extended
def test_hub_id_is_served_from_cache_without_network(box: Box, tmp_path: Path) -> None:
    commit = fill_cache(tmp_path / "hf" / "hub", NAME, MODEL)
    box.env |= {"HF_HOME": str(tmp_path / "hf"), "HF_ENDPOINT": "http://127.0.0.1:9"}
    box.ok("apply", "-f", manifest(box))
    assert box.chat("1234").isdigit()
    assert status(box)["commits"] == {f"{NAME}@main": commit}
    assert "unchanged" in box.ok("apply", "-f", manifest(box)).out


@pytest.mark.slow
def test_hub_id_is_downloaded_once_and_commit_is_pinned(
    box: Box,
    standin: HubStandin,
    tmp_path: Path,
) -> None:
    commit = standin.repository(NAME).push(files_of(MODEL), "first")
    box.env |= {"HF_HOME": str(tmp_path / "hf"), "HF_ENDPOINT": standin.url}
    applied = box.ok("apply", "-f", manifest(box))
    assert f"downloading {NAME}" in applied.err
    weights = [line for line in standin.asked if line.startswith("GET") and "safetensors" in line]
    assert len(weights) == 1 and status(box)["commits"] == {f"{NAME}@main": commit}
    standin.repository(NAME).push({**files_of(MODEL), "extra.json": b"{}"}, "second")
    asked = len(standin.asked)
    box.ok("restart", "model/reverse")
    assert status(box)["commits"] == {f"{NAME}@main": commit} and len(standin.asked) == asked
    assert f"snapshots/{commit}" in _configurations(box)
    second = standin.repository(NAME).revisions["main"]
    box.ok("apply", "-f", manifest(box, model=f"revision: {second}"))
    assert status(box)["commits"][f"{NAME}@{second}"] == second
    assert f"snapshots/{commit}" not in _configurations(box)


def _configurations(box: Box) -> str:
    """Of the running processes, as each was given by ``--config``."""
    words = [Path(f"/proc/{pid}/cmdline").read_text().split("\0") for pid in box.pids().values()]
    return "".join(Path(argv[argv.index("--config") + 1]).read_text() for argv in words)


@pytest.mark.parametrize(
    ("path", "env", "message", "code"),
    [
        ("org/nothing", {}, "org/nothing is not at", 4),
        ("org/nothing", {"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE", 4),
        ("no such folder", {}, "does not exist", 3),
    ],
)
def test_unavailable_model_is_reported_before_start(
    box: Box,
    standin: HubStandin,
    tmp_path: Path,
    path: str,
    env: dict[str, str],
    message: str,
    code: int,
) -> None:
    box.env |= {"HF_HOME": str(tmp_path / "hf"), "HF_ENDPOINT": standin.url, **env}
    result = box.areal("apply", "-f", manifest(box, path))
    assert (result.code, message in result.err) == (code, True), result.text
    assert not (box.home / "objects").exists() and not (box.home / "runs").exists()


@pytest.mark.extended
def test_model_without_weights_is_reported_before_start(box: Box, tmp_path: Path) -> None:
    (tmp_path / "words").mkdir()
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / "words" / name).write_bytes((MODEL / name).read_bytes())
    fill_cache(tmp_path / "hf" / "hub", NAME, tmp_path / "words")
    box.env |= {"HF_HOME": str(tmp_path / "hf"), "HF_ENDPOINT": "http://127.0.0.1:9"}
    unreachable = box.areal("apply", "-f", manifest(box))
    assert unreachable.code != 0 and "only in part" in unreachable.err and "be reached" in unreachable.err
    box.env["HF_HUB_OFFLINE"] = "1"
    result = box.areal("apply", "-f", manifest(box))
    assert (result.code, "only in part" in result.err) == (4, True), result.text
    assert not (box.home / "objects").exists() and not (box.home / "runs").exists()


@pytest.mark.slow
def test_token_of_the_manifest_is_used(box: Box, standin: HubStandin, tmp_path: Path) -> None:
    standin.repository(NAME).push(files_of(MODEL), "first")
    standin.repository(NAME).token = "hf_mine"
    box.env |= {"HF_HOME": str(tmp_path / "hf"), "HF_ENDPOINT": standin.url}
    refused = box.areal("apply", "-f", manifest(box))
    assert refused.code == 4 and "HF_TOKEN" in refused.err
    box.env |= {"MY_TOKEN": "hf_mine"}
    box.ok("apply", "-f", manifest(box, model="envFrom: {HF_TOKEN: {env: MY_TOKEN}}"))
    assert box.chat("1234").isdigit()
