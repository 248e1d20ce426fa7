"""``areal diff``: a summary, metadata, and what cannot be applied beside the rest, with its own exit status."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from areal.resources.kinds import Ref
from areal.state.home import Home
from areal.state.layers import Layer, replace
from areal.state.objects import ObjectStore
from tests.cli.conftest import Areal

Record = Callable[..., Any]


def document(kind: str, name: str, spec: dict[str, Any], **metadata: Any) -> dict[str, Any]:
    about = {"name": name, **metadata}
    return {"apiVersion": "areal.dev/v1alpha1", "kind": kind, "metadata": about, "spec": spec}


@pytest.fixture
def manifest(tmp_path: Path) -> Callable[..., str]:
    (tmp_path / "m").mkdir()

    def write(*documents: dict[str, Any]) -> str:
        file = tmp_path / "manifest.yaml"
        file.write_text(yaml.safe_dump_all(documents))
        return str(file)

    return write


@pytest.fixture
def model(tmp_path: Path) -> dict[str, Any]:
    return {"backend": "embedded", "path": str(tmp_path / "m"), "suspend": True}


@pytest.fixture
def conflicting(record: Record, home: Home, model: dict[str, Any]) -> None:
    """A model of which ``areal scale`` holds the replicas."""
    record("InferenceService", "default", {"suspend": True})
    record("Model", "m1", model)
    store = ObjectStore(home)
    found = store.get(Ref("Model", "m1"))
    assert found is not None
    layer = Layer("scale", {"replicas": 3}, None, "bob@desk", 1.0)
    store.put(dataclasses.replace(found, layers=replace(found.layers, layer)))


def test_conflict_has_its_own_status_and_the_rest_is_shown(
    areal: Areal, conflicting: None, manifest: Callable[..., str], model: dict[str, Any]
) -> None:
    file = manifest(document("Model", "m1", {**model, "replicas": 2}), document("Model", "m2", model))
    shown = areal("diff", "-f", file)
    assert shown.code == 5 and "bob@desk" in shown.err and "--force-conflicts" in shown.err
    assert shown.out.startswith("1 to create, 1 blocked") and "+ Model/m2 create" in shown.out
    found = areal("diff", "-f", file, "-o", "json")
    assert found.code == 5
    actions = {item["ref"]: item for item in json.loads(found.out)["objects"]}
    assert actions["Model/m2"]["action"] == "create"
    assert actions["Model/m1"]["action"] == "blocked" and "replicas" in actions["Model/m1"]["refusal"]["message"]
    assert areal("apply", "-f", file, "--yes").code == 5  # nothing of it is applied


def test_change_of_metadata_is_shown(areal: Areal, record: Record, manifest: Callable[..., str], model: Any) -> None:
    record("InferenceService", "default", {"suspend": True})
    record("Model", "m1", model, labels={"tier": "dev"})
    about: dict[str, Any] = {"labels": {"tier": "prod"}, "annotations": {"why": "x"}}
    file = manifest(document("Model", "m1", model, **about, dependsOn=["InferenceService/default"]))
    shown = areal("diff", "-f", file)
    assert shown.code == 1 and shown.out.startswith("1 to change")
    for line in ("metadata.labels.tier: 'dev' -> 'prod'", "metadata.annotations.why", "metadata.dependsOn"):
        assert line in shown.out


def test_object_of_one_set_is_not_moved_to_another_by_a_typo(
    areal: Areal, record: Record, manifest: Callable[..., str], model: dict[str, Any]
) -> None:
    record("InferenceService", "default", {"suspend": True})
    record("Model", "m1", model, set_name="prod")
    file = manifest(document("Model", "m1", model))
    for verb, flags in (("diff", ()), ("apply", ("--yes",))):
        refused = areal(verb, "-f", file, "--set-name", "prdo", *flags)
        assert refused.code == 5 and "'prod'" in refused.err, refused
    moved = areal("diff", "-f", file, "--set-name", "prdo", "--force-conflicts")
    assert moved.code == 1 and "metadata.set: 'prod' -> 'prdo'" in moved.out


def test_nothing_to_do_is_status_0_and_a_difference_is_1(
    areal: Areal, record: Record, manifest: Callable[..., str], model: dict[str, Any]
) -> None:
    record("InferenceService", "default", {"suspend": True})
    record("Model", "m1", model)
    assert areal("diff", "-f", manifest(document("Model", "m1", model))).code == 0
    rolled = areal("diff", "-f", manifest(document("Model", "m1", {**model, "env": {"A": "b"}})))
    assert rolled.code == 1 and rolled.out.startswith("1 to roll")
    assert "  1. record Model/m1: spec.env.A changed" in rolled.out
