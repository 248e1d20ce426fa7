"""Effective specs, update classes, references, and the rules that every field of every kind obeys."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from areal.errors import InvalidManifest
from areal.resources.explain import default_text, plain_default, type_text
from areal.resources.fields import FieldInfo, Metadata, SpecModel, all_fields, fields_of
from areal.resources.kinds import KINDS, Ref
from areal.resources.overlay import Overlay
from areal.resources.schema import field_docs, model_doc
from areal.resources.tree import ABSENT, UpdateClass, parse_path, path_text
from areal.resources.validation import Reference, effective, references, spec_model, update_class, validate


def test_fault_mentioning_other_invalid_field_is_reported() -> None:
    spec = {"external": {"url": "http://10.0.0.1/env"}, "env": 5}
    assert {path for path, _ in validate("Model", spec)} == {("env",), ("external", "url")}


def test_effective_fills_defaults_and_keeps_set_values() -> None:
    spec = effective("InferenceService", {"gateway": {"port": 9000}})
    assert (spec.gateway.host, spec.gateway.port, spec.gateway.relays) == ("127.0.0.1", 9000, 1)
    assert spec.router.strategy == "auto" and spec.scheduler.type == "local" and spec.models == []
    assert spec.limits.max_body_bytes > 0 and spec.strategy.drain_timeout_seconds == 600


def test_effective_value_is_frozen() -> None:
    spec = effective("Model", {"backend": "embedded", "path": "x"})
    with pytest.raises(ValueError, match="frozen"):
        spec.path = "y"


def test_effective_accepts_integer_seconds() -> None:
    spec = effective("InferenceService", {"limits": {"requestTimeoutSeconds": 30}})
    assert spec.limits.request_timeout_seconds == 30.0


def test_effective_error_names_every_path() -> None:
    with pytest.raises(InvalidManifest, match=r"spec\.gateway\.port.*spec\.routerr") as caught:
        effective("InferenceService", {"gateway": {"port": "x"}, "routerr": {}})
    assert caught.value.exit_code == 3


@pytest.mark.parametrize(
    ("kind", "path", "update"),
    [
        ("Model", "engineArgs.max-model-len", UpdateClass.ROLL),
        ("Model", "engineArgs.deep.er[3]", UpdateClass.ROLL),
        ("Model", "env.A", UpdateClass.ROLL),
        ("Model", "envFrom.KEY.file", UpdateClass.ROLL),
        ("Model", "restart.backoff.factor", UpdateClass.META),
        ("Model", "strategy.maxSurge", UpdateClass.META),
        ("InferenceService", "models[qwen].replicas", UpdateClass.HOT),
        ("InferenceService", "models[qwen].name", UpdateClass.IMMUTABLE),
        ("InferenceService", "models[qwen].restart.policy", UpdateClass.HOT),
        ("InferenceService", "auth.adminKeyFrom.env", UpdateClass.RECREATE),
        ("InferenceService", "gateway.relays", UpdateClass.ROLL),
        ("InferenceService", "gateway.host", UpdateClass.RECREATE),
        ("InferenceService", "gateway.new-field", UpdateClass.RECREATE),
        ("InferenceService", "scheduler.slurm.partition", UpdateClass.RECREATE),
        ("Model", "probes.startup.deadlineSeconds", UpdateClass.META),
        ("Model", "probes.readiness.periodSeconds", UpdateClass.HOT),
        ("Model", "probes.liveness.periodSeconds", UpdateClass.META),
        ("TrainJob", "rollout.model", UpdateClass.IMMUTABLE),
        ("TrainJob", "scheduler.slurm.partition", UpdateClass.IMMUTABLE),
        ("TrainJob", "envFrom.A.env", UpdateClass.IMMUTABLE),
        ("TrainJob", "restart.backoff.factor", UpdateClass.RECREATE),
        ("TrainJob", "overrides", UpdateClass.IMMUTABLE),
        ("Model", "no.such.field", UpdateClass.RECREATE),
    ],
)
def test_leaf_update_class_is_maximum_of_its_path(kind: str, path: str, update: UpdateClass) -> None:
    assert update_class(kind, parse_path(path)) is update


def test_references_include_implied_ones() -> None:
    assert references("Model", {}) == (Reference(("service",), Ref("InferenceService", "default")),)
    assert references("InferenceService", {}) == ()
    assert references("AgentService", {"agent": "a:B"}) == ()
    assert references("TrainJob", {"rollout": {"model": "q"}}) == (
        Reference(("rollout", "service"), Ref("InferenceService", "default")),
        Reference(("rollout", "model"), Ref("Model", "q")),
    )


def test_validate_returns_paths_and_messages() -> None:
    assert validate("Model", {"backend": "embedded", "path": "x"}) == []
    assert validate("Model", {"external": {"url": "http://x", "apiKeyFrom": {"env": "A", "file": "b"}}}) == [
        (("external", "apiKeyFrom"), 'needs exactly one of "file" and "env"')
    ]


@pytest.mark.parametrize(
    ("spec", "path", "message"),
    [
        ({"replicas": "2"}, ("replicas",), 'expected an integer, got "2": remove the quotes'),
        ({"replicas": 1.5}, ("replicas",), "expected an integer, got 1.5"),
        ({"replicas": True}, ("replicas",), "expected an integer, got true"),
        ({"replicas": -1}, ("replicas",), "must be at least 0, got -1"),
        ({"suspend": "yes"}, ("suspend",), 'expected true or false, got "yes": write true'),
        ({"suspend": "off"}, ("suspend",), 'expected true or false, got "off": write false'),
        ({"env": {"A": 1}}, ("env", "A"), "expected text, got 1: quote it"),
        ({"env": ["A=1"]}, ("env",), "expected a map, got a list"),
        ({"probes": None}, ("probes",), "expected a map, got null"),
        (
            {"resources": {"memory": "64GB"}},
            ("resources", "memory"),
            'must be a size like "64Gi" or "500M", got "64GB"',
        ),
        ({"path": ""}, ("path",), "must not be empty"),
        ({"tokenizer_path": "x"}, ("tokenizer_path",), 'unknown field (did you mean "tokenizerPath"?)'),
        (
            {"restart": {"policy": "always"}},
            ("restart", "policy"),
            '"always" is not one of Always, OnFailure, Never (did you mean "Always"?)',
        ),
        (
            {"probes": {"liveness": {"periodSeconds": 0}}},
            ("probes", "liveness", "periodSeconds"),
            "must be more than 0, got 0",
        ),
        (
            {"service": "A"},
            ("service",),
            '"A" is not a name: lower case letters, digits and "-", which is neither first nor last',
        ),
    ],
)
def test_validate_message_gives_fix(spec: dict[str, object], path: tuple[str, ...], message: str) -> None:
    assert validate("Model", {"backend": "embedded", "path": "x", **spec}) == [(path, message)]


def test_validate_reports_all_faults_of_a_spec() -> None:
    found = validate("Model", {"backend": "vlm:d2", "path": 1, "replicaz": 1, "suspend": "no"})
    assert sorted(path[0] for path, _ in found) == ["backend", "path", "replicaz", "suspend"]


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({}, ['required field "backend" is missing', 'required field "path" is missing']),
        ({"path": "x"}, ['required field "backend" is missing']),
        ({"external": {"url": "http://x"}, "path": "x"}, ['does not go with "external"']),
        ({"external": {"url": "http://x"}, "engineUrl": "http://x:1"}, ['does not go with "external"']),
        ({"backend": "sglang:d1", "path": "x", "engineUrl": "http://10.0.0.2:30000"}, []),
        (
            {"backend": "sglang:d1", "path": "x", "engineUrl": "http://10.0.0.2:1", "engineApiKeyFrom": {"env": "KEY"}},
            [],
        ),
        ({"backend": "sglang:d1", "path": "x", "engineApiKeyFrom": {"env": "KEY"}}, ['"engineUrl", and there is none']),
        (
            {"external": {"url": "http://x"}, "engineApiKeyFrom": {"env": "KEY"}},
            ['does not go with "external"'],
        ),
        ({"backend": "vllm", "path": "x", "engineUrl": "http://[::1]:8000"}, []),
        ({"backend": "sglang:d1", "path": "x", "engineUrl": "http://x:1/v1"}, ["must be http://host:port"]),
        ({"backend": "sglang:d1", "path": "x", "engineUrl": "x:1"}, ["must be http://host:port"]),
        ({"backend": "embedded", "path": "x", "engineUrl": "http://x:1"}, ["must be sglang or vllm"]),
        ({"backend": "sglang:d2", "path": "x", "engineUrl": "http://x:1"}, ["there is one engine"]),
        (
            {"backend": "vllm", "path": "x", "engineUrl": "http://x:1", "replicas": 2, "env": {"A": "b"}},
            ['does not go with "engineUrl"'] * 2,
        ),
        ({"external": {}}, ['required field "url" is missing']),
    ],
)
def test_validate_requires_served_or_external_model(spec: dict[str, object], words: list[str]) -> None:
    found = [message for _, message in validate("Model", spec)]
    assert len(found) == len(words) and all(word in message for word, message in zip(words, found, strict=True))


def test_validate_union_error_names_every_alternative() -> None:
    found = validate("TrainJob", {"config": 3})
    assert found == [(("config",), "expected text, got 3: quote it; or expected a map, got 3")]


def test_validate_scheduler_settings_must_match_type() -> None:
    assert validate("InferenceService", {"scheduler": {"type": "slurm", "slurm": {"partition": "a"}}}) == []
    ((path, message),) = validate("InferenceService", {"scheduler": {"ray": {}}})
    assert path == ("scheduler",) and '"ray" settings need "type: ray"' in message


@pytest.mark.parametrize(
    "words", [["--array=0-3"], ["-Jmine"], ["--job-n", "mine"], ["--comment=mine"], ["-o", "f"], [":"]]
)
def test_validate_rejects_reserved_slurm_options(words: list[str]) -> None:
    ((path, message),) = validate("InferenceService", {"scheduler": {"type": "slurm", "slurm": {"extraArgs": words}}})
    assert path == ("scheduler", "slurm", "extraArgs") and "each process is one job" in message
    allowed = ["--exclusive", "--wait-all-nodes=1", "-p", "a"]
    assert validate("InferenceService", {"scheduler": {"type": "slurm", "slurm": {"extraArgs": allowed}}}) == []


@pytest.mark.parametrize("settings", [{"containerType": "apptainer"}, {"containerMounts": ["/data:/data"]}])
def test_validate_container_settings_require_image(settings: dict[str, Any]) -> None:
    ((path, message),) = validate("InferenceService", {"scheduler": {"type": "slurm", "slurm": settings}})
    assert path == ("scheduler", "slurm") and message == f"{next(iter(settings))} has no effect without containerImage"
    whole = {**settings, "containerImage": "/a.sif"}
    assert validate("InferenceService", {"scheduler": {"type": "slurm", "slurm": whole}}) == []


_ROOTS: dict[str, type[SpecModel]] = {
    **{kind: spec_model(kind) for kind in KINDS},
    "Metadata": Metadata,
    "Overlay": Overlay,
}
_SUFFIXES = {"seconds": ("_seconds", "_seconds_after_finished"), "bytes": ("_bytes", "memory")}


def _fields() -> Iterator[tuple[str, FieldInfo]]:
    for root, model in _ROOTS.items():
        for path, info in all_fields(model):
            yield f"{root}.{path_text(path)}", info


_ALL = dict(_fields())


@pytest.mark.parametrize("name", _ALL)
def test_field_has_update_class_description_and_unit(name: str) -> None:
    info = _ALL[name]
    assert isinstance(info.update, UpdateClass), "no update class"
    doc = field_docs(info.owner).get(info.attribute, "")
    assert len(doc) > 8 and doc.endswith((".", "?")), f"no description: {doc!r}"
    if type_text(info).startswith(("integer", "number")):
        assert info.unit is not None, "a number without a unit"
    if info.unit is not None and info.unit.name in _SUFFIXES:
        assert info.attribute.endswith(_SUFFIXES[info.unit.name]), "the unit is not in the name"
    if re.search(r"timeout|deadline|period|backoff_|delay|ttl|_window", info.attribute):
        assert (info.unit is not None and info.unit.name == "seconds") or info.nested is not None


@pytest.mark.parametrize("name", _ALL)
def test_field_name_is_camel_case_with_described_type(name: str) -> None:
    info = _ALL[name]
    assert re.fullmatch(r"[a-z][A-Za-z]*", info.name)
    assert type_text(info) and default_text(info)


@pytest.mark.parametrize(
    "model",
    sorted({info.owner for info in _ALL.values()}, key=str),
    ids=lambda model: str(model.__name__),
)
def test_model_has_a_docstring_and_valid_defaults(model: type[SpecModel]) -> None:
    assert model_doc(model)
    defaults = {
        name: plain_default(info.default)
        for name, info in fields_of(model).items()
        if info.default is not ABSENT and info.default is not None
    }
    filled = {name: "x" for name, info in fields_of(model).items() if info.required}
    errors = [fault for fault in _faults(model, {**filled, **defaults}) if fault.path[:1] not in {(n,) for n in filled}]
    assert not [fault for fault in errors if fault.path], "a default that its own validation refuses"


def _faults(model: type[SpecModel], value: dict[str, object]) -> list[Any]:
    from areal.resources.validation import check_model

    return check_model(model, value)[1]


def test_update_classes_follow_the_design() -> None:
    expected = {
        ("InferenceService", ("router", "strategy")): UpdateClass.HOT,
        ("InferenceService", ("limits", "maxBodyBytes")): UpdateClass.HOT,
        ("InferenceService", ("gateway", "port")): UpdateClass.RECREATE,
        ("InferenceService", ("scheduler", "type")): UpdateClass.IMMUTABLE,
        ("Model", ("replicas",)): UpdateClass.HOT,
        ("Model", ("path",)): UpdateClass.ROLL,
        ("Model", ("backend",)): UpdateClass.ROLL,
        ("Model", ("chatTemplate",)): UpdateClass.ROLL,
        ("Model", ("resources", "gpus")): UpdateClass.ROLL,
        ("Model", ("service",)): UpdateClass.IMMUTABLE,
        ("AgentService", ("pairs",)): UpdateClass.HOT,
        ("TrainJob", ("config",)): UpdateClass.IMMUTABLE,
    }
    assert {key: update_class(*key) for key in expected} == expected
