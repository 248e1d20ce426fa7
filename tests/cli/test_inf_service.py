"""The manifests that ``areal inf`` flags stand for, errors that name the flags, and ``inf stop``."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from areal.cli.apply import flag_of
from areal.cli.inf.service import arguments
from areal.errors import UsageFault
from areal.resources.kinds import Ref
from areal.state.home import Home
from areal.state.objects import ObjectStore
from areal.state.records import Layer, replace_layer
from tests.cli.conftest import Areal, Typist


def printed(areal: Areal, *words: str) -> list[dict[str, Any]]:
    result = areal(*words, "--dry-run", "-o", "yaml")
    assert result.code == 0, result.err
    return list(yaml.safe_load_all(result.out))


def test_run_without_flags_is_an_empty_service(areal: Areal) -> None:
    assert printed(areal, "inf", "run") == [
        {
            "apiVersion": "areal.dev/v1alpha1",
            "kind": "InferenceService",
            "metadata": {"name": "default"},
            "spec": {},
        }
    ]


def test_run_with_every_service_flag(areal: Areal, tmp_path: Path) -> None:
    (service,) = printed(
        areal,
        "inf",
        "run",
        "rl",
        "--host",
        "0.0.0.0",
        "--port",
        "9000",
        "--admin-api-key-file",
        str(tmp_path / "k"),
        "--routing-strategy",
        "least_busy",
        "--scheduler",
        "local",
        "--log-level",
        "debug",
    )
    assert service["metadata"]["name"] == "rl"
    assert service["spec"] == {
        "gateway": {"host": "0.0.0.0", "port": 9000},
        "router": {"strategy": "least_loaded"},
        "auth": {"adminKeyFrom": {"file": str(tmp_path / "k")}},
        "scheduler": {"type": "local"},
        "logLevel": "debug",
    }


def test_run_with_a_model(areal: Areal) -> None:
    _, model = printed(
        areal,
        "inf",
        "run",
        "--service",
        "rl",
        "--model",
        "qwen",
        "--backend",
        "sglang:d2t2",
        "--model-path",
        "Qwen/Q",
        "--tokenizer-path",
        "Qwen/T",
        "--engine-args",
        "--mem-fraction-static 0.8 --enable-x",
        "--replicas",
        "3",
        "--model-health-timeout",
        "20m",
    )
    assert model["kind"] == "Model" and model["metadata"]["name"] == "qwen"
    assert model["spec"] == {
        "service": "rl",
        "backend": "sglang:d2t2",
        "path": "Qwen/Q",
        "tokenizerPath": "Qwen/T",
        "engineArgs": {"mem-fraction-static": 0.8, "enable-x": True},
        "replicas": 3,
        "probes": {"startup": {"deadlineSeconds": 1200.0}},
    }


@pytest.mark.parametrize("spelling", ["--model", "--model-name"])
def test_register_external(areal: Areal, spelling: str) -> None:
    (model,) = printed(
        areal,
        "inf",
        "register",
        spelling,
        "gpt",
        "--api-url",
        "https://api.example.com/v1",
        "--provider-api-key-env",
        "KEY",
        "--provider-model",
        "gpt-x",
    )
    assert model["spec"] == {
        "service": "default",
        "external": {"url": "https://api.example.com/v1", "model": "gpt-x", "apiKeyFrom": {"env": "KEY"}},
    }


def test_register_of_private_anthropic_endpoint_sets_both(areal: Areal) -> None:
    words = ("--api-url", "10.0.0.1:8000", "--provider-api", "anthropic", "--allow-private")
    (model,) = printed(areal, "inf", "register", "--model", "gpt", *words)
    assert model["spec"]["external"] == {"url": "http://10.0.0.1:8000", "api": "anthropic", "allowPrivate": True}


def test_default_service_comes_from_config(areal: Areal) -> None:
    areal("config", "set", "service", "rl")
    assert printed(areal, "inf", "run")[0]["metadata"]["name"] == "rl"
    assert printed(areal, "inf", "run", "--service", "other")[0]["metadata"]["name"] == "other"


def test_manifests_of_flags_are_valid(areal: Areal, tmp_path: Path) -> None:
    file = tmp_path / "m.yaml"
    words = ["inf", "run", "--port", "9000", "--model", "qwen", "--backend", "embedded", "--model-path", str(tmp_path)]
    file.write_text(areal(*words, "--dry-run=client", "-o", "yaml").out)
    assert areal("validate", "-f", str(file)).code == 0


def test_dry_run_table_shows_plan_and_changes_nothing(areal: Areal, home: Any) -> None:
    result = areal("inf", "run", "--port", "9000", "--dry-run")
    assert result.code == 0
    assert "+ InferenceService/default create" in result.out
    assert "start InferenceService/default router/0: no process" in result.out
    assert not (home.objects / "inferenceservice").exists()


def test_repeated_run_keeps_applied_fields(areal: Areal, record: Any) -> None:
    record("InferenceService", "default", {"gateway": {"port": 9000}, "logLevel": "debug"})
    (service,) = printed(areal, "inf", "run", "--port", "9001")
    assert service["spec"] == {"gateway": {"port": 9001}, "logLevel": "debug"}
    (forced,) = printed(areal, "inf", "run", "--port", "9001", "--force")
    assert forced["spec"] == {"gateway": {"port": 9001}}


@pytest.mark.parametrize(
    ("texts", "found"),
    [
        (("--a 1 --b two --c",), {"a": 1, "b": "two", "c": True}),
        (("--a=1.5 b=x",), {"a": 1.5, "b": "x"}),
        (("--a 'two words' --b true",), {"a": "two words", "b": True}),
        (('{"a": [1, 2]}', "--b 1"), {"a": [1, 2], "b": 1}),
        (("--a -1",), {"a": -1}),
        (("",), {}),
        ((), {}),
    ],
)
def test_arguments_are_named_and_typed(texts: tuple[str, ...], found: dict[str, Any]) -> None:
    assert arguments(texts, "--engine-args") == found


@pytest.mark.parametrize("text", ["a b", "'open", "{1}"])
def test_unparsable_arguments_are_refused(text: str) -> None:
    with pytest.raises(UsageFault, match="--engine-args"):
        arguments((text,), "--engine-args")


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (("--provider-model", "x"), "--api-url is missing"),
        (("--allow-private",), "--api-url is missing"),
        (("--api-url", "http://10.0.0.1/v1"), "--allow-private"),
        (("--api-url", "http://169.254.169.254/v1", "--allow-private"), "metadata"),
        (("--api-url", "https://me:key@a.example"), "credentials"),
        (("--api-url", "nonsense://x"), "must begin with http"),
        (("--backend", "embedded"), "--model-path is missing"),
    ],
)
def test_incomplete_model_registration_is_refused(areal: Areal, words: tuple[str, ...], fault: str) -> None:
    result = areal("inf", "register", "--model", "x", *words)
    assert result.code == 2
    assert fault in result.err


# -- errors in terms of flags

RUN = ("inf", "run", "-d", "--model", "m", "--model-path")
REGISTER = ("inf", "register", "--model", "m", "--model-path")


@pytest.mark.parametrize("dry", [(), ("--dry-run",)])
@pytest.mark.parametrize(
    ("words", "fault"),
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
    areal: Areal, record: Callable[..., Any], tmp_path: Path, words: tuple[str, ...], fault: str, dry: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    record("InferenceService", "default", {"suspend": True})
    result = areal(*words, *dry)
    assert result.code == 3, result.err
    assert fault in result.err
    assert "stdin" not in result.err and "spec." not in result.err and "manifest" not in result.err


def test_model_folder_without_tokenizer_is_refused(areal: Areal, record: Callable[..., Any], tmp_path: Path) -> None:
    record("InferenceService", "default", {"suspend": True})
    model, other = tmp_path / "model", tmp_path / "other"
    model.mkdir()
    other.mkdir()
    (model / "config.json").touch()
    words = (*REGISTER, str(model), "--backend", "embedded", "--dry-run")
    lacks = areal(*words)
    assert lacks.code == 3
    assert f"--model-path: model folder '{model}' has no tokenizer.json" in lacks.err
    assert "hint: name a folder that has one as the tokenizer path" in lacks.err
    assert "--tokenizer-path: model folder" in areal(*words, "--tokenizer-path", str(other)).err
    (other / "tokenizer.json").touch()
    assert areal(*words, "--tokenizer-path", str(other)).code == 0


def test_fault_keeps_value_resembling_field(areal: Areal, record: Callable[..., Any]) -> None:
    record("InferenceService", "default", {"suspend": True})
    result = areal(*REGISTER, "./spec.replicas and beside the manifest", "--backend", "embedded", "--dry-run")
    assert result.code == 3
    assert "--model-path: model folder './spec.replicas and beside the manifest' does not exist" in result.err
    assert "(looked in the working directory)" in result.err


def test_missing_key_file_error_names_flag(areal: Areal, tmp_path: Path) -> None:
    result = areal("inf", "run", "-d", "--admin-api-key-file", str(tmp_path / "k"), "--dry-run")
    assert result.code == 3 and f"--admin-api-key-file {tmp_path / 'k'} does not exist" in result.err


def test_port_in_use_error_names_flag(areal: Areal) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        result = areal("inf", "run", "-d", "--port", str(taken.getsockname()[1]))
    assert result.code == 10 and "choose another --port" in result.err


def test_fault_of_other_layers_field_names_flag(
    areal: Areal, record: Callable[..., Any], home: Home, tmp_path: Path
) -> None:
    (tmp_path / "tokenizer.json").touch()
    record("InferenceService", "default", {"suspend": True})
    spec = {"backend": "embedded", "path": str(tmp_path), "service": "default"}
    found = record("Model", "m", spec)
    scaled = Layer("scale", {"replicas": 3}, None, "ann@desk", 1.0)
    from dataclasses import replace as changed

    ObjectStore(home).put(changed(found, layers=replace_layer(found.layers, scaled)))
    assert ObjectStore(home).get(Ref("Model", "m")).spec["replicas"] == 3  # type: ignore[union-attr]
    words = ("--backend", "embedded", "--model-path", str(tmp_path))
    result = areal("inf", "register", "--model", "m", *words, "--replicas", "2")
    assert result.code == 5
    assert "--replicas: 3 was set by scale (ann@desk" in result.err and "the command line says 2" in result.err
    assert "leave the flag out to leave it to its owner, or take it with --force" in result.err
    assert "stdin" not in result.err and "manifest" not in result.err and "spec." not in result.err
    moved = areal("inf", "register", "--model", "m", *words, "--service", "other")
    assert moved.code == 4, "the service is not there"


def test_duplicate_served_name_is_refused(areal: Areal, record: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").touch()
    record("InferenceService", "default", {"suspend": True})
    record("Model", "m", {"backend": "embedded", "path": str(tmp_path), "servedModelName": "Q/q"})
    words = ("inf", "register", "--backend", "embedded", "--model-path", str(tmp_path), "--dry-run")
    taken = areal(*words, "--model", "n", "--served-model-name", "Q/q")
    assert taken.code == 3 and '--served-model-name: "Q/q" is what clients' in taken.err and "Model/m" in taken.err
    assert areal(*words, "--model", "n", "--served-model-name", "Q/other").code == 0
    assert areal("inf", "models", "--json").items[0]["servedModelName"] == "Q/q"


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


# -- stop


@pytest.fixture
def trained(record: Callable[..., Any]) -> None:
    record("InferenceService", "default", {})
    record("Model", "m1", {"backend": "embedded", "path": "/m1"})
    record("TrainJob", "grpo", {"driver": "my.code:main", "rollout": {"service": "default", "model": "m1"}})


@pytest.mark.parametrize("flags", [(), ("--yes",), ("--all",), ("--force",)])
def test_service_of_running_job_is_kept(areal: Areal, trained: None, flags: tuple[str, ...]) -> None:
    refused = areal("inf", "stop", *flags)
    assert refused.code == 5 and "TrainJob/grpo" in refused.err and "--cascade" in refused.err
    assert len(areal("get", "-o", "name").out.split()) == 3


def test_cascade_asks_and_is_refused_without_terminal(areal: Areal, trained: None) -> None:
    refused = areal("inf", "stop", "--cascade")
    assert refused.code == 2 and "--yes" in refused.err
    assert len(areal("get", "-o", "name").out.split()) == 3


def test_cascade_with_a_yes_deletes_the_job_too(areal: Areal, trained: None) -> None:
    assert areal("inf", "stop", "--cascade", "--yes").code == 0
    assert areal("get", "-o", "name").out == ""


def test_cascade_with_keep_state_is_refused(areal: Areal, trained: None) -> None:
    refused = areal("inf", "stop", "--keep-state", "--cascade", "--yes")
    assert refused.code == 2 and "--keep-state deletes nothing" in refused.err


def test_stop_with_keep_state_deletes_and_asks_nothing(areal: Areal, record: Callable[..., Any]) -> None:
    record("InferenceService", "default", {})
    record("Model", "m1", {"backend": "embedded", "path": "/m1"})
    assert areal("inf", "stop", "--keep-state").code == 0
    assert len(areal("get", "-o", "name").out.split()) == 2


def test_only_service_is_meant_without_its_name(areal: Areal, record: Callable[..., Any]) -> None:
    record("InferenceService", "prod", {"suspend": True})
    record("Model", "m1", {"service": "prod", "backend": "embedded", "path": "/m1"})
    assert [row["name"] for row in areal("inf", "models", "--json").items] == ["m1"]
    assert "inferenceservice/prod" in areal("inf", "status", "-o", "name").out
    assert "InferenceService/prod is suspended" in areal("inf", "chat", "-m", "hello").err
    assert printed(areal, "inf", "run")[0]["metadata"]["name"] == "default", "a new one"
    record("InferenceService", "test", {"suspend": True})
    refused = areal("inf", "models")
    assert (
        refused.code == 4 and "InferenceService/default does not exist" in refused.err and "prod, test" in refused.err
    )
    assert areal("config", "set", "service", "prod").code == 0
    assert areal("inf", "models").code == 0


@pytest.mark.parametrize("place", ["external", "engineUrl"])
def test_scale_of_model_without_replicas_says_so(areal: Areal, record: Callable[..., Any], place: str) -> None:
    record("InferenceService", "default", {"suspend": True})
    external = {"external": {"url": "http://127.0.0.1:9/v1"}}
    record("Model", "gpt", external if place == "external" else {"engineUrl": "http://127.0.0.1:9", "path": "/m1"})
    for words in (("scale", "model/gpt"), ("scale", "inf/default"), ("inf", "scaleup", "--model", "gpt")):
        refused = areal(*words, "--replicas", "2")
        assert refused.code == 2, refused
        assert (
            f"Model/gpt has no replicas to scale: spec.{place} names a server that areal does not start" in refused.err
        )


# -- every verb that deletes objects

DELETING = [
    ("inf", "stop"),
    ("inf", "stop", "--all"),
    ("inf", "stop", "--force"),
    ("inf", "deregister", "--model", "m1"),
    ("inf", "deregister", "--model", "m1", "--grace", "1s"),
    ("agent", "stop"),
    ("agent", "stop", "--all"),
    ("delete", "inferenceservice/default", "--cascade"),
    ("delete", "model/m1"),
]


@pytest.fixture
def three(record: Callable[..., Any]) -> None:
    record("InferenceService", "default", {"suspend": True})
    record("Model", "m1", {"backend": "embedded", "path": "/m1"})
    record("AgentService", "default", {"agent": "a:B"})


@pytest.mark.parametrize("words", DELETING, ids=" ".join)
def test_deleting_verb_without_terminal_requires_yes(areal: Areal, three: None, words: tuple[str, ...]) -> None:
    refused = areal(*words)
    assert refused.code == 2 and "--yes" in refused.err
    assert len(areal("get", "-o", "name").out.split()) == 3


@pytest.mark.parametrize("words", DELETING, ids=" ".join)
def test_deleting_verb_with_yes_deletes(areal: Areal, three: None, words: tuple[str, ...]) -> None:
    assert areal(*words, "--yes").code == 0
    assert len(areal("get", "-o", "name").out.split()) < 3


@pytest.mark.parametrize("words", [("inf", "stop"), ("inf", "deregister", "--model", "m1"), ("agent", "stop")])
@pytest.mark.parametrize(("answer", "code"), [("n\n", 2), ("y\n", 0)])
def test_deleting_verb_on_terminal_follows_answer(
    areal: Areal, home: Home, three: None, words: tuple[str, ...], answer: str, code: int
) -> None:
    typist = Typist(home.root, *words)
    typist.until("Go on?")
    typist.type(answer)
    assert typist.code() == code
    assert (len(areal("get", "-o", "name").out.split()) == 3) == (code == 2)


def test_model_verbs_report_remote_context(areal: Areal) -> None:
    assert areal("config", "set-context", "far", "--gateway", "http://10.0.0.1:8080").code == 0
    assert areal("config", "use-context", "far").code == 0
    for words in (
        ("register", "--model", "m", "--backend", "embedded", "--model-path", "org/name"),
        ("deregister", "--model", "m", "--yes"),
        ("scaleup", "--model", "m"),
        ("stop", "--yes"),
    ):
        result = areal("inf", *words)
        assert result.code == 5 and "the context 'far' is a remote gateway" in result.err, (words, result.err)
