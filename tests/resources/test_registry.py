"""Effective specs, update classes by path, references, and validation without positions."""

from __future__ import annotations

import pytest

from areal.errors import InvalidManifest
from areal.resources import registry
from areal.resources.registry import Reference
from areal.resources.tree import parse_path
from areal.resources.update import Update


def test_effective_fills_defaults_and_keeps_what_is_set() -> None:
    spec = registry.effective("InferenceService", {"gateway": {"port": 9000}})
    assert (spec.gateway.host, spec.gateway.port, spec.gateway.relays) == ("127.0.0.1", 9000, 1)
    assert spec.router.strategy == "auto" and spec.scheduler.type == "local" and spec.models == []
    assert spec.limits.max_body_bytes > 0 and spec.strategy.drain_timeout_seconds == 600


def test_effective_is_a_value_that_cannot_be_changed() -> None:
    spec = registry.effective("Model", {"backend": "embedded", "path": "x"})
    with pytest.raises(ValueError, match="frozen"):
        spec.path = "y"


def test_effective_integers_are_fine_where_seconds_are_wanted() -> None:
    spec = registry.effective("InferenceService", {"limits": {"requestTimeoutSeconds": 30}})
    assert spec.limits.request_timeout_seconds == 30.0


def test_effective_invalid_names_every_path() -> None:
    with pytest.raises(InvalidManifest, match=r"spec\.gateway\.port.*spec\.routerr") as caught:
        registry.effective("InferenceService", {"gateway": {"port": "x"}, "routerr": {}})
    assert caught.value.exit_code == 3


@pytest.mark.parametrize(
    ("kind", "path", "update"),
    [
        ("Model", "engineArgs.max-model-len", Update.ROLL),
        ("Model", "engineArgs.deep.er[3]", Update.ROLL),
        ("Model", "env.A", Update.ROLL),
        ("Model", "envFrom.KEY.file", Update.ROLL),
        ("Model", "restart.backoff.factor", Update.META),
        ("Model", "strategy.maxSurge", Update.META),
        ("InferenceService", "models[qwen].replicas", Update.HOT),
        ("InferenceService", "models[qwen].name", Update.IMMUTABLE),
        ("InferenceService", "models[qwen].restart.policy", Update.HOT),
        ("InferenceService", "auth.adminKeyFrom.env", Update.RECREATE),
        ("InferenceService", "gateway.relays", Update.ROLL),
        ("InferenceService", "gateway.host", Update.RECREATE),
        ("InferenceService", "gateway.new-field", Update.RECREATE),
        ("InferenceService", "scheduler.slurm.partition", Update.RECREATE),
        ("Model", "probes.startup.deadlineSeconds", Update.META),
        ("Model", "probes.readiness.periodSeconds", Update.HOT),
        ("Model", "probes.liveness.periodSeconds", Update.META),
        ("TrainJob", "rollout.model", Update.IMMUTABLE),
        ("TrainJob", "scheduler.slurm.partition", Update.IMMUTABLE),
        ("TrainJob", "envFrom.A.env", Update.IMMUTABLE),
        ("TrainJob", "restart.backoff.factor", Update.RECREATE),
        ("TrainJob", "overrides", Update.IMMUTABLE),
        ("Model", "no.such.field", Update.RECREATE),
    ],
)
def test_update_class_of_a_leaf_is_the_most_its_fields_say(kind: str, path: str, update: Update) -> None:
    assert registry.update_class(kind, parse_path(path)) is update


def test_references_include_implied_ones() -> None:
    assert registry.references("Model", {}) == (Reference(("service",), "InferenceService", "default"),)
    assert registry.references("InferenceService", {}) == ()
    assert registry.references("AgentService", {"agent": "a:B"}) == ()
    assert registry.references("TrainJob", {"rollout": {"model": "q"}}) == (
        Reference(("rollout", "service"), "InferenceService", "default"),
        Reference(("rollout", "model"), "Model", "q"),
    )


def test_validate_returns_paths_and_messages() -> None:
    assert registry.validate("Model", {"backend": "embedded", "path": "x"}) == []
    assert registry.validate("Model", {"external": {"url": "http://x", "apiKeyFrom": {"env": "A", "file": "b"}}}) == [
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
def test_validate_message_says_what_to_write(spec: dict[str, object], path: tuple[str, ...], message: str) -> None:
    assert registry.validate("Model", {"backend": "embedded", "path": "x", **spec}) == [(path, message)]


def test_validate_reports_all_faults_of_a_spec() -> None:
    found = registry.validate("Model", {"backend": "vlm:d2", "path": 1, "replicaz": 1, "suspend": "no"})
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
def test_validate_model_is_served_or_external(spec: dict[str, object], words: list[str]) -> None:
    found = [message for _, message in registry.validate("Model", spec)]
    assert len(found) == len(words) and all(word in message for word, message in zip(words, found, strict=True))


def test_validate_union_names_every_alternative() -> None:
    found = registry.validate("TrainJob", {"config": 3})
    assert found == [(("config",), "expected text, got 3: quote it; or expected a map, got 3")]


def test_validate_scheduler_settings_belong_to_its_type() -> None:
    assert registry.validate("InferenceService", {"scheduler": {"type": "slurm", "slurm": {"partition": "a"}}}) == []
    ((path, message),) = registry.validate("InferenceService", {"scheduler": {"ray": {}}})
    assert path == ("scheduler",) and '"ray" settings need "type: ray"' in message
