"""Where a model's path leads."""

from __future__ import annotations

from pathlib import Path

import pytest

from areal.resources.paths import looks_local, resolve_model_path


@pytest.mark.parametrize("path", ["./m", "../m", "/m", "~/m", ".", "a/b/c"])
def test_path_that_can_only_be_a_folder_looks_local(path: str) -> None:
    assert looks_local(path)


@pytest.mark.parametrize("path", ["Qwen/Qwen3-8B", "gpt2"])
def test_hub_id_does_not_look_local(path: str) -> None:
    assert not looks_local(path)


def test_model_path_prefers_the_working_directory_to_the_manifests_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = tmp_path / "manifests" / "m.yaml"
    beside, here = tmp_path / "manifests" / "weights", tmp_path / "cwd" / "weights"
    beside.mkdir(parents=True)
    here.parent.mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    assert resolve_model_path("weights", str(manifest)) == str(beside)
    here.mkdir()
    assert resolve_model_path("./weights", str(manifest)) == str(here)
    assert resolve_model_path(str(beside)) == str(beside)


def test_model_path_of_the_hub_or_a_stranger_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "m").mkdir()
    assert resolve_model_path("Qwen/Qwen3-8B", "m.yaml") is None
    assert resolve_model_path("~/m") == str(tmp_path / "m")
    assert resolve_model_path("~no-such-user/m") is None
