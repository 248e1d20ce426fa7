"""Reading what is recorded: every format of every read verb over real state, no process running."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from areal.resources.kinds import Ref
from areal.runtime import procfs, records
from areal.runtime.backends.base import RunSpec
from areal.runtime.runs import RunStore
from areal.state.events import EventLog
from areal.state.files import seal, unseal
from areal.state.home import Home
from areal.state.objects import ObjectStore
from areal.state.records import Layer, replace_layer
from tests.cli.conftest import Areal

Record = Callable[..., Any]
QWEN = {"backend": "embedded:d2", "path": "./qwen", "engineArgs": {"max-model-len": 4096}}


def end_run(home: Home, spec: RunSpec, at: float, reason: str = "stopped") -> None:
    """Record a process that ended ``at`` seconds since the epoch."""
    runs = RunStore(home.root / "runs")
    os.close(runs.create(spec))
    last = {"code": 0, "signal": None, "at": at, "reason": reason}
    end = {"phase": "exited", "reason": reason, "restarts": 0, "last_exit": last, "swept": []}
    records.write_json(str(runs.folder(spec.uid)), records.EXIT, end)
    over = {**procfs.identity_fields(os.getpid()), "start_ticks": 1}
    records.write_json(str(runs.folder(spec.uid)), records.ID, over)


@pytest.fixture
def objects(record: Record) -> None:
    record("InferenceService", "default", {"gateway": {"port": 8081}}, labels={"tier": "prod"})
    record("Model", "qwen", QWEN, labels={"tier": "prod", "size": "8b"})
    record("Model", "llama", {"backend": "embedded", "path": "./llama"}, labels={"tier": "dev"})


def test_get_without_objects_prints_nothing_on_stdout(areal: Areal, home: Home) -> None:
    result = areal("get")
    assert (result.code, result.out, result.err) == (0, "", f"nothing in {home.root} yet\n")
    assert areal("get", "-q").err == ""


def test_file_in_place_of_home_is_an_error(areal: Areal) -> None:
    result = areal("get", "--home", __file__)
    assert result.code == 1
    assert "is not a folder" in result.err and "--home" in result.err


def test_get_lists_all_kinds_by_kind_and_name(areal: Areal, objects: None) -> None:
    rows = areal("get").rows
    assert rows[0][:3] == ["NAME", "READY", "STATUS"]
    assert [row[0] for row in rows[1:]] == ["inferenceservice/default", "model/llama", "model/qwen"]


def test_get_of_one_kind_shows_its_own_columns(areal: Areal, objects: None) -> None:
    rows = areal("get", "mdl").rows
    assert rows[0] == ["NAME", "READY", "STATUS", "SERVICE", "BACKEND", "AGE"]
    assert [row[0] for row in rows[1:]] == ["llama", "qwen"]
    assert rows[2][1] == "0/2"


def test_get_wide_adds_columns(areal: Areal, objects: None) -> None:
    assert "tier=prod,size=8b" in areal("get", "models", "-o", "wide").out


def test_get_of_several_kinds_and_several_names(areal: Areal, objects: None) -> None:
    assert areal("get", "inf,models", "-o", "name").out.split() == [
        "inferenceservice/default",
        "model/llama",
        "model/qwen",
    ]
    assert areal("get", "model", "qwen", "llama", "-o", "name").out.split() == ["model/qwen", "model/llama"]
    assert areal("get", "model/qwen", "inf/default", "-o", "name").out.split() == [
        "model/qwen",
        "inferenceservice/default",
    ]


def test_get_json_prints_list_or_single_object(areal: Areal, objects: None) -> None:
    listed = areal("get", "models", "--json").json
    assert (listed["kind"], len(listed["items"])) == ("List", 2)
    one = areal("get", "model/qwen", "-o", "json").json
    assert one["kind"] == "Model"
    assert one["metadata"]["labels"] == {"tier": "prod", "size": "8b"}
    assert one["metadata"]["generation"] == 1
    assert one["spec"] == QWEN
    assert one["status"]["desiredReplicas"] == 2
    assert one["status"]["readyReplicas"] == 0
    assert {condition["type"] for condition in one["status"]["conditions"]} >= {"Ready", "Progressing"}


def test_get_yaml_equals_json(areal: Areal, objects: None) -> None:
    as_json, as_yaml = areal("get", "model/qwen", "-o", "json"), areal("get", "model/qwen", "-o", "yaml")
    found = yaml.safe_load(as_yaml.out)
    assert found["spec"] == as_json.json["spec"]
    assert found["metadata"] == as_json.json["metadata"]


def test_get_jsonl_prints_one_document_per_line(areal: Areal, objects: None) -> None:
    lines = areal("get", "-o", "jsonl").out.splitlines()
    assert [json.loads(line)["metadata"]["name"] for line in lines] == ["default", "llama", "qwen"]


def test_get_jsonpath_of_a_list(areal: Areal, objects: None) -> None:
    template = '{range .items[?(@.kind=="Model")]}{.metadata.name}={.spec.backend}\\n{end}'
    assert areal("get", "-o", f"jsonpath={template}").out == "llama=embedded\nqwen=embedded:d2\n"


@pytest.mark.parametrize(
    ("selector", "names"),
    [
        ("tier=prod", ["inferenceservice/default", "model/qwen"]),
        ("tier!=prod", ["model/llama"]),
        ("size", ["model/qwen"]),
        ("tier in (dev,test)", ["model/llama"]),
        ("tier=prod,!size", ["inferenceservice/default"]),
        ("tier=none", []),
    ],
)
def test_get_with_a_selector(areal: Areal, objects: None, selector: str, names: list[str]) -> None:
    assert areal("get", "-l", selector, "-o", "name").out.split() == names


def test_empty_list_explains_reason(areal: Areal, objects: None) -> None:
    assert areal("get", "-l", "tier=none").err.strip() == "no labels match tier=none"
    assert areal("get", "trainjobs").err.strip() == "there is no TrainJob"


@pytest.mark.parametrize(
    ("key", "names"),
    [
        ("name", ["model/llama", "model/qwen"]),
        ("{.status.desiredReplicas}", ["model/llama", "model/qwen"]),
        (".metadata.labels.size", ["model/llama", "model/qwen"]),
        ("backend", ["model/llama", "model/qwen"]),
    ],
)
def test_get_sorted_by_a_column_or_a_path(areal: Areal, objects: None, key: str, names: list[str]) -> None:
    assert areal("get", "models", "--sort-by", key, "-o", "name").out.split() == names


def test_get_manifest_contains_only_user_fields(areal: Areal, objects: None) -> None:
    documents = list(yaml.safe_load_all(areal("get", "-o", "manifest").out))
    assert documents[2] == {
        "apiVersion": "areal.dev/v1alpha1",
        "kind": "Model",
        "metadata": {"name": "qwen", "labels": {"tier": "prod", "size": "8b"}},
        "spec": QWEN,
    }


def test_get_manifest_output_is_valid(areal: Areal, objects: None, tmp_path: Path) -> None:
    file = tmp_path / "again.yaml"
    file.write_text(areal("get", "-o", "manifest").out)
    assert areal("validate", "-f", str(file)).code == 0


def test_show_origin_gives_layer_person_and_file(areal: Areal, objects: None, home: Home) -> None:
    store = ObjectStore(home)
    found = store.get(Ref("Model", "qwen"))
    assert found is not None
    layer = Layer("scale", {"replicas": 3}, None, "bob@desk", 1.0)
    import dataclasses

    store.put(dataclasses.replace(found, layers=replace_layer(found.layers, layer)))
    rows = {row["path"]: row for row in areal("get", "model/qwen", "--show-origin", "-o", "json").items}
    assert rows["spec.replicas"]["origin"] == "scale"
    assert rows["spec.replicas"]["actor"] == "bob@desk"
    assert rows["spec.path"]["source"] == "service.yaml:3"


def test_show_defaults_fills_in_unset_fields(areal: Areal, objects: None) -> None:
    spec = areal("get", "inf/default", "--show-defaults", "--json").json["spec"]
    assert spec["gateway"] == {"host": "127.0.0.1", "port": 8081, "relays": 1}
    origins = {
        row["path"]: row["origin"]
        for row in areal("get", "inf/default", "--show-origin", "--show-defaults", "--json").items
    }
    assert origins["spec.gateway.port"] == "apply"
    assert origins["spec.gateway.host"] == "default"


def test_misspelt_object_is_suggested(areal: Areal, objects: None) -> None:
    result = areal("get", "model/qwne")
    assert result.code == 4
    assert 'did you mean "qwen"' in result.err


def test_damaged_object_is_reported_and_the_others_are_shown(areal: Areal, objects: None, home: Home) -> None:
    path = home.objects / "model" / "llama" / "object.json"
    path.write_bytes(path.read_bytes()[:-10])
    result = areal("get", "models")
    assert result.code == 3
    assert [row[0] for row in result.rows[1:]] == ["qwen"]
    assert "unreadable" in result.err and "areal doctor --fix" in result.err
    assert path.exists()


def test_object_of_newer_version_asks_for_newer_areal(areal: Areal, objects: None, home: Home) -> None:
    folder = home.objects / "model" / "llama"
    files = [folder / "object.json", *(folder / "revisions").glob("*.json")]
    for path in files:
        path.write_bytes(seal({**unseal(path.read_bytes()), "format": 2}))
    for words in (("get", "models"), ("doctor", "--fix"), ("delete", "model/llama", "-y")):
        result = areal(*words)
        assert result.code != 0 and "a newer areal wrote it (format 2, this one knows 1)" in result.out + result.err
        assert "upgrade areal" in result.out + result.err and "--fix" not in result.out + result.err, words
    assert all(unseal(path.read_bytes())["format"] == 2 for path in files)


def test_get_kinds(areal: Areal) -> None:
    assert [row["kind"] for row in areal("get", "kinds", "--json").items] == [
        "InferenceService",
        "Model",
        "AgentService",
        "TrainJob",
    ]


def test_get_processes_without_objects_is_empty(areal: Areal, objects: None) -> None:
    assert areal("get", "processes", "--json").json["items"] == []
    assert areal("get", "processes", "model/none").code == 4


def test_read_commands_write_nothing(areal: Areal, objects: None, home: Home) -> None:
    before = {path: path.stat().st_mtime_ns for path in home.root.rglob("*")}
    for words in (["get"], ["describe", "model/qwen"], ["history", "model/qwen"], ["events"], ["inf", "ps"], ["top"]):
        assert areal(*words).code == 0
    assert {path: path.stat().st_mtime_ns for path in home.root.rglob("*")} == before


def test_read_commands_do_not_create_home(areal: Areal, home: Home) -> None:
    for words in (["get"], ["get", "processes"], ["inf", "ps"], ["events"], ["doctor"]):
        assert areal(*words).code == 0
    assert not home.root.exists()


def test_history_lists_revisions_and_prints_one(areal: Areal, record: Record) -> None:
    record("Model", "qwen", {**QWEN, "replicas": 1})
    record("Model", "qwen", {**QWEN, "replicas": 2})
    rows = areal("history", "model/qwen", "--json").items
    assert [(row["revision"], row["spec"]["replicas"], row["current"]) for row in rows] == [(1, 1, False), (2, 2, True)]
    assert rows[0]["actor"] == "ann@desk" and rows[0]["source"] == "service.yaml:3"
    assert [row["changes"] for row in rows] == [[], [{"path": "spec.replicas", "old": 1, "new": 2}]]
    record("Model", "qwen", {**QWEN, "replicas": 2, "suspend": True}, labels={"tier": "prod"})
    table = areal("history", "model/qwen").out
    assert "spec.replicas: 1 -> 2" in table
    assert 'metadata.labels.tier: (not set) -> "prod"; spec.suspend: (not set) -> true' in table
    assert yaml.safe_load(areal("history", "model/qwen", "--revision", "1").out)["replicas"] == 1
    assert areal("history", "model/qwen", "--revision", "7").code == 4


def test_events_of_one_object_and_of_all(areal: Areal, objects: None, home: Home) -> None:
    log = EventLog(home)
    log.record(Ref("Model", "qwen"), "Normal", "Created", "new object")
    for _ in range(3):
        log.record(Ref("Model", "llama"), "Warning", "Failed", "no GPU")
    assert [row["reason"] for row in areal("events", "model/qwen", "--json").items] == ["Created"]
    assert "no GPU (x3)" in areal("events").out
    assert [row["ref"] for row in areal("events", "--type", "Warning", "-o", "json").items] == ["Model/llama"]
    assert areal("events", "-n", "1", "-o", "name").out == "Model/llama Failed\n"


def test_describe_shows_spec_conditions_and_events(areal: Areal, objects: None, home: Home) -> None:
    EventLog(home).record(Ref("Model", "qwen"), "Warning", "Failed", "no GPU is free")
    text = areal("describe", "model/qwen").out
    for part in ("Name:", "qwen", "spec.engineArgs.max-model-len", "service.yaml:3", "Conditions:", "no GPU is free"):
        assert part in text
    document = areal("describe", "model", "qwen", "--json").json
    assert document["events"][0]["message"] == "no GPU is free"
    assert document["processes"] == []


def test_describe_of_service_lists_its_models(areal: Areal, objects: None) -> None:
    assert {row["ref"] for row in areal("describe", "inf/default", "--json").json["related"]} == {
        "Model/llama",
        "Model/qwen",
    }


def test_inf_verbs_list_services_and_models(areal: Areal, objects: None) -> None:
    services = areal("inf", "ps", "--json").items
    assert [(row["service"], row["models"]) for row in services] == [("default", ["llama", "qwen"])]
    models = areal("inf", "models", "--json").items
    assert [(row["name"], row["replicas"], row["backend"]) for row in models] == [
        ("llama", 1, "embedded"),
        ("qwen", 2, "embedded:d2"),
    ]
    status = areal("inf", "status", "--json")
    assert status.code == 1
    assert status.json["healthy"] is False


def test_stopped_service_cannot_be_chatted_with(areal: Areal, objects: None) -> None:
    result = areal("inf", "chat", "-m", "hello")
    assert result.code == 1
    assert "areal inf run --service default" in result.err


class TestJobsThatHaveEnded:
    """A job that succeeded, with the service and the model that it created, and one that has never begun."""

    @pytest.fixture(autouse=True)
    def jobs(self, record: Record, home: Home) -> None:
        record("TrainJob", "done", {"driver": "m:f"})
        record("TrainJob", "waits", {"driver": "m:f", "suspend": True})
        record("InferenceService", "done", {"gateway": {"port": 8099}}, owner="TrainJob/done")
        record("Model", "mine", {**QWEN, "service": "done"}, owner="InferenceService/done")
        record("Model", "qwen", QWEN)
        created = ObjectStore(home).get(Ref("TrainJob", "done")).created_at  # type: ignore[union-attr]
        spec = RunSpec("r1", "TrainJob/done", "driver", 0, ("x",), inputs={"attempt": 1})
        end_run(home, spec, created + 64.0, "exited 0")

    def test_finished_jobs_are_listed_by_name_or_with_all(self, areal: Areal) -> None:
        listed = areal("get")
        assert [row[0] for row in listed.rows[1:]] == ["model/qwen", "trainjob/waits"]
        assert "not listed: 3 that ended; --all" in listed.err
        assert areal("get", "trainjobs,inf", "-o", "name").out == "trainjob/waits\n"
        assert [item["metadata"]["name"] for item in areal("get", "trainjobs", "--json").json["items"]] == ["waits"]
        whole = ["inferenceservice/done", "model/mine", "model/qwen", "trainjob/done", "trainjob/waits"]
        assert areal("get", "-a", "-o", "name").out.split() == whole
        assert areal("get", "job/done", "model/mine", "-o", "name").out.split() == ["trainjob/done", "model/mine"]
        assert areal("get", "trainjob/done").rows[1][2] == "Succeeded"

    def test_finished_job_processes_are_listed_with_all(self, areal: Areal) -> None:
        assert areal("get", "processes", "-o", "name").out == ""
        assert areal("get", "processes", "--all", "-o", "name").out == "process/r1\n"
        assert areal("get", "processes", "job/done", "-o", "name").out == "process/r1\n"

    def test_finished_job_elapsed_time_is_fixed(self, areal: Areal) -> None:
        assert areal("train", "status", "done", "--json").json["elapsedSeconds"] == pytest.approx(64.0)
        assert "64s" in areal("train", "ps", "-a").out and "64s" in areal("train", "status", "done").out

    def test_model_that_only_finished_jobs_name_is_deleted(self, areal: Areal, record: Record, home: Home) -> None:
        record("InferenceService", "default", {"suspend": True})
        uses = {"driver": "m:f", "rollout": {"service": "default", "model": "qwen"}}
        record("TrainJob", "used", uses)
        record("TrainJob", "uses", {**uses, "suspend": True})
        end_run(
            home, RunSpec("r2", "TrainJob/used", "driver", 0, ("x",), inputs={"attempt": 1}), time.time(), "exited 0"
        )
        refused = areal("delete", "model/qwen", "--yes")
        assert refused.code == 5 and "TrainJob/uses (depends on Model/qwen)" in refused.err
        assert "TrainJob/used" not in refused.err
        assert areal("delete", "job/uses", "--yes").code == 0
        assert areal("delete", "model/qwen", "--yes").code == 0
        assert areal("get", "job/used", "-o", "name").out == "trainjob/used\n"

    def test_finished_jobs_cannot_be_stopped_or_resumed(self, areal: Areal, home: Home) -> None:
        for words in (("train", "stop", "done"), ("suspend", "trainjob/done")):
            stopped = areal(*words)
            assert stopped.code == 0 and "trainjob/done unchanged: it has ended: Succeeded\n" in stopped.out
        for name in ("trainjob/done", "inferenceservice/done"):
            refused = areal("resume", name)
            assert refused.code == 5 and "has ended (Succeeded)" in refused.err
            assert "areal restart TrainJob/done" in refused.err


def test_suspend_and_resume_report_unchanged_state(areal: Areal, record: Record) -> None:
    record("InferenceService", "default", {"suspend": True})
    record("Model", "qwen", {**QWEN, "suspend": True})
    record("TrainJob", "waits", {"driver": "m:f", "suspend": True})
    for target in ("inferenceservice/default", "model/qwen", "trainjob/waits"):
        again = areal("suspend", target)
        assert (again.code, again.out) == (0, f"{target} unchanged: it is suspended already\n")
        restarted = areal("restart", target)
        assert restarted.code == 5 and "is suspended: it has no process" in restarted.err
    assert areal("inf", "stop", "--keep-state").out == "inferenceservice/default unchanged: it is suspended already\n"
    refused = areal("resume", "model/qwen")
    assert refused.code == 5 and "areal resume InferenceService/default" in refused.err
    for words in (("train", "stop", "none"), ("resume", "model/none"), ("inf", "stop", "--service", "none")):
        assert areal(*words).code == 4


# -- processes that ended: listed while their object should have them

SERVICE, AGENTS, JOB = "InferenceService/s", "AgentService/a", "TrainJob/j"
ENDED_RUNS = [
    # owner, its spec, component, replica, whether it is listed
    ("Model/m", {**QWEN, "service": "s", "replicas": 2}, "engine", 1, True),
    ("Model/m", {**QWEN, "service": "s", "replicas": 2}, "data-proxy", 2, False),
    ("Model/m", {**QWEN, "service": "s", "replicas": 0}, "engine", 0, False),
    ("Model/m", {**QWEN, "service": "s", "suspend": True}, "engine", 0, False),
    ("Model/m", {**QWEN, "service": "rests"}, "engine", 0, False),
    ("Model/m", {"service": "s", "external": {"url": "http://x/v1"}}, "engine", 0, False),
    ("Model/m", {"service": "s", "external": {"url": "http://x/v1"}}, "data-proxy", 0, True),
    (SERVICE, {}, "gateway", 0, True),
    (SERVICE, {"suspend": True}, "router", 0, False),
    (AGENTS, {"agent": "a:B", "pairs": 0}, "gateway", 0, True),
    (AGENTS, {"agent": "a:B", "pairs": 1}, "worker", 0, True),
    (AGENTS, {"agent": "a:B", "pairs": 1}, "worker", 1, False),
    (AGENTS, {"agent": "a:B", "suspend": True}, "worker", 0, False),
    (JOB, {"driver": "m:f", "suspend": True}, "driver", 0, True),
]


@pytest.mark.parametrize(("owner", "spec", "component", "replica", "listed"), ENDED_RUNS)
def test_ended_process_is_listed_only_if_expected(
    areal: Areal,
    home: Home,
    record: Callable[..., Any],
    owner: str,
    spec: dict[str, Any],
    component: str,
    replica: int,
    listed: bool,
) -> None:
    record("InferenceService", "rests", {"suspend": True})
    record("InferenceService", "s", {})
    record(*owner.split("/"), spec)
    for uid, at in (("older", 1.0), ("newer", 2.0)):
        end_run(home, RunSpec(uid, owner, component, replica, ("x",)), at)
    assert areal("get", "processes", "-o", "name").out == ("process/newer\n" if listed else "")
    assert len(areal("get", "processes", "--all", "-o", "name").out.split()) == 2
    described = areal("describe", owner, "--json").json["processes"]
    assert [row["uid"] for row in described] == (["newer"] if listed else [])


def test_object_name_given_as_kind_suggests_object(areal: Areal, objects: None) -> None:
    for verb in ("logs", "describe", "history"):
        result = areal(verb, "qwen")
        assert result.code == 4, result.err
        assert result.err == 'error: "qwen" is not a kind\n  hint: write model/qwen\n'
    assert 'unknown kind "qwne"' in areal("logs", "qwne").err
