"""The JSON Schemas refuse what the loader refuses, and nothing else.

What a schema cannot say, and only the loader refuses, is in ``ONLY_THE_LOADER``.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal.errors import ArealError
from areal.resources import registry
from areal.resources.engine_flags import EMBEDDED
from areal.resources.fields import SpecModel
from areal.resources.kinds import API_VERSION
from areal.resources.render import RenderRequest, render
from areal.resources.schema import json_schema

BASES: dict[str, list[dict[str, Any]]] = {
    "InferenceService": [{}, {"models": [{"name": "m", "backend": "embedded", "path": "x"}]}],
    "Model": [
        {"backend": "embedded", "path": "x"},
        {"external": {"url": "https://a.example/v1"}},
        {"engineUrl": "http://h:1", "backend": "vllm", "path": "x"},
    ],
    "AgentService": [{"agent": "a.b:C", "inference": {"service": "s", "model": "m"}}],
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
    for name, info in registry.fields_of(model).items():
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
def test_every_field_with_every_odd_value_is_judged_alike(kind: str) -> None:
    found = []
    for base in BASES[kind]:
        for number, path in enumerate(fields(registry.spec_model(kind))):
            for value in VALUES[number % 11 :: 11]:  # of fields of one type, each meets others
                spec = with_value(base, path, value)
                faults = [] if spec is None else registry.validate(kind, spec)
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
        ("InferenceService", {"models": [{"backend": "embedded", "path": "x"}]}),
        ("InferenceService", {"models": [{"name": "A", **_MODEL}]}),
        ("InferenceService", {"models": [{"name": "a"}]}),
        ("InferenceService", {"auth": {"adminKeyFrom": {}}}),
        ("InferenceService", {"limits": {"maxBodyBytes": 2**63}}),
        ("AgentService", {"agent": "a"}),
        ("AgentService", {"agent": "a:B", "inference": {"service": "A"}}),
        ("TrainJob", {}),
        ("TrainJob", {"overrides": []}),
        ("TrainJob", {"driver": None}),
        ("TrainJob", {"driver": "a:b", "rollout": {"service": "a b"}}),
        ("TrainJob", {"driver": "a:b", "ttlSecondsAfterFinished": -1}),
    ],
    ids=str,
)
def test_what_does_not_go_together_is_refused_by_both(kind: str, spec: dict[str, Any]) -> None:
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
        ("TrainJob", {"overrides": ["a=1"]}),
    ],
    ids=str,
)
def test_what_goes_together_is_accepted_by_both(kind: str, spec: dict[str, Any]) -> None:
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
def test_what_is_no_envelope_is_refused_by_both(change: dict[str, Any]) -> None:
    document = {**manifest("InferenceService", {}), **change}
    validator = _VALIDATORS["InferenceService"]
    if change != {"kind": "Model"}:
        assert loader_fault(document) is not None
    assert not validator.is_valid(document)


@pytest.mark.parametrize("kind", BASES)
def test_what_is_absent_is_missed_by_both(kind: str) -> None:
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
def test_backend_is_judged_alike(engine: str, mark: str, dims: list[tuple[str, str]]) -> None:
    text = engine + mark + "".join(letter + number for letter, number in dims)
    assert disagreement(manifest("Model", {"backend": text, "path": "x"})) is None


_NAMES = st.text("aA0-_./ é", max_size=5)


@settings(deadline=None, max_examples=60)
@given(_NAMES, _NAMES, st.sampled_from(["1", "0.5", ".5", "1."]), st.sampled_from(["", "Gi", "G", "gi", "GB"]))
def test_names_labels_and_sizes_are_judged_alike(name: str, label: str, number: str, unit: str) -> None:
    spec = {"backend": "embedded", "path": "x", "service": name or "a", "resources": {"memory": number + unit}}
    about = {"name": "a", "labels": {"k": label}, "annotations": {name: label}}
    for document in (manifest("Model", spec), manifest("InferenceService", {}, metadata=about)):
        assert disagreement(document) is None


_ARGUMENTS = st.sampled_from(
    [
        *EMBEDDED,
        *(name.replace("-", "_") for name in EMBEDDED),
        "maxBatchSize",
        "MaxBatchSize",
        "model-path",
        "Port",
        "x",
    ]
)


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(["embedded", "vllm", "sglang"]), _ARGUMENTS, st.sampled_from(VALUES), st.sampled_from(["", ".k"])
)
def test_engine_arguments_are_judged_alike(engine: str, name: str, value: Any, key: str) -> None:
    spec = {"backend": engine, "path": "x", "engineArgs": {name + key: value}}
    assert disagreement(manifest("Model", spec)) is None
