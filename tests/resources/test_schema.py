"""The checked-in schemas are fresh, valid in their draft, and refuse exactly the faults that the loader refuses.

``ONLY_THE_LOADER`` lists the faults that a schema cannot express.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from areal.errors import ArealError
from areal.resources.backend import own_flags
from areal.resources.explain import init
from areal.resources.fields import SpecModel, fields_of
from areal.resources.kinds import API_VERSION, KINDS
from areal.resources.render import RenderRequest, render
from areal.resources.schema import combined_schema, json_schema, main, schema_files, stale_files
from areal.resources.validation import spec_model, validate

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
def test_valid_manifest_passes_its_and_combined_schema(kind: str) -> None:
    assert validate(kind, _VALID[kind]) == []
    for schema in (_SCHEMAS[kind], json_schema(kind, 2020), _COMBINED):
        assert _accepts(schema, _manifest(kind, _VALID[kind]))
        assert not _accepts(schema, {**_manifest(kind, _VALID[kind]), "extra": 1})
        assert not _accepts(schema, _manifest(kind, {**_VALID[kind], "unknownField": 1}))
        assert not _accepts(schema, _manifest(kind, 3))


@pytest.mark.parametrize("kind", KINDS)
def test_expressions_are_accepted_for_any_value(kind: str) -> None:
    spec: dict[str, Any] = dict.fromkeys(fields_of(spec_model(kind)), "${{ values.x }}")
    errors = list(jsonschema.Draft7Validator(_SCHEMAS[kind]).iter_errors(_manifest(kind, spec)))
    assert not errors, [(list(error.path), error.message) for error in errors]


def test_combined_schema_accepts_generate_lists_and_overlays() -> None:
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
def test_init_manifest_passes_its_schema(kind: str) -> None:
    assert _accepts(_SCHEMAS[kind], yaml.safe_load(init(kind)))


_WORDS = st.sampled_from(["", "a", "embedded", "local", "Always", "a:b", "5Gi"])
_KEYS = st.sampled_from(["name", "a", "type", "port"])
_ANY = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 70_000) | _WORDS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(_KEYS, inner, max_size=2),
    max_leaves=4,
)


@given(st.data(), st.sampled_from(list(KINDS)))
def test_schema_accepts_everything_model_accepts(data: st.DataObject, kind: str) -> None:
    names = list(fields_of(spec_model(kind)))
    changed = data.draw(st.dictionaries(st.sampled_from(names), _ANY, max_size=2))
    spec = {**_VALID[kind], **changed}
    if validate(kind, spec) == []:
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


BASES: dict[str, list[dict[str, Any]]] = {
    "InferenceService": [{}, {"models": [{"name": "m", "backend": "embedded", "path": "x"}]}],
    "Model": [
        {"backend": "embedded", "path": "x"},
        {"external": {"url": "https://a.example/v1"}},
        {"engineUrl": "http://h:1", "backend": "vllm", "path": "x"},
    ],
    "AgentService": [
        {"agent": "a.b:C", "inference": {"service": "s", "model": "m"}, "tools": [{"mcp": {"command": ["x"]}}]},
        {"command": ["x"], "tools": [{"mcp": {"url": "http://h/mcp"}}]},
    ],
    "TrainJob": [{"config": {"a": 1}}, {"driver": "a.b:c"}],
}
VALUES: list[Any] = [
    *(None, "", "x", "A b", "a:B", "-x", "x-", "1", "1Gi", "http://x", "https://h/v1", "/abs", "true"),
    *(-1, 0, 1, 1.5, 65536, 2**63, 1e300, float("inf"), True, False),
    *([], {}, [1], ["x"], [""], [None], [{}], {"a": 1}, {"a": None}, {"A": "x"}, {"a": {}}, {"": "x"}),
    *("embedded:d2", "sglang:d2t2", "vllm", "fsdp:d2", "embedded:t2", "ray", "slurm", "sglang:", "sglang:d0", "a" * 64),
]
ONLY_THE_LOADER = {
    "expressions": "one that cannot be evaluated, and what one becomes",
    "whole numbers with a fraction": "2.0 is an integer to a schema",
    "between objects": "references, unique names, cycles: each object is checked by itself",
    "text of YAML": "duplicate keys, tags, anchors, numbers that 64 bits cannot hold: gone once it is parsed",
    "arguments of vLLM and SGLang": "their flags are those of the version that is installed",
    "hosts of external.url": "private addresses, and spellings of a host that are none",
    "sizes of an allocation": "the product of its dimensions",
}
_VALIDATORS = {kind: jsonschema.Draft7Validator(json_schema(kind)) for kind in BASES}


def manifest(kind: str, spec: Any, **more: Any) -> dict[str, Any]:
    return {"apiVersion": API_VERSION, "kind": kind, "metadata": {"name": "a"}, "spec": spec, **more}


def loader_fault(document: Any) -> str | None:
    text = json.dumps(document).replace("Infinity", ".inf")
    try:
        render(RenderRequest(files=("-",), stdin=text, env={}))
    except ArealError as error:
        return error.message
    return None


def disagreement(document: dict[str, Any]) -> str | None:
    fault = loader_fault(document)
    errors = list(_VALIDATORS[document["kind"]].iter_errors(document))
    if (fault is None) == (not errors):
        return None
    if fault is not None:
        return f"the schema accepts {document['spec']}: {fault}"
    return f"the schema refuses {document['spec']}: {errors[0].message}"


def fields(model: type[SpecModel], base: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, info in fields_of(model).items():
        yield (*base, name)
        if info.nested is not None:
            yield from fields(info.nested, (*base, name, "[]") if info.repeated else (*base, name))


def with_value(spec: dict[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any] | None:
    """A copy; None where the path leads through something else."""
    spec = copy.deepcopy(spec)
    here: Any = spec
    for step, following in pairwise(path):
        if step == "[]":
            here = here[0] if here else here.append({}) or here[0]
        else:
            here = here.setdefault(step, [] if following == "[]" else {})
        if not isinstance(here, dict | list):
            return None
    if not isinstance(here, dict):
        return None
    here[path[-1]] = value
    return spec


@pytest.mark.parametrize("kind", BASES)
def test_schema_and_loader_agree_on_odd_values(kind: str) -> None:
    found = []
    for base in BASES[kind]:
        for number, path in enumerate(fields(spec_model(kind))):
            for value in VALUES[number % 11 :: 11]:  # of fields of one type, each meets others
                spec = with_value(base, path, value)
                faults = [] if spec is None else validate(kind, spec)
                if spec is not None and (not faults) != _VALIDATORS[kind].is_valid(manifest(kind, spec)):
                    found.append(f"{spec}: {faults or 'only the schema refuses it'}")
    assert not found, f"{len(found)}: " + "\n".join(found[:20])


_MODEL = {"backend": "embedded", "path": "x"}
_ATTACHED = {"engineUrl": "http://h:1", "backend": "sglang", "path": "x"}
_SECRET = {"env": "A"}


@pytest.mark.parametrize(
    ("kind", "spec"),
    [
        ("Model", {}),
        ("Model", {"backend": "embedded"}),
        ("Model", {"path": "x"}),
        ("Model", {**_MODEL, "external": {"url": "https://a.b"}}),
        ("Model", {"external": {"url": "https://a.b"}, "replicas": 2}),
        ("Model", {"external": {"url": "ftp://a.b"}}),
        ("Model", {"external": {"url": "https://me@a.b"}}),
        ("Model", {"external": {"url": "https://a.b?c"}}),
        ("Model", {"external": {"url": "https://a.b"}, "engineUrl": "http://h:1"}),
        ("Model", {**_MODEL, "engineUrl": "http://h:1"}),
        ("Model", {**_ATTACHED, "engineUrl": "https://h:1"}),
        ("Model", {**_ATTACHED, "engineArgs": {"a": 1}}),
        ("Model", {**_ATTACHED, "resources": {"gpus": 1}}),
        ("Model", {**_ATTACHED, "backend": "sglang:d2"}),
        ("Model", {**_ATTACHED, "env": {"A": "b"}}),
        ("Model", {**_MODEL, "engineApiKeyFrom": _SECRET}),
        ("Model", {**_MODEL, "engineArgs": {"maxBatchSise": 1}}),
        ("Model", {**_MODEL, "engineArgs": {"maxBatchSize": "1"}}),
        ("Model", {**_MODEL, "engineArgs": {"threads": 0}}),
        ("Model", {**_MODEL, "engineArgs": {"dtype": "float8"}}),
        ("Model", {**_MODEL, "engineArgs": {"port": 1}}),
        ("Model", {"backend": "vllm:d1", "path": "x", "engineArgs": {"tensorParallelSize": 2}}),
        ("Model", {"backend": "sglang", "path": "x", "engineArgs": {"tp_size": 2}}),
        ("Model", {**_MODEL, "backend": "embedded+fsdp"}),
        ("Model", {**_MODEL, "backend": "sglang:d2d2"}),
        ("Model", {**_MODEL, "service": "My Service"}),
        ("Model", {**_MODEL, "resources": {"memory": "64GB"}}),
        ("Model", {**_MODEL, "envFrom": {"A": {}}}),
        ("Model", {**_MODEL, "envFrom": {"A": {"file": "x", "env": "y"}}}),
        ("InferenceService", {"scheduler": {"slurm": {}}}),
        ("InferenceService", {"scheduler": {"type": "slurm", "ray": {}}}),
        ("InferenceService", {"scheduler": {"type": "ray", "ray": {"resources": {"h100": -1}}}}),
        ("InferenceService", {"scheduler": {"type": "ray", "ray": {"resources": {"GPU": 2}}}}),
        ("InferenceService", {"scheduler": {"type": "ray", "ray": {"runtimeEnv": {"env_vars": {"A": 1}}}}}),
        ("InferenceService", {"scheduler": {"type": "ray", "ray": {"runtimeEnv": {"env_vars": ["A"]}}}}),
        ("InferenceService", {"models": [{"backend": "embedded", "path": "x"}]}),
        ("InferenceService", {"models": [{"name": "A", **_MODEL}]}),
        ("InferenceService", {"models": [{"name": "a"}]}),
        ("InferenceService", {"auth": {"adminKeyFrom": {}}}),
        ("InferenceService", {"limits": {"maxBodyBytes": 2**63}}),
        ("AgentService", {"agent": "a"}),
        ("AgentService", {"agent": "a:B", "inference": {"service": "A"}}),
        ("AgentService", {}),
        ("AgentService", {"agent": None, "command": []}),
        ("AgentService", {"agent": "a:B", "command": ["x"]}),
        ("AgentService", {"command": ["x"], "kwargs": {"a": 1}}),
        ("AgentService", {"agent": "a:B", "tools": [{"mcp": {}}]}),
        ("AgentService", {"agent": "a:B", "tools": [{"mcp": {"url": "ftp://h"}}]}),
        ("AgentService", {"agent": "a:B", "tools": [{"mcp": {"url": "http://h", "command": ["x"]}}]}),
        ("AgentService", {"agent": "a:B", "gateway": {"relays": 2}}),
        ("AgentService", {"agent": "a:B", "strategy": {"maxUnavailable": 1}}),
        ("TrainJob", {}),
        ("TrainJob", {"overrides": []}),
        ("TrainJob", {"driver": None}),
        ("TrainJob", {"driver": "a:b", "rollout": {"service": "a b"}}),
        ("TrainJob", {"driver": "a:b", "ttlSecondsAfterFinished": -1}),
    ],
    ids=str,
)
def test_schema_and_loader_reject_conflicting_fields(kind: str, spec: dict[str, Any]) -> None:
    document = manifest(kind, spec)
    assert loader_fault(document) is not None
    assert not _VALIDATORS[kind].is_valid(document)


@pytest.mark.parametrize(
    ("kind", "spec"),
    [
        ("Model", {"external": {"url": "https://a.b"}, "replicas": 0, "lora": {}, "backend": None}),
        ("Model", {"external": {"url": "http://127.0.0.1:1/v1", "apiKeyFrom": {"env": "A", "file": None}}}),
        ("Model", {**_ATTACHED, "engineArgs": {}, "resources": {"gpus": None}, "engineApiKeyFrom": _SECRET}),
        ("Model", {**_MODEL, "engineArgs": {"max-batch-size": 1, "max_model_len": None, "kvMemoryGib": 0.5}}),
        ("Model", {"backend": "vllm.d2m2", "path": "x", "engineArgs": {"anything": {"a": []}}}),
        ("InferenceService", {"scheduler": {"type": "slurm", "slurm": {"timeLimitSeconds": 3600}}}),
        ("AgentService", {"command": ["x", "-v"], "kwargs": {}, "tools": []}),
        ("AgentService", {"agent": "a:B.c", "command": [], "tools": [{"mcp": {"url": "http://h/mcp?a=1"}}]}),
        ("TrainJob", {"overrides": ["a=1"]}),
    ],
    ids=str,
)
def test_schema_and_loader_accept_compatible_fields(kind: str, spec: dict[str, Any]) -> None:
    document = manifest(kind, spec)
    assert loader_fault(document) is None
    assert _VALIDATORS[kind].is_valid(document)


@pytest.mark.parametrize(
    "change",
    [
        {"apiVersion": "v1"}, {"apiVersion": None}, {"kind": "Model"}, {"metadata": None}, {"metadata": {}},
        {"metadata": {"name": "A"}}, {"metadata": {"name": "a" * 64}}, {"metadata": {"name": 1}}, {"spec": 1},
        {"metadata": {"name": "a", "labels": {"a": "b c"}}}, {"metadata": {"name": "a", "labels": {"-a": "b"}}},
        {"metadata": {"name": "a", "labels": {"a": 1}}}, {"metadata": {"name": "a", "annotations": {"a b": "x"}}},
        {"metadata": {"name": "a", "dependsOn": ["x"]}}, {"metadata": {"name": "a", "dependsOn": ["model/A"]}},
        {"metadata": {"name": "a", "dependsOn": "model/a"}}, {"metadata": {"name": "a", "namespace": "b"}},
        {"spec": []}, {"status": {}}, {"extra": 1}, {"profiles": "x"}, {"profiles": [1]},
    ],
    ids=str,
)  # fmt: skip
def test_schema_and_loader_reject_bad_envelope(change: dict[str, Any]) -> None:
    document = {**manifest("InferenceService", {}), **change}
    validator = _VALIDATORS["InferenceService"]
    if change != {"kind": "Model"}:
        assert loader_fault(document) is not None
    assert not validator.is_valid(document)


@pytest.mark.parametrize("kind", BASES)
def test_schema_and_loader_agree_on_missing_fields(kind: str) -> None:
    whole, validator = manifest(kind, BASES[kind][0]), _VALIDATORS[kind]
    for absent in whole:
        less = {key: value for key, value in whole.items() if key != absent}
        assert (loader_fault(less) is None) == validator.is_valid(less), absent
    for fine in ({"spec": None}, {"metadata": {"name": "a", "dependsOn": ["MDL/x", "inf/y"], "labels": {"a/b": ""}}}):
        document = {**whole, **fine}
        assert (loader_fault(document) is None) == validator.is_valid(document), fine


_DIMS = st.lists(st.tuples(st.sampled_from("dtpcemx"), st.sampled_from(["", "0", "1", "01", "2", "12", "0000001"])))
_ENGINES = st.sampled_from(["embedded", "external", "sglang", "vllm", "fsdp", "", "sglang+fsdp"])


@settings(deadline=None, max_examples=120)
@given(_ENGINES, st.sampled_from(["", ":", "."]), _DIMS)
def test_schema_and_loader_agree_on_backends(engine: str, mark: str, dims: list[tuple[str, str]]) -> None:
    text = engine + mark + "".join(letter + number for letter, number in dims)
    assert disagreement(manifest("Model", {"backend": text, "path": "x"})) is None


_NAMES = st.text("aA0-_./ é", max_size=5)


@settings(deadline=None, max_examples=60)
@given(_NAMES, _NAMES, st.sampled_from(["1", "0.5", ".5", "1."]), st.sampled_from(["", "Gi", "G", "gi", "GB"]))
def test_schema_and_loader_agree_on_names_labels_and_sizes(name: str, label: str, number: str, unit: str) -> None:
    spec = {"backend": "embedded", "path": "x", "service": name or "a", "resources": {"memory": number + unit}}
    about = {"name": "a", "labels": {"k": label}, "annotations": {name: label}}
    for document in (manifest("Model", spec), manifest("InferenceService", {}, metadata=about)):
        assert disagreement(document) is None


_FINITE = st.sampled_from([value for value in VALUES if value != float("inf")])  # JSON has no other
_ARGUMENTS = st.sampled_from(
    [
        *own_flags("embedded"),
        *own_flags("data proxy"),
        *(name.replace("-", "_") for name in own_flags("embedded")),
        "maxBatchSize",
        "MaxBatchSize",
        "model-path",
        "Port",
        "x",
    ]
)


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(["embedded", "vllm", "sglang"]), _ARGUMENTS, _FINITE, st.sampled_from(["", ".k"]))
def test_schema_and_loader_agree_on_engine_arguments(engine: str, name: str, value: Any, key: str) -> None:
    for field in ("engineArgs", "proxyArgs"):
        spec = {"backend": engine, "path": "x", field: {name + key: value}}
        assert disagreement(manifest("Model", spec)) is None
