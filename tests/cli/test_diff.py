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


GOOD = "apiVersion: areal.dev/v1alpha1\nkind: InferenceService\nmetadata: {name: good}\nspec: {suspend: true}\n"
_BAD = "apiVersion: areal.dev/v1alpha1\nkind: InferenceService\nmetadata: {name: bad}\nspec: "
AGENT = (
    "apiVersion: areal.dev/v1alpha1\nkind: AgentService\nmetadata: {name: a}\n"
    "spec: {agent: 'a:B', inference: {service: good, model: m}}\n"
)


@pytest.mark.parametrize(
    ("text", "ref", "words"),
    [
        (_BAD + "{gateway: {port: -1}}\n", "InferenceService/bad", "spec.gateway.port"),
        (_BAD + "{gatway: {}}\n", "InferenceService/bad", 'did you mean "gateway"'),
        (_BAD + "{suspend: true, suspend: true}\n", "InferenceService/bad", "duplicate key"),
        (_BAD + "{a: [1, 2}\n", None, "did not find expected"),
        (_BAD + "{models: [{name: m, backend: nothing}]}\n", "InferenceService/bad", "nothing"),
        ("kind: Model\nmetadata: {name: 5}\n", None, "expected text"),
        ("kind: Model\nmetadata: {name: A_b}\n", None, "is not a name"),
        ("- 3\n", None, "a resource is a map"),
        ("apiVersion: areal.dev/v1alpha1\nkind: Nothing\nmetadata: {name: x}\n", None, "unknown kind"),
        (_BAD + "{auth: {adminKeyFrom: {file: /no/such/key}}}\n", "InferenceService/bad", "does not exist"),
        (_BAD + "{auth: {adminKeyFrom: {env: NO_SUCH_KEY}}}\n", "InferenceService/bad", "is not set here"),
        (_BAD + "{scheduler: {type: slurm}}\n", "InferenceService/bad", "not implemented yet"),
        (AGENT, "AgentService/a", "not implemented yet"),
        (AGENT.replace("good, model: m", "nobody, model: m"), "AgentService/a", "does not exist"),
    ],
)
@pytest.mark.parametrize("first", [True, False])
def test_what_is_invalid_is_3_and_the_rest_is_shown(
    areal: Areal, tmp_path: Path, text: str, ref: str | None, words: str, first: bool
) -> None:
    file = tmp_path / "m.yaml"
    file.write_text("---\n".join([text, GOOD] if first else [GOOD, text]))
    if "[1, 2}" in text and first:
        pytest.skip("nothing after a syntax error is read")
    if "model: m" in text and "nobody" not in text:
        model = {"backend": "embedded", "path": str(tmp_path), "service": "good", "suspend": True}
        file.write_text(file.read_text() + "---\n" + yaml.safe_dump(document("Model", "m", model)))
    shown = areal("diff", "-f", str(file))
    assert shown.code == 3 and "+ InferenceService/good create" in shown.out, shown
    assert words in shown.err and shown.err.count(words) == (2 if "nobody" in text else 1), shown.err
    found = areal("diff", "-f", str(file), "-o", "json")
    assert found.code == 3
    objects = {item["ref"]: item for item in json.loads(found.out)["objects"]}
    assert objects["InferenceService/good"]["action"] == "create"
    blocked = {ref for ref, item in objects.items() if item["action"] == "blocked"}
    assert blocked - {"Model/m"} == ({ref} if ref else set())
    assert all(objects[each]["refusal"]["reason"] == "invalid" for each in blocked)
    assert areal("apply", "-f", str(file), "--yes").code == 3
    assert areal("apply", "-f", str(file), "--dry-run").code == 3
    saved = areal("diff", "-f", str(file), "--out", str(tmp_path / "plan.json"))
    assert saved.code == 3 and not (tmp_path / "plan.json").exists()


def test_what_needs_an_invalid_object_is_blocked_with_it(areal: Areal, manifest: Any, model: dict[str, Any]) -> None:
    bad = document("InferenceService", "bad", {"gateway": {"port": -1}})
    chain = [
        document("Model", "m1", {**model, "service": "bad"}),
        document("Model", "m2", model, dependsOn=["Model/m1"]),
    ]
    file = manifest(bad, *chain, document("InferenceService", "default", {"suspend": True}))
    shown = areal("diff", "-f", file)
    assert shown.code == 3 and shown.out.startswith("1 to create, 3 blocked"), shown
    assert "Model/m2 needs Model/m1, which cannot be applied" in shown.err
    assert "Model/m1 needs InferenceService/bad, which cannot be applied" in shown.err


def test_worst_of_several_decides_and_each_is_told(
    areal: Areal, conflicting: None, manifest: Callable[..., str], model: dict[str, Any]
) -> None:
    both = [document("Model", "m1", {**model, "replicas": 2}), document("InferenceService", "bad", {"gatway": 1})]
    shown = areal("diff", "-f", manifest(*both, document("Model", "m2", model)))
    assert shown.code == 3 and "bob@desk" in shown.err and "gatway" in shown.err
    assert shown.out.startswith("1 to create, 2 blocked")
    github = areal("diff", "-f", manifest(*both), "--format", "github")
    assert github.code == 3 and "[!CAUTION]" in github.out


def test_nothing_is_pruned_that_an_invalid_manifest_may_declare(areal: Areal, record: Record, tmp_path: Path) -> None:
    for name in ("bad", "gone"):
        record("InferenceService", name, {"suspend": True}, set_name="prod")
    file = tmp_path / "m.yaml"
    file.write_text(GOOD + "---\n" + _BAD + "{suspend: 3}\n")
    shown = areal("diff", "-f", str(file), "--prune", "--set-name", "prod")
    assert shown.code == 3 and "to delete" not in shown.out and "not known while manifests have faults" in shown.err


def test_file_that_cannot_be_read_hides_no_other(areal: Areal, tmp_path: Path) -> None:
    (tmp_path / "m.yaml").write_text(GOOD)
    shown = areal("diff", "-f", str(tmp_path / "none.yaml"), "-f", str(tmp_path / "m.yaml"))
    assert shown.code == 3 and "+ InferenceService/good create" in shown.out and "cannot be read" in shown.err


def test_fault_of_a_flag_is_a_fault_of_everything(areal: Areal, tmp_path: Path) -> None:
    (tmp_path / "m.yaml").write_text(GOOD)
    shown = areal("diff", "-f", str(tmp_path / "m.yaml"), "--set", "spec.gatway.port=1")
    assert shown.code == 3 and not shown.out


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
