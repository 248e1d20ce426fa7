"""Paths of models and files: where they lead, and that they are made absolute when they are written."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from areal.resources.paths import import_fault, looks_local, resolve_model_path, same_content, with_absolute_paths


@pytest.mark.parametrize("path", ["./m", "../m", "/m", "~/m", ".", "a/b/c"])
def test_folder_path_looks_local(path: str) -> None:
    assert looks_local(path)


@pytest.mark.parametrize("path", ["Qwen/Qwen3-8B", "gpt2"])
def test_hub_id_does_not_look_local(path: str) -> None:
    assert not looks_local(path)


def test_model_path_prefers_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = tmp_path / "manifests" / "m.yaml"
    beside, here = tmp_path / "manifests" / "weights", tmp_path / "cwd" / "weights"
    beside.mkdir(parents=True)
    here.parent.mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    assert resolve_model_path("weights", str(manifest)) == str(beside)
    here.mkdir()
    assert resolve_model_path("./weights", str(manifest)) == str(here)
    assert resolve_model_path(str(beside)) == str(beside)


def test_model_path_of_hub_id_or_unknown_user_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "m").mkdir()
    assert resolve_model_path("Qwen/Qwen3-8B", "m.yaml") is None
    assert resolve_model_path("~/m") == str(tmp_path / "m")
    assert resolve_model_path("~no-such-user/m") is None


@pytest.fixture
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory and a manifest's folder, each with some files."""
    for name in ("cwd/m", "beside/m", "beside/adapter"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("cwd/key", "beside/only.jinja", "beside/job.yaml", "cwd/m/job.yaml"):
        (tmp_path / name).write_text("x")
    monkeypatch.chdir(tmp_path / "cwd")
    return tmp_path


@pytest.mark.parametrize(
    ("kind", "spec", "field", "found"),
    [
        ("Model", {"path": "./m"}, "path", "cwd/m"),
        ("Model", {"path": "m"}, "path", "cwd/m"),
        ("Model", {"tokenizerPath": "../beside/m"}, "tokenizerPath", "beside/m"),
        ("Model", {"chatTemplate": "only.jinja"}, "chatTemplate", "beside/only.jinja"),
        ("Model", {"lora": {"a": "adapter"}}, "lora.a", "beside/adapter"),
        ("Model", {"external": {"apiKeyFrom": {"file": "key"}}}, "external.apiKeyFrom.file", "cwd/key"),
        ("Model", {"envFrom": {"TOKEN": {"file": "key"}}}, "envFrom.TOKEN.file", "cwd/key"),
        ("InferenceService", {"auth": {"adminKeyFrom": {"file": "key"}}}, "auth.adminKeyFrom.file", "cwd/key"),
        ("TrainJob", {"config": "job.yaml"}, "config", "beside/job.yaml"),
        ("TrainJob", {"config": "job.yaml", "workingDir": "m"}, "config", "cwd/m/job.yaml"),
        ("TrainJob", {"workingDir": "m"}, "workingDir", "cwd/m"),
    ],
)
def test_relative_paths_of_every_kind_become_absolute(
    there: Path, monkeypatch: pytest.MonkeyPatch, kind: str, spec: dict[str, Any], field: str, found: str
) -> None:
    manifest = str(there / "beside" / "manifest.yaml")
    written = with_absolute_paths(kind, spec, manifest)
    value: Any = written
    for name in field.split("."):
        value = value[name]
    assert value == str(there / found)
    monkeypatch.chdir(there / "beside")
    assert with_absolute_paths(kind, written, manifest) == written  # nothing is left for another folder to change


@pytest.mark.parametrize(
    "spec", [{"path": "Qwen/Qwen3-8B"}, {"path": "/nowhere"}, {"path": "x" * 5000}, {"path": 7}, {"lora": None}, {}]
)
def test_values_naming_no_local_file_are_kept(there: Path, spec: dict[str, Any]) -> None:
    assert with_absolute_paths("Model", spec) == spec


def test_symlink_is_not_resolved(there: Path) -> None:
    (there / "cwd" / "latest").symlink_to(there / "cwd" / "m")
    assert with_absolute_paths("Model", {"path": "latest"})["path"] == str(there / "cwd" / "latest")


def test_folder_named_areal_does_not_shadow_package(tmp_path: Path) -> None:
    for name in ("areal/reward", "areal/api"):
        (tmp_path / name).mkdir(parents=True)
    assert import_fault("areal.reward.gsm8k:gsm8k_reward_fn", [str(tmp_path), *sys.path]) is None
    (tmp_path / "areal" / "__init__.py").write_text("")
    assert import_fault("areal.reward.gsm8k:gsm8k_reward_fn", [str(tmp_path), *sys.path]) is None


def test_import_fault_names_nearest_file_of_folder(tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text("def score() -> float: ...\n")
    absent = 'there is no module rewrd (did you mean "reward"?)'
    assert import_fault("rewrd:score", [str(tmp_path), *sys.path]) == absent
    assert import_fault("quite_other:score", [str(tmp_path), *sys.path]) == "there is no module quite_other"


def test_same_content_is_that_of_the_bytes_of_each_file(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    for folder in (one, other):
        (folder / "deep").mkdir(parents=True)
        (folder / "deep" / "a").write_text("1234")
        (folder / "b").write_text("x")

    def same() -> bool:
        return same_content(str(one), str(other))

    assert same() and same_content(str(one / "b"), str(other / "b"))
    assert not same_content(str(one), str(one / "b")) and not same_content(str(one / "b"), str(one))
    assert not same_content(str(one / "none"), str(other / "none"))
    (other / "deep" / "a").write_text("1235")
    os.utime(one / "deep" / "a", (9, 9))
    os.utime(other / "deep" / "a", (9, 9))
    assert not same(), "one size and one time in whole seconds: the bytes are compared"
    (other / "deep" / "a").write_text("1234")
    assert same()
    (other / "c").touch()
    assert not same()
