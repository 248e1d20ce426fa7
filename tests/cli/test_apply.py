"""``apply`` and ``diff`` as far as no process is needed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from areal.cli.acting import approver
from areal.cli.invocation import Invocation
from areal.errors import UsageFault
from areal.reconcilers.plan import Plan
from areal.state.home import Home
from areal.state.objects import ObjectStore
from tests.cli.conftest import Areal, Spawner, Typist

MANIFEST = """apiVersion: areal.dev/v1alpha1
kind: InferenceService
metadata: {name: default}
spec: {gateway: {port: 18099}}
---
apiVersion: areal.dev/v1alpha1
kind: Model
metadata: {name: qwen}
spec: {backend: embedded, path: .}
"""


@pytest.fixture
def manifest(tmp_path: Path) -> str:
    path = tmp_path / "service.yaml"
    path.write_text(MANIFEST)
    return str(path)


def test_diff_prints_ops_with_causes_and_exits_1(areal: Areal, manifest: str) -> None:
    result = areal("diff", "-f", manifest)
    assert result.code == 1
    assert "+ Model/qwen create" in result.out
    assert "spec.gateway.port: (not set) -> 18099" in result.out
    assert "start Model/qwen engine/0: no process" in result.out


def test_diff_as_json_is_the_plan(areal: Areal, manifest: str) -> None:
    result = areal("diff", "-f", manifest, "--json")
    assert result.code == 1
    assert {item["ref"]: item["action"] for item in result.json["objects"]} == {
        "InferenceService/default": "create",
        "Model/qwen": "create",
    }
    assert all(op["cause"] for op in result.json["ops"])
    assert areal("diff", "-f", manifest, "-o", "name").out.split() == ["InferenceService/default", "Model/qwen"]


def test_diff_for_github_is_a_folded_comment(areal: Areal, manifest: str) -> None:
    out = areal("diff", "-f", manifest, "--format", "github").out
    assert "| `Model/qwen` | create |" in out
    assert "<details>" in out and "```diff" in out


def test_diff_saves_a_plan_and_a_stale_one_is_refused(areal: Areal, manifest: str, tmp_path: Path, record: Any) -> None:
    plan = tmp_path / "plan.json"
    assert areal("diff", "-f", manifest, "--out", str(plan)).code == 1
    assert json.loads(plan.read_text())["ops"]
    record("Model", "other", {"backend": "embedded", "path": "."})
    result = areal("apply", str(plan))
    assert result.code == 5
    assert "stale" in result.err


def test_plan_file_that_is_none_is_refused(areal: Areal, tmp_path: Path, manifest: str) -> None:
    assert areal("apply", manifest).code == 2
    assert areal("apply", str(tmp_path / "none.json")).code == 2
    assert areal("apply", manifest, "-f", manifest).code == 2


def test_diff_of_bad_manifests_exits_3_and_of_bad_usage_2(areal: Areal, tmp_path: Path, manifest: str) -> None:
    bad = tmp_path / "bad.yaml"
    bad.write_text("kind: Model\n")
    assert areal("diff", "-f", str(bad)).code == 3
    assert areal("diff", "-f", manifest, "--drift").code == 2
    assert areal("diff", "model/qwen").code == 2
    assert areal("diff", "-f", manifest, "--set", "nonsense").code == 2


def test_diff_of_drift_of_nothing_is_empty(areal: Areal) -> None:
    result = areal("diff", "--drift")
    assert (result.code, result.out) == (0, "no difference\n")
    assert areal("diff", "--drift", "model/none").code == 4


def test_operation_on_several_reports_each(areal: Areal, record: Any) -> None:
    record("InferenceService", "default", {"suspend": True})
    result = areal("suspend", "inf/default", "inf/none", "-o", "json")
    assert result.code == 4
    assert {row["ref"]: row["action"] for row in result.json["objects"]} == {
        "InferenceService/default": "unchanged",
        "InferenceService/none": "failed",
    }
    assert "does not exist" in result.err


def test_dry_run_prints_the_plan_and_writes_nothing(areal: Areal, manifest: str, home: Home) -> None:
    result = areal("apply", "-f", manifest, "--dry-run")
    assert result.code == 0
    assert "start Model/qwen engine/0: no process" in result.out
    assert not home.root.exists()


def test_dry_run_on_the_client_looks_at_no_state(areal: Areal, manifest: str) -> None:
    assert areal("apply", "-f", manifest, "--dry-run=client").out.splitlines() == [
        "inferenceservice/default valid",
        "model/qwen valid",
    ]
    documents = yaml.safe_load_all(areal("apply", "-f", manifest, "--dry-run=client", "-o", "yaml").out)
    assert [document["kind"] for document in documents] == ["InferenceService", "Model"]


def test_bare_dry_run_takes_no_word_as_its_value(areal: Areal, manifest: str, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    areal("diff", "-f", manifest, "--out", str(plan))
    result = areal("apply", "--dry-run", "-f", manifest)
    assert result.code == 0


def test_manifest_from_stdin(spawn: Spawner) -> None:
    process = spawn("render", "-f", "-", "-o", "name", stdin=-1)
    out, _ = process.popen.communicate(MANIFEST, timeout=60)
    assert out.split() == ["inferenceservice/default", "model/qwen"]


def test_set_changes_what_is_rendered(areal: Areal, manifest: str) -> None:
    result = areal("render", "-f", manifest, "--set", "model/qwen:spec.replicas=3", "--json")
    assert result.json["items"][1]["spec"]["replicas"] == 3


def test_render_show_origin_names_file_line_and_column(areal: Areal, manifest: str) -> None:
    rows = {row["path"]: row for row in areal("render", "-f", manifest, "--show-origin", "--json").json}
    assert (rows["spec.gateway.port"]["file"], rows["spec.gateway.port"]["line"]) == (manifest, 4)


def test_validate_lists_faults_as_documents_too(areal: Areal, tmp_path: Path) -> None:
    bad = tmp_path / "bad.yaml"
    bad.write_text(MANIFEST.replace("path: .", "pth: .").replace("port: 18099", "port: x"))
    result = areal("validate", "-f", str(bad), "--json")
    assert result.code == 3
    assert next((row["line"], row["valid"]) for row in result.json) == (4, False)
    assert len(result.json) >= 2


@pytest.mark.parametrize("kind", ["inferenceservice", "model", "agentservice", "trainjob"])
def test_init_writes_a_manifest_that_is_valid(areal: Areal, tmp_path: Path, kind: str) -> None:
    file = tmp_path / "new.yaml"
    assert areal("init", kind, "mine", "--out", str(file)).code == 0
    text = file.read_text()
    assert text.startswith("# yaml-language-server: $schema=")
    assert areal("validate", "-f", str(file), "-o", "name").out.lower().split() == [f"{kind}/mine"]
    assert areal("init", kind, "--out", str(file)).code == 5
    assert areal("init", kind, "--out", str(file), "--force").code == 0


def test_schema_explain_and_graph(areal: Areal, manifest: str) -> None:
    assert areal("schema", "model").json["$schema"] == "http://json-schema.org/draft-07/schema#"
    assert "2020-12" in areal("schema", "model", "--draft", "2020-12").json["$schema"]
    assert "8080" in areal("explain", "inferenceservice.spec.gateway").out
    assert areal("explain", "model.spec.nothing").code != 0
    assert "Model/qwen -> InferenceService/default" in areal("graph", "-f", manifest).out
    assert areal("graph", "-f", manifest, "--format", "dot").out.startswith("digraph")
    assert areal("graph", "-f", manifest, "--format", "mermaid", "--json").json["graph"].startswith("flowchart")


def test_destructive_plan_is_refused_off_a_terminal_and_approved_with_yes() -> None:
    plan = Plan(destructive=("Model/qwen is deleted",))
    invocation = Invocation()
    with pytest.raises(UsageFault) as refused:
        approver(invocation, "this apply")(plan)
    assert refused.value.detail == "Model/qwen is deleted"
    assert approver(invocation, "this apply")(Plan()) is True
    invocation.yes = True
    assert approver(invocation, "this apply")(plan) is True


def test_reconcile_of_nothing_does_nothing(areal: Areal) -> None:
    assert areal("reconcile").code == 0
    assert areal("doctor").code == 0


def test_wait_for_deletion_of_what_is_not_there_is_met(areal: Areal) -> None:
    result = areal("wait", "model/none", "--for", "deleted", "-o", "json")
    assert result.code == 0
    assert result.json["objects"][0]["action"] == "met"


@pytest.mark.parametrize("suspended", [True, False])
def test_wait_ends_at_its_deadline(areal: Areal, record: Callable[..., Any], suspended: bool) -> None:
    record("Model", "qwen", {"backend": "embedded", "path": ".", "suspend": suspended})
    result = areal("wait", "model/qwen", "--for", "deleted", "--timeout", "200ms", "-q")
    assert result.code == 7
    result = areal("wait", "model/qwen", "--for", "jsonpath={.status.phase}=Suspended", "--timeout", "200ms", "-q")
    assert result.code == (0 if suspended else 7)


def test_destructive_verb_at_a_terminal_asks_and_takes_no_for_an_answer(home: Home, record: Any) -> None:
    record("Model", "qwen", {"backend": "embedded", "path": ".", "suspend": True})
    for answer, code, left in (("n", 2, ["qwen"]), ("y", 0, [])):
        typist = Typist(home.root, "delete", "model/qwen")
        assert "Model/qwen" in typist.until("[y/N]: ")
        typist.type(f"{answer}\n")
        assert typist.code() == code
        assert [item.name for item in ObjectStore(home).list()] == left


@pytest.mark.parametrize("name", ["x.yaml", "x.yml"])
def test_manifest_without_f_is_a_usage_error_that_says_so(areal: Areal, tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_text("kind: Model\n")
    found = areal("apply", str(path))
    assert found.code == 2 and f"areal apply -f {path}" in found.err
