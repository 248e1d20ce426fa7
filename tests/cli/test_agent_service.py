"""The manifests that ``areal agent`` flags stand for, and errors that name the flags."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from areal.cli.apply import flag_of
from areal.state.files import read_json, write_json
from areal.state.home import Home
from areal.state.objects import ObjectStore
from areal.state.records import Layer, replace_layer
from tests.cli.conftest import Areal


def printed(areal: Areal, *words: str) -> dict[str, Any]:
    result = areal("agent", "run", *words, "--dry-run", "-o", "yaml")
    assert result.code == 0, result.err
    (document,) = yaml.safe_load_all(result.out)
    assert isinstance(document, dict)
    return document


def test_run_with_only_agent_sets_no_other_field(areal: Areal) -> None:
    assert printed(areal, "--agent", "my_agent:MyAgent") == {
        "apiVersion": "areal.dev/v1alpha1",
        "kind": "AgentService",
        "metadata": {"name": "default"},
        "spec": {"agent": "my_agent:MyAgent"},
    }


def test_run_with_every_flag(areal: Areal) -> None:
    words = ["--service", "tau", "--agent", "a.b:C", "--pairs", "4", "--host", "::1", "--port", "9000"]
    words += ["--inf", "default", "--model", "qwen", "--session-timeout", "10m", "--drain-timeout", "5s"]
    words += ["--health-poll-interval", "2s", "--setup-timeout", "1m", "--env", "A=1", "--env", "B=x=y"]
    words += ["--admin-api-key-file", "/keys/k", "--log-level", "debug", "--scheduler", "local"]
    document = printed(areal, *words)
    assert document["metadata"]["name"] == "tau"
    assert document["spec"] == {
        "agent": "a.b:C",
        "pairs": 4,
        "gateway": {"host": "::1", "port": 9000},
        "auth": {"adminKeyFrom": {"file": "/keys/k"}},
        "scheduler": {"type": "local"},
        "logLevel": "debug",
        "inference": {"service": "default", "model": "qwen"},
        "session": {"idleTimeoutSeconds": 600.0},
        "drainTimeoutSeconds": 5.0,
        "healthPollSeconds": 2.0,
        "setupTimeoutSeconds": 60.0,
        "env": {"A": "1", "B": "x=y"},
    }


def test_run_splits_command_into_words(areal: Areal) -> None:
    assert printed(areal, "--command", "node 'my agent.js' -v")["spec"] == {"command": ["node", "my agent.js", "-v"]}


def test_run_with_empty_command_sets_none(areal: Areal) -> None:
    assert 'one of "agent" and "command" is needed' in areal("agent", "run", "--command", "").err


def test_run_without_an_agent_names_the_flag(areal: Areal) -> None:
    result = areal("agent", "run", "--pairs", "2")
    assert result.code == 2 and "--agent MODULE:CLASS is missing" in result.err


@pytest.mark.parametrize("words", [("agent", "stop"), ("delete", "agentservice/default")])
def test_deleted_service_drops_its_current_session(
    words: tuple[str, ...], areal: Areal, record: Callable[..., Any], home: Home
) -> None:
    for others in ({"http://elsewhere:1": "t"}, {}):
        record("AgentService", "default", {"agent": "a:B"})
        write_json(home.current_sessions, {"default": "s", **others})
        stopped = areal(*words, "--yes")
        assert stopped.code == 0, stopped.err
        left = read_json(home.current_sessions) if home.current_sessions.exists() else {}
        assert left == others
    assert not home.current_sessions.exists()


def test_service_is_deleted_despite_damaged_session_file(areal: Areal, record: Callable[..., Any], home: Home) -> None:
    record("AgentService", "default", {"agent": "a:B"})
    home.current_sessions.write_text("{")
    deleted = areal("delete", "agentservice/default", "--yes")
    assert deleted.code == 0, deleted.err


def test_repeated_run_changes_only_named_flags(areal: Areal, record: Callable[..., Any]) -> None:
    record("AgentService", "default", {"agent": "a:B", "pairs": 3, "env": {"A": "1"}})
    assert printed(areal, "--agent", "a:C")["spec"] == {"agent": "a:C", "pairs": 3, "env": {"A": "1"}}
    assert printed(areal)["spec"] == {"agent": "a:B", "pairs": 3, "env": {"A": "1"}}
    assert printed(areal, "--agent", "a:C", "--force")["spec"] == {"agent": "a:C"}


def test_repeated_run_keeps_changes_of_other_commands(areal: Areal, record: Callable[..., Any], home: Home) -> None:
    found = record("AgentService", "default", {"agent": "a:B", "pairs": 3, "env": {"A": "1"}})
    scaled = Layer("scale", {"pairs": 5}, None, "ann@desk", 1.0)
    ObjectStore(home).put(replace(found, layers=replace_layer(found.layers, scaled)))
    assert printed(areal)["spec"] == {"agent": "a:B", "pairs": 5, "env": {"A": "1"}}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--agent", "a:B", "--env", "1A=2"), "'1A=2' is not NAME or NAME=VALUE"),
        (("--agent", "a:B", "--env", "NOT_SET"), "NOT_SET is not set here"),
        (("--agent", "a:B", "--model", "m"), "--model needs --inf SERVICE"),
        (("--command", "'a"), "--command: No closing quotation"),
    ],
)
def test_run_with_conflicting_flags_is_refused(areal: Areal, words: tuple[str, ...], message: str) -> None:
    result = areal("agent", "run", *words)
    assert result.code == 2 and message in result.err


@pytest.mark.parametrize(
    ("path", "flag"),
    [
        ("spec.agent", "--agent"),
        ("spec.inference.service", "--inf"),
        ("spec.inference.model", "--model"),
        ("spec.session.idleTimeoutSeconds", "--session-timeout"),
        ("spec.env.A", "--env"),
    ],
)
def test_errors_name_the_flag(path: str, flag: str) -> None:
    assert flag_of(path) == flag


@pytest.mark.parametrize("verb", ["status", "logs", "scaleup", "stop", "chat"])
def test_verb_on_missing_service_is_not_found(areal: Areal, record: Callable[..., Any], verb: str) -> None:
    record("AgentService", "default", {"agent": "a:B", "suspend": True})
    words = ["-m", "x"] if verb == "chat" else []
    result = areal("agent", verb, "--service", "defautl", *words)
    assert result.code == 4 and 'did you mean "default"' in result.err


def test_stopped_service_error_names_resume_command(areal: Areal, record: Callable[..., Any], tmp_path: Path) -> None:
    record("AgentService", "default", {"agent": "a:B", "suspend": True})
    result = areal("agent", "sessions", "list")
    assert result.code == 1 and "AgentService/default is suspended" in result.err
    assert "areal resume AgentService/default" in result.err
    record("InferenceService", "default", {"suspend": True})
    (tmp_path / "rows.jsonl").write_text('{"question": "1+1?", "answer": "2"}\n')
    asked = areal("eval", "m", "--dataset", str(tmp_path / "rows.jsonl"), "--reward", "number")
    assert asked.code == 1 and "areal resume InferenceService/default" in asked.err


def test_ps_lists_stopped_services_with_all_only(areal: Areal, record: Callable[..., Any]) -> None:
    record("AgentService", "default", {"agent": "a:B", "pairs": 2, "suspend": True})
    assert "no agent service runs" in areal("agent", "ps").err
    (row,) = areal("agent", "ps", "--all", "--json").items
    assert (row["service"], row["phase"], row["pairs"], row["agent"]) == ("default", "Suspended", 2, "a:B")


def test_scale_rejects_conflicting_flags(areal: Areal, record: Callable[..., Any]) -> None:
    record("AgentService", "default", {"agent": "a:B", "pairs": 2})
    up = areal("agent", "scaleup", "--pairs", "1")
    assert up.code == 2 and "scaleup from 2 to 1" in up.err and "areal agent scaledown --service default" in up.err
    down = areal("agent", "scaledown", "--by", "3")
    assert down.code == 2 and "--by 3 is too many: AgentService/default has 2" in down.err
    both = areal("agent", "scaledown", "--pairs", "1", "--by", "1")
    assert both.code == 2 and "use either --pairs (the new number) or --by" in both.err


def test_suspended_service_is_scaled_from_the_pairs_that_it_has_when_resumed(
    areal: Areal, record: Callable[..., Any]
) -> None:
    record("AgentService", "default", {"command": ["cat"], "pairs": 3, "suspend": True})

    def pairs() -> int:
        return int(areal("get", "agent/default", "-o", "jsonpath={.spec.pairs}").out)

    up = areal("agent", "scaleup", "--by", "1", "--force-conflicts")
    assert up.code == 0 and "scaled 3 -> 4" in up.out and pairs() == 4, up
    assert areal("agent", "scaledown", "--by", "2", "--yes").code == 0 and pairs() == 2
    assert areal("scale", "agent/default", "--replicas", "1", "--current", "2", "--yes").code == 0 and pairs() == 1
    assert (
        "--model names a model of an InferenceService"
        in areal("scale", "agent/default", "--replicas", "2", "--model", "m").err
    )


def test_verbs_default_to_only_agent_service(areal: Areal, tmp_path: Path) -> None:
    manifest = tmp_path / "agents.yaml"
    head = "apiVersion: areal.dev/v1alpha1\nkind: AgentService\n"
    text = head + "metadata: {{name: {}}}\nspec: {{agent: a:B, suspend: true}}\n"
    manifest.write_text(text.format("mine"))
    assert areal("apply", "-f", str(manifest)).code == 0
    assert "mine: Suspended" in areal("agent", "status").out
    manifest.write_text(text.format("other"))
    assert areal("apply", "-f", str(manifest)).code == 0
    assert "AgentService/default does not exist" in areal("agent", "status").err
