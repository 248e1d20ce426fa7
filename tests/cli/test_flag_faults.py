"""Verbs that build manifests from flags say what is wrong of the flags."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from areal.cli.inf.converge import flag_of
from areal.resources.kinds import Ref
from areal.state.home import Home
from areal.state.layers import Layer, replace
from areal.state.objects import ObjectStore
from tests.cli.conftest import Areal

RUN = ("inf", "run", "-d", "--model", "m", "--model-path")
REGISTER = ("inf", "register", "--model", "m", "--model-path")


@pytest.mark.parametrize("dry", [(), ("--dry-run",)])
@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((*RUN, ".", "--backend", "embeded"), "--backend: "),
        ((*RUN, "./none", "--backend", "embedded"), "--model-path: model folder './none' does not exist"),
        ((*RUN, ".", "--backend", "embedded", "--replicas", "999999999"), "--replicas: "),
        ((*RUN, ".", "--backend", "embedded", "--engine-args", "max-len=3"), "--engine-args max-len: "),
        ((*RUN, "."), "--backend is missing"),
        ((*REGISTER, ".", "--backend", "embedded:t2"), "--backend: "),
    ],
)
def test_fault_names_the_flag(
    areal: Areal, record: Callable[..., Any], tmp_path: Path, words: tuple[str, ...], said: str, dry: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    record("InferenceService", "default", {"suspend": True})
    result = areal(*words, *dry)
    assert result.code == 3, result.err
    assert said in result.err
    assert "stdin" not in result.err and "spec." not in result.err and "manifest" not in result.err


def test_field_that_another_layer_holds_is_told_by_its_flag(
    areal: Areal, record: Callable[..., Any], home: Home, tmp_path: Path
) -> None:
    record("InferenceService", "default", {"suspend": True})
    spec = {"backend": "embedded", "path": str(tmp_path), "service": "default"}
    found = record("Model", "m", spec)
    scaled = Layer("scale", {"replicas": 3}, None, "ann@desk", 1.0)
    from dataclasses import replace as changed

    ObjectStore(home).put(changed(found, layers=replace(found.layers, scaled)))
    assert ObjectStore(home).get(Ref("Model", "m")).spec["replicas"] == 3  # type: ignore[union-attr]
    words = ("--backend", "embedded", "--model-path", str(tmp_path))
    result = areal("inf", "register", "--model", "m", *words, "--replicas", "2")
    assert result.code == 5
    assert "--replicas: 3 was set by scale (ann@desk" in result.err and "the command line says 2" in result.err
    assert "--force" in result.err and "stdin" not in result.err and "manifest" not in result.err
    moved = areal("inf", "register", "--model", "m", *words, "--service", "other")
    assert moved.code == 4, "the service is not there"


def test_served_name_that_another_model_of_the_service_has_is_refused(
    areal: Areal, record: Callable[..., Any], tmp_path: Path
) -> None:
    record("InferenceService", "default", {"suspend": True})
    record("Model", "m", {"backend": "embedded", "path": str(tmp_path), "servedModelName": "Q/q"})
    words = ("inf", "register", "--backend", "embedded", "--model-path", str(tmp_path), "--dry-run")
    taken = areal(*words, "--model", "n", "--served-model-name", "Q/q")
    assert taken.code == 3 and '--served-model-name: "Q/q" is what clients' in taken.err and "Model/m" in taken.err
    assert areal(*words, "--model", "n", "--served-model-name", "Q/other").code == 0
    assert areal("inf", "models", "--json").json[0]["servedModelName"] == "Q/q"


@pytest.mark.parametrize(
    ("path", "flag"),
    [
        ("spec.replicas", "--replicas"),
        ("spec.engineArgs.max-model-len", "--engine-args max-model-len"),
        ("spec.external.apiKeyFrom.env", "--provider-api-key-env"),
        ("spec.overrides[2]", ""),
        ("spec", ""),
        ("spec.pathological", "spec.pathological"),
        ("metadata.name", "metadata.name"),
    ],
)
def test_flag_of_a_field(path: str, flag: str) -> None:
    assert flag_of(path) == flag
