"""The checked-in schemas: fresh, valid in their draft, and of one mind with the models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from areal.resources import registry
from areal.resources.init_manifest import init
from areal.resources.kinds import API_VERSION, KINDS
from areal.resources.schema import combined_schema, json_schema, main, schema_files, stale_files

ROOT = Path(__file__).parents[2]
KIND_NAMES = [*KINDS, "Overlay"]
_VALID: dict[str, dict[str, Any]] = {
    "InferenceService": {"gateway": {"port": 9000}, "models": [{"name": "q", "backend": "embedded", "path": "x"}]},
    "Model": {"backend": "vllm:d2t2", "path": "x", "engineArgs": {"a": [1, None]}, "replicas": 2},
    "AgentService": {"agent": "a.b:C", "kwargs": {"k": 1}, "inference": {"service": "default"}},
    "TrainJob": {"config": {"a": {"b": 1}}, "overrides": ["a=1"], "ttlSecondsAfterFinished": 60},
}
_SCHEMAS = {kind: json_schema(kind) for kind in KINDS}
_COMBINED = combined_schema()


def _manifest(kind: str, spec: Any) -> dict[str, Any]:
    return {"apiVersion": API_VERSION, "kind": kind, "metadata": {"name": "a"}, "spec": spec}


def _accepts(schema: dict[str, Any], value: Any) -> bool:
    return bool(jsonschema.validators.validator_for(schema)(schema).is_valid(value))


def test_checked_in_schemas_are_fresh() -> None:
    assert stale_files(ROOT / "schemas") == []


@pytest.mark.parametrize("draft", [7, 2020])
@pytest.mark.parametrize("kind", [*KIND_NAMES, "areal"])
def test_schema_is_valid_in_its_draft(kind: str, draft: int) -> None:
    schema = combined_schema(draft) if kind == "areal" else json_schema(kind, draft)
    validator = jsonschema.Draft7Validator if draft == 7 else jsonschema.Draft202012Validator
    validator.check_schema(schema)
    assert jsonschema.validators.validator_for(schema) is validator
    assert ("definitions" if draft == 7 else "$defs") in schema
    refs = set(_refs(schema))
    names = schema["definitions" if draft == 7 else "$defs"]
    assert refs <= {f"#/{'definitions' if draft == 7 else '$defs'}/{name}" for name in names}


def _refs(schema: Any) -> list[str]:
    if isinstance(schema, dict):
        own = [schema["$ref"]] if isinstance(schema.get("$ref"), str) else []
        return own + [ref for value in schema.values() for ref in _refs(value)]
    return [ref for item in schema for ref in _refs(item)] if isinstance(schema, list) else []


@pytest.mark.parametrize("kind", KINDS)
def test_valid_manifest_is_accepted_by_its_schema_and_the_combined_one(kind: str) -> None:
    assert registry.validate(kind, _VALID[kind]) == []
    for schema in (_SCHEMAS[kind], json_schema(kind, 2020), _COMBINED):
        assert _accepts(schema, _manifest(kind, _VALID[kind]))
        assert not _accepts(schema, {**_manifest(kind, _VALID[kind]), "extra": 1})
        assert not _accepts(schema, _manifest(kind, {**_VALID[kind], "unknownField": 1}))
        assert not _accepts(schema, _manifest(kind, 3))


@pytest.mark.parametrize("kind", KINDS)
def test_expressions_are_accepted_wherever_a_value_is(kind: str) -> None:
    spec: dict[str, Any] = dict.fromkeys(registry.fields_of(registry.spec_model(kind)), "${{ values.x }}")
    errors = list(jsonschema.Draft7Validator(_SCHEMAS[kind]).iter_errors(_manifest(kind, spec)))
    assert not errors, [(list(error.path), error.message) for error in errors]


def test_combined_schema_knows_generate_lists_and_overlays() -> None:
    template = {"kind": "Model", "metadata": {"name": "${{ item }}"}, "spec": {"backend": "embedded", "path": "x"}}
    assert _accepts(_COMBINED, {"apiVersion": API_VERSION, "generate": {"each": [1, 2]}, "template": template})
    assert _accepts(_COMBINED, {"generate": {"matrix": {"a": "${{ values.a }}"}}, "template": [template]})
    assert not _accepts(_COMBINED, {"generate": {"each": [1]}, "template": {**template, "spek": 1}})
    assert not _accepts(_COMBINED, {"generate": {"eech": [1]}, "template": template})
    assert _accepts(
        _COMBINED, {"apiVersion": API_VERSION, "kind": "List", "items": [_manifest("Model", _VALID["Model"])]}
    )
    assert not _accepts(_COMBINED, {"apiVersion": API_VERSION, "kind": "List", "items": [{"kind": "Pod"}]})
    assert _accepts(_COMBINED, {"apiVersion": API_VERSION, "kind": "Overlay", "bases": ["../base"]})
    assert not _accepts(_COMBINED, {"apiVersion": API_VERSION, "kind": "Overlay", "base": []})


def test_schema_carries_docs_defaults_and_update_classes() -> None:
    gateway = _SCHEMAS["InferenceService"]["definitions"]["Gateway"]["properties"]
    assert gateway["port"]["default"] == 8080
    assert gateway["port"]["x-areal-update"] == "RECREATE"
    assert gateway["port"]["description"].startswith("TCP port.")
    assert {"minimum": 1, "maximum": 65535, "type": "integer"} in gateway["port"]["anyOf"]


@pytest.mark.parametrize("kind", KINDS)
def test_init_manifest_is_accepted_by_its_schema(kind: str) -> None:
    assert _accepts(_SCHEMAS[kind], yaml.safe_load(init(kind)))


_WORDS = st.sampled_from(["", "a", "embedded", "local", "Always", "a:b", "5Gi"])
_KEYS = st.sampled_from(["name", "a", "type", "port"])
_ANY = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 70_000) | _WORDS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(_KEYS, inner, max_size=2),
    max_leaves=4,
)


@given(st.data(), st.sampled_from(list(KINDS)))
def test_what_the_model_accepts_the_schema_accepts(data: st.DataObject, kind: str) -> None:
    names = list(registry.fields_of(registry.spec_model(kind)))
    changed = data.draw(st.dictionaries(st.sampled_from(names), _ANY, max_size=2))
    spec = {**_VALID[kind], **changed}
    if registry.validate(kind, spec) == []:
        assert _accepts(_SCHEMAS[kind], _manifest(kind, spec))


def test_check_fails_on_stale_missing_and_extra_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(tmp_path / "schemas")
    assert main(["--write", folder]) == 0
    assert main(["--check", folder]) == 0
    model, extra = Path(folder, "model.schema.json"), Path(folder, "old.schema.json")
    model.write_text(json.dumps({**json.loads(model.read_text()), "title": "x"}))
    extra.write_text("{}")
    Path(folder, "trainjob.schema.json").unlink()
    capsys.readouterr()
    assert main(["--check", folder]) == 1
    assert [line.split(" ")[0].rpartition("/")[2] for line in capsys.readouterr().out.splitlines()] == [
        "model.schema.json",
        "old.schema.json",
        "trainjob.schema.json",
    ]
    assert main(["--write", folder]) == 0 and main(["--check", folder]) == 0 and not extra.exists()
    assert main(["--chekc", folder]) == 2
    assert set(schema_files()) == {path.name for path in Path(folder).iterdir()}
