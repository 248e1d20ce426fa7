"""What a verb does not name stays: each verb that writes a layer beside each other one, by the real command line.

The service is suspended, so that commands change records and start nothing.
"""

from __future__ import annotations

import io
import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import Phase, event, given, note, settings
from hypothesis import strategies as st

from areal.cli.main import run
from areal.reconcilers import converge
from areal.resources.tree import leaves, path_text

MODEL = str(Path(__file__).resolve().parents[2] / "examples" / "reverse_digits" / "model")
SERVICE = "apiVersion: areal.dev/v1alpha1\nkind: InferenceService\nmetadata: {name: default}\nspec: {suspend: true}\n"
SHARED_MEMORY = Path("/dev/shm")
REFUSED = (2, 4, 5)
Fields = dict[str, Any]


@dataclass(frozen=True)
class Machine:
    """A home with a suspended service, and the file of its model's manifest."""

    folder: Path

    def areal(self, *words: str) -> tuple[int, str]:
        out, err = io.StringIO(), io.StringIO()
        with redirect_stdout(out), redirect_stderr(err):
            code = run([*words, "--home", str(self.folder / "home")])
        return code, out.getvalue() or err.getvalue()

    def apply(self, manifest: Fields, *more: str) -> tuple[int, str]:
        (self.folder / "m.yaml").write_text(yaml.safe_dump(manifest))
        return self.areal("apply", "-f", str(self.folder / "m.yaml"), *more)

    def fields(self) -> Fields:
        """Every field of the model that a user sets, by path."""
        code, text = self.areal("get", "model/m", "-o", "json")
        assert code == 0
        document = json.loads(text)
        return leaves_of(document["metadata"], document["spec"])

    def manifest(self) -> Fields:
        """The fields of the manifest alone, as it was recorded last."""
        item = json.loads((self.folder / "home/objects/model/m/object.json").read_text())["body"]
        (spec,) = [layer["spec"] for layer in item["layers"] if layer["manager"] == "apply"]
        return leaves_of(item, spec)

    def others(self) -> Fields:
        """The fields that other layers hold."""
        _, text = self.areal("get", "model/m", "--show-origin", "-o", "json")
        return {row["path"]: row["value"] for row in json.loads(text)["items"] if row["origin"] != "apply"}


def leaves_of(metadata: Fields, spec: Fields) -> Fields:
    parts = {"spec": spec, "labels": metadata.get("labels", {}), "annotations": metadata.get("annotations", {})}
    return {path_text((part, *path)): value for part, tree in parts.items() for path, value in leaves(tree).items()}


@contextmanager
def machine() -> Iterator[Machine]:
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY if SHARED_MEMORY.is_dir() else None) as folder:
        made = Machine(Path(folder))
        (made.folder / "service.yaml").write_text(SERVICE)
        assert made.areal("apply", "-f", f"{folder}/service.yaml")[0] == 0
        yield made


def manifest_of(spec: Fields, labels: Fields | None = None) -> Fields:
    spec = {"service": "default", "backend": "embedded", "path": MODEL, **spec}
    metadata = {"name": "m", "labels": labels or {}}
    return {"apiVersion": "areal.dev/v1alpha1", "kind": "Model", "metadata": metadata, "spec": spec}


@st.composite
def manifests(draw: st.DrawFn) -> Fields:
    spec: Fields = {}
    if env := {name: draw(st.sampled_from("12")) for name in "AB" if draw(st.booleans())}:
        spec["env"] = env
    if draw(st.booleans()):
        spec["replicas"] = draw(st.integers(1, 3))
    if draw(st.integers(0, 9)) == 9:
        spec["suspend"] = draw(st.booleans())
    return manifest_of(spec, {name: draw(st.sampled_from("xy")) for name in ("tier", "team") if draw(st.booleans())})


REGISTER = ("inf", "register", "--model", "m", "--backend", "embedded", "--model-path", MODEL)
NAMED = {"replicas": {"spec.replicas"}, "suspend": {"spec.suspend"}, "nothing": set[str]()}
NAMED["register"] = {"spec.service", "spec.backend", "spec.path"}
VERBS = [
    *((("scale", "model/m", "--replicas", str(count)), NAMED["replicas"]) for count in range(4)),
    (("inf", "scaleup", "--model", "m"), NAMED["replicas"]),
    (("inf", "scaledown", "--model", "m"), NAMED["replicas"]),
    (("suspend", "model/m"), NAMED["suspend"]),
    (("resume", "model/m"), NAMED["suspend"]),
    (("restart", "model/m"), NAMED["nothing"]),
    (("rollback", "model/m", "--dry-run"), NAMED["nothing"]),
    (REGISTER, NAMED["register"]),
    ((*REGISTER, "--tokenizer-path", MODEL), NAMED["register"] | {"spec.tokenizerPath"}),
    ((*REGISTER, "--replicas", "2"), NAMED["register"] | NAMED["replicas"]),
]
Step = tuple[str, Callable[[Machine], tuple[int, str]], set[str] | None]


def steps() -> st.SearchStrategy[Step]:
    """A verb in words, the verb, and the fields that it names; None: those of the manifests before and after it."""
    plain = st.sampled_from(VERBS).map(lambda each: (" ".join(each[0]), lambda box: box.areal(*each[0]), each[1]))
    flags = st.sampled_from([(), (), ("--set", f"spec.tokenizerPath={MODEL}"), ("--force-conflicts",)])
    applied = st.tuples(manifests(), flags).map(
        lambda each: (f"apply {each[0]} {each[1]}", lambda box: box.apply(each[0], *each[1]), None)
    )
    number = st.one_of(st.just(()), st.integers(1, 8).map(lambda number: ("--to", str(number))))
    back = number.map(
        lambda to: (f"rollback {' '.join(to)}", lambda box: box.areal("rollback", "model/m", "--yes", *to), None)
    )
    return st.one_of(plain, applied, back)


@pytest.mark.extended
@settings(max_examples=60, deadline=None, phases=set(Phase) - {Phase.explain})
@given(first=manifests(), sequence=st.lists(steps(), min_size=1, max_size=7))
def test_verb_keeps_fields_of_other_layers(first: Fields, sequence: list[Step]) -> None:
    with machine() as box:
        assert box.apply(first)[0] == 0
        for words, verb, names in sequence:
            before, manifest, others = box.fields(), box.manifest(), box.others()
            code, text = verb(box)
            after = box.fields()
            note(f"{words} -> {code} {text}\n{after}")
            event(" ".join(words.split()[:2]) if not code else f"{words.split()[0]} refused")
            if code:
                assert code in REFUSED, text
                assert after == before
                continue
            named = names if names is not None else {*manifest, *box.manifest()}
            unnamed = (before.keys() | after.keys()) - named
            assert {path: after.get(path) for path in unnamed} == {path: before.get(path) for path in unnamed}
            if words.startswith("rollback"):
                assert {path: after[path] for path in others} == others, "other layers stand over the manifest"


@pytest.fixture
def box() -> Iterator[Machine]:
    with machine() as made:
        yield made


def test_rollback_keeps_scale(box: Machine) -> None:
    box.apply(manifest_of({"env": {"A": "1"}}))
    assert box.areal("scale", "model/m", "--replicas", "2")[0] == 0
    box.apply(manifest_of({"env": {"A": "2"}}))
    assert box.areal("rollback", "model/m")[0] == 0
    assert (box.fields()["spec.env.A"], box.fields()["spec.replicas"]) == ("1", 2)


def test_manifest_that_sets_field_to_its_present_value_changes_no_metadata(box: Machine) -> None:
    box.apply(manifest_of({}))
    assert box.areal("scale", "model/m", "--replicas", "2")[0] == 0
    code, text = box.apply(manifest_of({"replicas": 2}), "--dry-run")
    assert code == 0 and "record Model/m: the manifest sets other fields than before, none to another value" in text


def test_scale_fails_unless_present_number_is_the_stated_one(box: Machine) -> None:
    box.apply(manifest_of({}))
    for wanted in ("1", "2"):
        code, text = box.areal("scale", "model/m", "--replicas", wanted, "--current", "5")
        assert code == 5 and "Model/m has 1 replicas, not 5" in text
    assert box.areal("scale", "model/m", "--replicas", "2", "--current", "1")[0] == 0
    assert box.areal("scale", "model/m", "--replicas", "2", "--current", "2")[0] == 0


@pytest.mark.parametrize(
    ("flag", "code", "words"), [("--by=1", 5, "Model/m has 2 replicas, not 1"), ("--replicas=2", 0, "")]
)
def test_scaleup_checks_number_again_under_lock(
    box: Machine, monkeypatch: pytest.MonkeyPatch, flag: str, code: int, words: str
) -> None:
    box.apply(manifest_of({}))
    original = converge.take_over

    def overtaken(*given: Any) -> Any:
        monkeypatch.setattr(converge, "take_over", original)
        assert box.areal("scale", "model/m", "--replicas", "2")[0] == 0
        return original(*given)

    monkeypatch.setattr(converge, "take_over", overtaken)
    seen, text = box.areal("inf", "scaleup", "--model", "m", flag)
    assert seen == code and words in text
    assert box.fields()["spec.replicas"] == 2


def test_rollback_after_scale_restores_previous_manifest(box: Machine) -> None:
    for value in "123":
        box.apply(manifest_of({"env": {"A": value}}))
    box.areal("scale", "model/m", "--replicas", "2")
    for value in "23":
        assert box.areal("rollback", "model/m")[0] == 0
        assert box.fields()["spec.env.A"] == value


def test_rollback_without_another_manifest_is_not_found(box: Machine) -> None:
    box.apply(manifest_of({}))
    assert box.areal("scale", "model/m", "--replicas", "2")[0] == 0
    code, text = box.areal("rollback", "model/m")
    assert code == 4 and "no earlier revision with another manifest" in text


def test_rollback_dry_run_prints_plan_and_changes_nothing(box: Machine) -> None:
    for value in "12":
        box.apply(manifest_of({"env": {"A": value}}))
    before = box.areal("get", "model/m", "-o", "manifest")
    code, shown = box.areal("rollback", "model/m", "--dry-run")
    assert code == 0
    assert "spec.env.A: '2' -> '1'  (ROLL)" in shown and "1. record Model/m: rolled back to revision 1" in shown
    assert json.loads(box.areal("rollback", "model/m", "--dry-run", "-o", "json")[1])["ops"]
    assert box.areal("get", "model/m", "-o", "manifest") == before


def test_repeated_register_keeps_unnamed_fields(box: Machine) -> None:
    box.apply(manifest_of({"env": {"A": "1"}}, {"tier": "x"}))
    assert box.areal(*REGISTER, "--tokenizer-path", MODEL)[0] == 0
    named = {"spec.env.A": "1", "labels.tier": "x", "spec.tokenizerPath": MODEL}
    assert named.items() <= box.fields().items()


def test_register_as_external_drops_engine_fields(box: Machine) -> None:
    box.apply(manifest_of({"env": {"A": "1"}}, {"tier": "x"}))
    words = ("inf", "register", "--model", "m", "--api-url", "http://127.0.0.1:9/v1", "--allow-private")
    code, text = box.areal(*words, "--provider-model", "gpt")
    assert code == 0, text
    assert "spec.backend" not in box.fields() and box.fields()["labels.tier"] == "x"


def test_register_of_inline_model_keeps_owner(box: Machine) -> None:
    inline = f"{{suspend: true, models: [{{name: m, backend: embedded, path: {MODEL}}}]}}"
    (box.folder / "service.yaml").write_text(SERVICE.replace("{suspend: true}", inline))
    assert box.areal("apply", "-f", str(box.folder / "service.yaml"))[0] == 0
    assert box.areal(*REGISTER, "--replicas", "2")[0] == 0
    document = json.loads(box.areal("get", "model/m", "-o", "json")[1])
    assert document["metadata"]["owner"] == "InferenceService/default"
