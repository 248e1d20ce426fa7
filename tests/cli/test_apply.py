"""``apply`` and ``diff`` as far as no process is needed."""

from __future__ import annotations

import dataclasses
import json
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from areal.cli.operate import approver
from areal.cli.options import Invocation
from areal.errors import UsageFault
from areal.reconcilers import converge
from areal.reconcilers.plan import Plan
from areal.resources.kinds import Ref
from areal.state.home import Home
from areal.state.objects import ObjectStore
from areal.state.records import Layer, StoredObject, replace_layer
from tests.cli.conftest import REPOSITORY, Areal, Spawner, Typist

MANIFEST = """apiVersion: areal.dev/v1alpha1
kind: InferenceService
metadata: {name: default}
spec: {gateway: {port: 18099}}
---
apiVersion: areal.dev/v1alpha1
kind: Model
metadata: {name: qwen}
spec: {backend: embedded, path: examples/reverse_digits/model}
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


def test_diff_as_json_prints_plan(areal: Areal, manifest: str) -> None:
    result = areal("diff", "-f", manifest, "--json")
    assert result.code == 1
    assert {item["ref"]: item["action"] for item in result.json["objects"]} == {
        "InferenceService/default": "create",
        "Model/qwen": "create",
    }
    assert all(op["cause"] for op in result.json["ops"])
    assert areal("diff", "-f", manifest, "-o", "name").out.split() == ["InferenceService/default", "Model/qwen"]


def test_diff_for_github_prints_folded_comment(areal: Areal, manifest: str) -> None:
    out = areal("diff", "-f", manifest, "--format", "github").out
    assert "| `Model/qwen` | create |" in out
    assert "<details>" in out and "```diff" in out


def test_diff_saves_plan_and_stale_plan_is_refused(areal: Areal, manifest: str, tmp_path: Path, record: Any) -> None:
    plan = tmp_path / "plan.json"
    assert areal("diff", "-f", manifest, "--out", str(plan)).code == 1
    assert json.loads(plan.read_text())["ops"]
    record("Model", "other", {"backend": "embedded", "path": "."})
    result = areal("apply", str(plan))
    assert result.code == 5
    assert "stale" in result.err


def test_invalid_plan_file_is_refused(areal: Areal, tmp_path: Path, manifest: str) -> None:
    assert areal("apply", manifest).code == 2
    assert areal("apply", str(tmp_path / "none.json")).code == 2
    assert areal("apply", manifest, "-f", manifest).code == 2


def test_diff_exits_3_on_bad_manifest_and_2_on_bad_usage(areal: Areal, tmp_path: Path, manifest: str) -> None:
    bad = tmp_path / "bad.yaml"
    bad.write_text("kind: Model\n")
    assert areal("diff", "-f", str(bad)).code == 3
    assert areal("diff", "-f", manifest, "--drift").code == 2
    assert areal("diff", "model/qwen").code == 2
    assert areal("diff", "-f", manifest, "--set", "nonsense").code == 2


def test_drift_diff_without_objects_is_empty(areal: Areal) -> None:
    result = areal("diff", "--drift")
    assert (result.code, result.out) == (0, "no difference\n")
    assert areal("diff", "--drift", "model/none").code == 4


def test_operation_on_several_objects_reports_each(areal: Areal, record: Any) -> None:
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


def test_client_dry_run_reads_no_state(areal: Areal, manifest: str) -> None:
    assert areal("apply", "-f", manifest, "--dry-run=client").out.splitlines() == [
        "inferenceservice/default valid",
        "model/qwen valid",
    ]
    documents = yaml.safe_load_all(areal("apply", "-f", manifest, "--dry-run=client", "-o", "yaml").out)
    assert [document["kind"] for document in documents] == ["InferenceService", "Model"]


def test_bare_dry_run_takes_no_value(areal: Areal, manifest: str, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    areal("diff", "-f", manifest, "--out", str(plan))
    result = areal("apply", "--dry-run", "-f", manifest)
    assert result.code == 0


def test_manifest_from_stdin(spawn: Spawner) -> None:
    process = spawn("render", "-f", "-", "-o", "name", stdin=-1)
    out, _ = process.popen.communicate(MANIFEST, timeout=60)
    assert out.split() == ["inferenceservice/default", "model/qwen"]


def test_endless_stdin_is_refused_without_reading_it_all(spawn: Spawner) -> None:
    with Path("/dev/zero").open("rb") as endless:
        found = spawn("validate", "-f", "-", stdin=endless.fileno()).finish()
    assert found.code == 3 and found.err.startswith("<stdin>:1:1: larger than 16 MiB"), found.err


def test_stdin_is_utf_8_whatever_the_locale(spawn: Spawner) -> None:
    process = spawn("render", "-f", "-", "-o", "json", stdin=-1, PYTHONIOENCODING="ascii")
    out, _ = process.popen.communicate(MANIFEST.replace("{name: qwen}", "{name: qwen, annotations: {a: \u00e9}}"), 60)
    assert json.loads(out)["items"][1]["metadata"]["annotations"] == {
        "a": "?"
    }  # as ASCII shows it: it is one character


def test_set_changes_rendered_manifest(areal: Areal, manifest: str) -> None:
    result = areal("render", "-f", manifest, "--set", "model/qwen:spec.replicas=3", "--json")
    assert result.json["items"][1]["spec"]["replicas"] == 3


def test_render_show_origin_gives_file_line_and_column(areal: Areal, manifest: str) -> None:
    rows = {row["path"]: row for row in areal("render", "-f", manifest, "--show-origin", "--json").items}
    assert (rows["spec.gateway.port"]["file"], rows["spec.gateway.port"]["line"]) == (manifest, 4)


def test_validate_lists_faults_as_documents(areal: Areal, tmp_path: Path) -> None:
    bad = tmp_path / "bad.yaml"
    bad.write_text(MANIFEST.replace("path: ", "pth: ").replace("port: 18099", "port: x"))
    result = areal("validate", "-f", str(bad), "--json")
    assert result.code == 3
    assert next((row["line"], row["valid"]) for row in result.items) == (4, False)
    assert len(result.items) >= 2


@pytest.mark.parametrize("kind", ["inferenceservice", "model", "agentservice", "trainjob"])
def test_init_writes_valid_manifest(areal: Areal, tmp_path: Path, kind: str) -> None:
    file = tmp_path / "new.yaml"
    assert areal("init", kind, "mine", "--out", str(file)).code == 0
    text = file.read_text()
    assert text.startswith("# yaml-language-server: $schema=areal.schema.json\n")
    assert json.loads((tmp_path / "areal.schema.json").read_text())["title"], "the schema that the modeline names"
    named = areal("validate", "-f", str(file), "-o", "name").out.lower().split()
    assert named[0] == f"{kind}/mine" and named[1:] in ([], ["inferenceservice/default"])
    assert areal("init", kind, "--out", str(file)).code == 5
    assert areal("init", kind, "--out", str(file), "--force").code == 0


@pytest.mark.parametrize("kind", ["inferenceservice", "model", "agentservice", "trainjob"])
def test_init_output_can_be_applied(areal: Areal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    wrote = areal("init", kind, "--out", str(tmp_path / "new" / "m.yaml"))
    assert f"next: cd {tmp_path}/new && areal apply -f m.yaml" in wrote.err
    monkeypatch.chdir(tmp_path / "new")
    planned = areal("diff", "-f", "m.yaml")
    assert planned.code == 1 and "to create" in planned.out, planned.err


def test_init_omits_recorded_service(areal: Areal, tmp_path: Path, record: Callable[..., StoredObject]) -> None:
    record("InferenceService", "default")
    areal("init", "model", "--out", str(tmp_path / "m.yaml"))
    assert "InferenceService\n" not in (tmp_path / "m.yaml").read_text(), "applying it would reset the service"


def test_init_quickstart_writes_everything_readme_applies(
    areal: Areal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert areal("init", "quickstart").code == 2
    wrote = areal("init", "quickstart", str(tmp_path / "q"))
    assert wrote.code == 0
    assert wrote.err == f"wrote {tmp_path}/q; next: cd {tmp_path}/q && areal apply -f quickstart.yaml\n"
    assert areal("init", "quickstart", str(tmp_path / "q")).code == 5
    monkeypatch.chdir(tmp_path / "q")
    for file in Path("examples/reverse_digits").rglob("*.*"):
        assert file.read_bytes() == (REPOSITORY / file).read_bytes(), file
    planned = areal("diff", "-f", "quickstart.yaml")
    assert planned.code == 1 and "3 to create" in planned.out, planned.err


def test_init_quickstart_refuses_to_overwrite_files(areal: Areal, tmp_path: Path) -> None:
    own = tmp_path / "examples" / "reverse_digits" / "reward.py"
    own.parent.mkdir(parents=True)
    own.write_text("mine")
    refused = areal("init", "quickstart", str(tmp_path))
    assert refused.code == 5 and str(own) in refused.err, refused
    assert own.read_text() == "mine" and not (tmp_path / "quickstart.yaml").exists()
    assert areal("init", "quickstart", str(tmp_path), "--force").code == 0 and own.read_text() != "mine"


def test_unwritable_file_is_named(areal: Areal, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    nowhere = str(tmp_path / "file" / "x")
    for words in (("init", "model"), ("generate", "systemd")):
        refused = areal(*words, "--out", nowhere)
        assert refused.code == 1 and f"error: cannot write {nowhere}: " in refused.err, refused


def test_init_of_an_agent_service_writes_its_agent_once(areal: Areal, tmp_path: Path) -> None:
    file, agent = tmp_path / "new.yaml", tmp_path / "my_agent.py"
    wrote = areal("init", "agentservice", "--out", str(file))
    assert f"wrote {file}, {agent}, " in wrote.err and len(agent.read_text().splitlines()) <= 14
    imported = [line for line in agent.read_text().splitlines() if line.startswith(("import", "from"))]
    assert all(line.startswith("from areal.") for line in imported), "apply works without a further package"
    agent.write_text("mine")
    assert areal("init", "agentservice", "--out", str(file), "--force").code == 0
    assert agent.read_text() == "mine"


def test_schema_explain_and_graph(areal: Areal, manifest: str) -> None:
    assert areal("schema", "model").json["$schema"] == "http://json-schema.org/draft-07/schema#"
    assert "2020-12" in areal("schema", "model", "--draft", "2020-12").json["$schema"]
    assert "8080" in areal("explain", "inferenceservice.spec.gateway").out
    assert areal("explain", "model.spec.nothing").code != 0
    assert "Model/qwen -> InferenceService/default" in areal("graph", "-f", manifest).out
    assert areal("graph", "-f", manifest, "--format", "dot").out.startswith("digraph")
    assert areal("graph", "-f", manifest, "--format", "mermaid", "--json").json["graph"].startswith("flowchart")


def test_destructive_plan_needs_yes_without_terminal() -> None:
    plan = Plan(destructive=("Model/qwen is deleted",))
    invocation = Invocation()
    with pytest.raises(UsageFault) as refused:
        approver(invocation, "this apply")(plan)
    assert refused.value.detail == "Model/qwen is deleted"
    assert approver(invocation, "this apply")(Plan()) is True
    invocation.yes = True
    assert approver(invocation, "this apply")(plan) is True


def test_missing_packages_are_refused_before_start(
    areal: Areal, manifest: str, home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = ("transformers",)
    monkeypatch.setattr(converge, "find_spec", lambda name: name if name in installed else None)
    result = areal("apply", "-f", manifest)
    assert result.code == 2 and "not installed: orjson, torch" in result.err, result
    assert "hint: pip install" in result.err and "[embedded]" in result.err
    assert ObjectStore(home).list() == []


def test_reconcile_without_objects_does_nothing(areal: Areal) -> None:
    assert areal("reconcile").code == 0
    assert areal("doctor").code == 0


def test_wait_for_deletion_of_missing_object_succeeds(areal: Areal) -> None:
    result = areal("wait", "model/none", "--for", "deleted", "-o", "json")
    assert result.code == 0
    assert result.json["objects"][0]["action"] == "met"


@pytest.mark.parametrize("suspended", [True, False])
def test_wait_times_out_at_deadline(areal: Areal, record: Callable[..., Any], suspended: bool) -> None:
    record("Model", "qwen", {"backend": "embedded", "path": ".", "suspend": suspended})
    result = areal("wait", "model/qwen", "--for", "deleted", "--timeout", "200ms", "-q")
    assert result.code == 7 and f"Model/qwen is {'Suspended' if suspended else 'Missing'}" in result.err, result
    result = areal("wait", "model/qwen", "--for", "jsonpath={.status.phase}=Suspended", "--timeout", "200ms", "-q")
    assert result.code == (0 if suspended else 7)
    result = areal("wait", "model/qwen", "--for", "jsonpath={.status.ready}=2", "--timeout", "200ms", "-q")
    assert result.code == 7 and "Model/qwen: {.status.ready} is 0/" in result.err
    result = areal("wait", "model/qwen", "--for", "jsonpath={.status.redy}=2", "--timeout", "200ms", "-q")
    assert "Model/qwen: {.status.redy} is empty" in result.err


@pytest.mark.parametrize("condition", ["ready", "condition=Ready", "ready,completed"])
def test_wait_for_object_at_rest_fails_at_once(areal: Areal, record: Callable[..., Any], condition: str) -> None:
    qwen = {"backend": "embedded", "path": "."}
    record("InferenceService", "off", {"suspend": True})
    record("Model", "itself", {**qwen, "suspend": True})
    record("Model", "hosted", {**qwen, "service": "off"})
    record("Model", "empty", {**qwen, "replicas": 0})
    record("TrainJob", "stopped", {"driver": "m:f", "suspend": True})
    for ref, why, hint in (
        ("Model/itself", "is suspended", "areal resume Model/itself"),
        ("Model/hosted", "is suspended", "areal resume InferenceService/off"),
        ("Model/empty", "is suspended", "areal scale Model/empty --replicas N"),
        ("TrainJob/stopped", "was stopped", "areal resume TrainJob/stopped"),
    ):
        result = areal("wait", ref, "--for", condition, "--timeout", "5m", "-q")
        assert result.code == 8 and f"{ref} {why}" in result.err and hint in result.err, result
    result = areal("wait", "job/stopped", "--for", "completed", "--timeout", "5m", "-q")
    assert (result.code, result.err) == (8, areal("train", "wait", "stopped", "--timeout", "5m", "-q").err)


def test_engine_python_that_does_not_exist_is_refused_before_anything_is_recorded(
    areal: Areal, tmp_path: Path, home: Home
) -> None:
    model = "{backend: vllm, path: org/name, resources: {gpus: 0}, env: {AREAL_ENGINE_PYTHON: /nowhere/python}}"
    (tmp_path / "m.yaml").write_text(MANIFEST.rpartition("spec:")[0] + f"spec: {model}\n")
    result = areal("apply", "-f", str(tmp_path / "m.yaml"))
    assert result.code == 3
    assert "Model/qwen: spec.env.AREAL_ENGINE_PYTHON: there is no program '/nowhere/python'" in result.err
    assert areal("get", "-o", "name").out == ""


def test_manifests_copied_to_another_folder_replace_nothing(areal: Areal, tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    (here / "model").mkdir(parents=True)
    for name in ("config.json", "tokenizer.json", "weights"):
        (here / "model" / name).write_text("{}")
    text = MANIFEST.replace("examples/reverse_digits/model", "./model").replace("18099}", "18099}, suspend: true")
    (here / "service.yaml").write_text(text)
    assert areal("apply", "-f", str(here / "service.yaml")).code == 0
    shutil.copytree(here, there)

    same = areal("diff", "-f", str(there / "service.yaml"))
    assert same.code == 0 and same.out.startswith("2 unchanged\n"), same
    assert "Model/qwen: its files are the same as before" in same.err and "here/model stays in use" in same.err

    (there / "model" / "weights").write_text("[]")
    assert f"{here}/model' -> '{there}/model'" in areal("diff", "-f", str(there / "service.yaml")).out
    (there / "model" / "weights").write_text("{}")
    (here / "service.yaml").write_text(text.replace("./model", f"{there}/model"))
    assert f"{here}/model' -> '{there}/model'" in areal("diff", "-f", str(here / "service.yaml")).out, "as asked for"
    here.rename(tmp_path / "gone")
    assert f"{here}/model' -> '{there}/model'" in areal("diff", "-f", str(there / "service.yaml")).out


def test_destructive_verb_asks_on_terminal(home: Home, record: Any) -> None:
    record("Model", "qwen", {"backend": "embedded", "path": ".", "suspend": True})
    for answer, code, left in (("n", 2, ["qwen"]), ("y", 0, [])):
        typist = Typist(home.root, "delete", "model/qwen")
        assert "Model/qwen" in typist.until("[y/N]: ")
        typist.type(f"{answer}\n")
        assert typist.code() == code
        assert [item.name for item in ObjectStore(home).list()] == left


def test_delete_all_takes_one_kind_or_every_object(areal: Areal, home: Home, record: Any) -> None:
    def names() -> list[str]:
        return [item.name for item in ObjectStore(home).list()]

    record("InferenceService", "default", {"suspend": True})
    for name in ("qwen", "glm"):
        record("Model", name, {"service": "default", "backend": "embedded", "path": ".", "suspend": True})
    for words in (
        ["model/qwen", "--all"],
        ["models", "qwen", "--all"],
        ["models", "--all", "-l", "tier=prod"],
        ["--all", "-f", "x.yaml"],
        ["all"],
    ):
        assert areal("delete", *words, "--yes").code == 2
    assert areal("delete", "models", "--all").code == 2, "destructive, and there is no terminal to ask on"
    assert areal("delete", "inferenceservices", "--all", "--yes").code == 5, "models depend on it"
    assert sorted(names()) == ["default", "glm", "qwen"]
    assert areal("delete", "models", "--all", "--yes").code == 0
    assert names() == ["default"]
    record("Model", "qwen", {"service": "default", "backend": "embedded", "path": ".", "suspend": True})
    assert areal("delete", "--all", "--yes").code == 0
    assert names() == []
    assert "nothing to delete" in areal("delete", "all", "--all", "--yes").err


@pytest.mark.parametrize("name", ["x.yaml", "x.yml"])
def test_manifest_without_f_flag_error_suggests_it(areal: Areal, tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_text("kind: Model\n")
    found = areal("apply", str(path))
    assert found.code == 2 and f"areal apply -f {path}" in found.err
    for word in (str(tmp_path), str(tmp_path / "absent.yaml")):
        found = areal("apply", word)
        assert found.code == 2 and f"areal apply -f {word}" in found.err


# -- diff

Record = Callable[..., Any]


def document(kind: str, name: str, spec: dict[str, Any], **metadata: Any) -> dict[str, Any]:
    about = {"name": name, **metadata}
    return {"apiVersion": "areal.dev/v1alpha1", "kind": kind, "metadata": about, "spec": spec}


@pytest.fixture
def manifests_of(tmp_path: Path) -> Callable[..., str]:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "tokenizer.json").write_text("{}")

    def write(*documents: dict[str, Any]) -> str:
        file = tmp_path / "manifest.yaml"
        file.write_text(yaml.safe_dump_all(documents))
        return str(file)

    return write


@pytest.fixture
def model(tmp_path: Path) -> dict[str, Any]:
    return {"backend": "embedded", "path": str(tmp_path / "m"), "suspend": True}


@pytest.fixture
def conflicting(record: Record, home: Home, model: dict[str, Any]) -> None:
    """A model of which ``areal scale`` holds the replicas."""
    record("InferenceService", "default", {"suspend": True})
    record("Model", "m1", model)
    store = ObjectStore(home)
    found = store.get(Ref("Model", "m1"))
    assert found is not None
    layer = Layer("scale", {"replicas": 3}, None, "bob@desk", 1.0)
    store.put(dataclasses.replace(found, layers=replace_layer(found.layers, layer)))


def test_conflict_exits_5_and_rest_of_diff_is_shown(
    areal: Areal, conflicting: None, manifests_of: Callable[..., str], model: dict[str, Any]
) -> None:
    file = manifests_of(document("Model", "m1", {**model, "replicas": 2}), document("Model", "m2", model))
    shown = areal("diff", "-f", file)
    assert shown.code == 5 and "bob@desk" in shown.err and "--force-conflicts" in shown.err
    assert shown.out.startswith("1 to create, 1 blocked") and "+ Model/m2 create" in shown.out
    found = areal("diff", "-f", file, "-o", "json")
    assert found.code == 5
    actions = {item["ref"]: item for item in json.loads(found.out)["objects"]}
    assert actions["Model/m2"]["action"] == "create"
    assert actions["Model/m1"]["action"] == "blocked" and "replicas" in actions["Model/m1"]["refusal"]["message"]
    assert areal("apply", "-f", file, "--yes").code == 5  # nothing of it is applied


GOOD = "apiVersion: areal.dev/v1alpha1\nkind: InferenceService\nmetadata: {name: good}\nspec: {suspend: true}\n"
_BAD = "apiVersion: areal.dev/v1alpha1\nkind: InferenceService\nmetadata: {name: bad}\nspec: "
_MODEL = "apiVersion: areal.dev/v1alpha1\nkind: Model\nmetadata: {name: bad}\nspec: {service: good, "
AGENT = (
    "apiVersion: areal.dev/v1alpha1\nkind: AgentService\nmetadata: {name: a}\n"
    "spec: {agent: 'a:B', inference: {service: good, model: m}}\n"
)


@pytest.mark.parametrize(
    ("text", "ref", "words"),
    [
        (_BAD + "{gateway: {port: -1}}\n", "InferenceService/bad", "spec.gateway.port"),
        (_BAD + "{gatway: {}}\n", "InferenceService/bad", 'did you mean "gateway"'),
        (_BAD + "{suspend: true, suspend: true}\n", "InferenceService/bad", "duplicate key"),
        (_BAD + "{a: [1, 2}\n", None, "did not find expected"),
        (_BAD + "{models: [{name: m, backend: nothing}]}\n", "InferenceService/bad", "nothing"),
        ("kind: Model\nmetadata: {name: 5}\n", None, "expected text"),
        ("kind: Model\nmetadata: {name: A_b}\n", None, "is not a name"),
        ("- 3\n", None, "a resource is a map"),
        ("apiVersion: areal.dev/v1alpha1\nkind: Nothing\nmetadata: {name: x}\n", None, "unknown kind"),
        (_BAD + "{auth: {adminKeyFrom: {file: /no/such/key}}}\n", "InferenceService/bad", "does not exist"),
        (_BAD + "{auth: {adminKeyFrom: {env: NO_SUCH_KEY}}}\n", "InferenceService/bad", "is not set here"),
        (
            _MODEL + "external: {url: 'http://127.0.0.1:9', apiKeyFrom: {env: NO_SUCH_KEY}}}\n",
            "Model/bad",
            "is not set",
        ),
        (_MODEL + "external: {url: 'http://127.0.0.1:9', apiKeyFrom: {file: /no/key}}}\n", "Model/bad", "be read"),
        (
            _MODEL + "backend: vllm, path: examples/reverse_digits/model, envFrom: {K: {env: NO_SUCH_KEY}}}\n",
            "Model/bad",
            "spec.envFrom.K.env",
        ),
        (_BAD + "{scheduler: {type: nomad}}\n", "InferenceService/bad", '"nomad" is not one of local, ray, slurm'),
        (AGENT, "AgentService/a", "there is no module a"),
        (AGENT.replace("good, model: m", "absent, model: m"), "AgentService/a", "does not exist"),
    ],
)
@pytest.mark.parametrize("first", [True, False])
def test_invalid_manifest_exits_3_and_rest_is_shown(
    areal: Areal, tmp_path: Path, text: str, ref: str | None, words: str, first: bool
) -> None:
    file = tmp_path / "m.yaml"
    file.write_text("---\n".join([text, GOOD] if first else [GOOD, text]))
    if "[1, 2}" in text and first:
        pytest.skip("nothing after a syntax error is read")
    if "model: m" in text and "absent" not in text:
        model = {"backend": "embedded", "path": str(tmp_path), "service": "good", "suspend": True}
        file.write_text(file.read_text() + "---\n" + yaml.safe_dump(document("Model", "m", model)))
    shown = areal("diff", "-f", str(file))
    assert shown.code == 3 and "+ InferenceService/good create" in shown.out, shown
    assert words in shown.err and shown.err.count(words) == (2 if "absent" in text else 1), shown.err
    found = areal("diff", "-f", str(file), "-o", "json")
    assert found.code == 3
    objects = {item["ref"]: item for item in json.loads(found.out)["objects"]}
    assert objects["InferenceService/good"]["action"] == "create"
    blocked = {ref for ref, item in objects.items() if item["action"] == "blocked"}
    assert blocked - {"Model/m"} == ({ref} if ref else set())
    assert all(objects[each]["refusal"]["reason"] == "invalid" for each in blocked)
    assert areal("apply", "-f", str(file), "--yes").code == 3
    assert areal("apply", "-f", str(file), "--dry-run").code == 3
    saved = areal("diff", "-f", str(file), "--out", str(tmp_path / "plan.json"))
    assert saved.code == 3 and not (tmp_path / "plan.json").exists()


def test_dependents_of_invalid_object_are_blocked(areal: Areal, manifests_of: Any, model: dict[str, Any]) -> None:
    bad = document("InferenceService", "bad", {"gateway": {"port": -1}})
    chain = [
        document("Model", "m1", {**model, "service": "bad"}),
        document("Model", "m2", model, dependsOn=["Model/m1"]),
    ]
    file = manifests_of(bad, *chain, document("InferenceService", "default", {"suspend": True}))
    shown = areal("diff", "-f", file)
    assert shown.code == 3 and shown.out.startswith("1 to create, 3 blocked"), shown
    assert "Model/m2 needs Model/m1, which cannot be applied" in shown.err
    assert "Model/m1 needs InferenceService/bad, which cannot be applied" in shown.err


def test_apply_reports_same_faults_as_diff(areal: Areal, tmp_path: Path) -> None:
    file = tmp_path / "m.yaml"
    lost = _MODEL.replace("service: good", "service: absent") + "external: {url: 'http://127.0.0.1:9'}}\n"
    secret = (
        _MODEL.replace("name: bad", "name: secret")
        + "backend: vllm, path: examples/reverse_digits/model, envFrom: {K: {env: NO_SUCH_KEY}}}\n"
    )
    file.write_text("---\n".join([GOOD, lost, secret]))
    for verb in (("diff",), ("apply", "--yes")):
        result = areal(*verb, "-f", str(file))
        assert result.code == 3, result
        assert "InferenceService/absent does not exist" in result.err and "spec.envFrom.K.env" in result.err


def test_all_mistakes_of_a_model_are_reported_at_once(areal: Areal, tmp_path: Path) -> None:
    file = tmp_path / "m.yaml"
    fields = {
        "path": "/no/folder",
        "tokenizerPath": "/no/tokenizer",
        "chatTemplate": "/no/template.jinja",
        "lora": "{a: /no/adapter}",
        "toolCallParser": "lfm3",
        "engineArgs": "{devise: cpu}",
        "replicas": "-1",
        "logLevel": "debug",
    }
    head = _MODEL.replace("{service: good, ", "\n  backend: embedded\n").replace("name: bad", "name: m")
    file.write_text(head + "".join(f"  {name}: {value}\n" for name, value in fields.items()))
    for verb in (("diff",), ("apply", "--yes")):
        result = areal(*verb, "-f", str(file))
        assert result.code == 3, result
        for line, name in enumerate(fields, 6):
            assert f"m.yaml:{line}:" in result.err and f"spec.{name}" in result.err, (name, result.err)
    page = areal("diff", "-f", str(file), "--format", "github").out
    (row,) = (line for line in page.splitlines() if line.startswith("| `Model/m` |"))
    assert row.endswith(" |") and "spec.path" in row and "spec.lora" in row  # a cell has no line breaks
    assert page.count("\n\n> [!CAUTION]\n") == page.count("[!CAUTION]") > 1  # adjacent quotes would be one


def test_consequential_fault_is_not_reported(areal: Areal, tmp_path: Path) -> None:
    file = tmp_path / "m.yaml"
    file.write_text(_MODEL + "backend: sglang:d1, path: x/y, engineUrl: 5, engineApiKeyFrom: {env: HOME}}\n")
    result = areal("diff", "-f", str(file))
    assert result.code == 3 and "expected text, got 5" in result.err and "there is none" not in result.err


def test_worst_status_of_several_is_returned(
    areal: Areal, conflicting: None, manifests_of: Callable[..., str], model: dict[str, Any]
) -> None:
    both = [document("Model", "m1", {**model, "replicas": 2}), document("InferenceService", "bad", {"gatway": 1})]
    shown = areal("diff", "-f", manifests_of(*both, document("Model", "m2", model)))
    assert shown.code == 3 and "bob@desk" in shown.err and "gatway" in shown.err
    assert shown.out.startswith("1 to create, 2 blocked")
    github = areal("diff", "-f", manifests_of(*both), "--format", "github")
    assert github.code == 3 and "[!CAUTION]" in github.out


def test_insufficient_capacity_exits_10_and_rest_is_shown(
    areal: Areal, manifests_of: Callable[..., str], model: dict[str, Any]
) -> None:
    model = {**model, "suspend": False}
    large = [document("Model", name, {**model, "resources": {"gpus": 9999}}) for name in ("m2", "m3")]
    needy = document("Model", "m4", model, dependsOn=["Model/m3"])
    file = manifests_of(document("InferenceService", "default", {}), document("Model", "m1", model), *large, needy)
    shown = areal("diff", "-f", file)
    assert shown.code == 10 and shown.out.startswith("2 to create, 3 blocked"), shown
    assert "start Model/m1 engine/0" in shown.out and "Model/m3 needs 9999 GPUs for 1 new replica" in shown.err
    found = areal("diff", "-f", file, "-o", "json")
    reasons = {item["ref"]: item["refusal"]["reason"] for item in json.loads(found.out)["objects"] if "refusal" in item}
    assert found.code == 10 and reasons == dict.fromkeys(("Model/m2", "Model/m3", "Model/m4"), "capacity")
    assert areal("apply", "-f", file, "--yes").code == 10


def test_job_with_missing_driver_is_invalid_manifest(areal: Areal, tmp_path: Path) -> None:
    file = tmp_path / "m.yaml"
    file.write_text(
        "apiVersion: areal.dev/v1alpha1\nkind: TrainJob\nmetadata: {name: j}\nspec: {driver: 'no.such:f'}\n"
    )
    for verb in ("diff", "apply"):
        result = areal(verb, "-f", str(file))
        assert result.code == 3 and f"{file}:3:18: TrainJob/j: driver 'no.such:f'" in result.err, result


def test_invalid_manifest_disables_prune(areal: Areal, record: Record, tmp_path: Path) -> None:
    for name in ("bad", "gone"):
        record("InferenceService", name, {"suspend": True}, set_name="prod")
    file = tmp_path / "m.yaml"
    file.write_text(GOOD + "---\n" + _BAD + "{suspend: 3}\n")
    shown = areal("diff", "-f", str(file), "--prune", "--set-name", "prod")
    assert shown.code == 3 and "to delete" not in shown.out and "not known while manifests have faults" in shown.err


def test_unreadable_file_does_not_hide_others(areal: Areal, tmp_path: Path) -> None:
    (tmp_path / "m.yaml").write_text(GOOD)
    shown = areal("diff", "-f", str(tmp_path / "none.yaml"), "-f", str(tmp_path / "m.yaml"))
    assert shown.code == 3 and "+ InferenceService/good create" in shown.out and "cannot be read" in shown.err


def test_flag_fault_fails_everything(areal: Areal, tmp_path: Path) -> None:
    (tmp_path / "m.yaml").write_text(GOOD)
    shown = areal("diff", "-f", str(tmp_path / "m.yaml"), "--set", "spec.gatway.port=1")
    assert shown.code == 3 and not shown.out


def test_change_of_metadata_is_shown(
    areal: Areal, record: Record, manifests_of: Callable[..., str], model: Any
) -> None:
    record("InferenceService", "default", {"suspend": True})
    record("Model", "m1", model, labels={"tier": "dev"})
    about: dict[str, Any] = {"labels": {"tier": "prod"}, "annotations": {"why": "x"}}
    file = manifests_of(document("Model", "m1", model, **about, dependsOn=["InferenceService/default"]))
    shown = areal("diff", "-f", file)
    assert shown.code == 1 and shown.out.startswith("1 to change")
    for line in ("metadata.labels.tier: 'dev' -> 'prod'", "metadata.annotations.why", "metadata.dependsOn"):
        assert line in shown.out
    removed = areal("diff", "-f", manifests_of(document("Model", "m1", model)), "-o", "json")
    (change,) = next(item for item in json.loads(removed.out)["objects"] if item["ref"] == "Model/m1")["changes"]
    assert change["path"] == "metadata.labels.tier" and change["old"] == "dev"


def test_set_name_typo_does_not_move_object(
    areal: Areal, record: Record, manifests_of: Callable[..., str], model: dict[str, Any]
) -> None:
    record("InferenceService", "default", {"suspend": True})
    record("Model", "m1", model, set_name="prod")
    file = manifests_of(document("Model", "m1", model))
    for verb, flags in (("diff", ()), ("apply", ("--yes",))):
        refused = areal(verb, "-f", file, "--set-name", "prdo", *flags)
        assert refused.code == 5 and "'prod'" in refused.err, refused
    moved = areal("diff", "-f", file, "--set-name", "prdo", "--force-conflicts")
    assert moved.code == 1 and "metadata.set: 'prod' -> 'prdo'" in moved.out


def test_diff_exits_0_without_and_1_with_difference(
    areal: Areal, record: Record, manifests_of: Callable[..., str], model: dict[str, Any]
) -> None:
    record("InferenceService", "default", {"suspend": True})
    record("Model", "m1", model)
    assert areal("diff", "-f", manifests_of(document("Model", "m1", model))).code == 0
    rolled = areal("diff", "-f", manifests_of(document("Model", "m1", {**model, "env": {"A": "b"}})))
    assert rolled.code == 1 and rolled.out.startswith("1 to roll")
    assert "  1. record Model/m1: spec.env.A changed" in rolled.out


@pytest.mark.parametrize("held", [True, False], ids=["by another process", "by another object of the plan"])
def test_port_that_is_taken_is_no_capacity_for_diff_as_for_apply(areal: Areal, tmp_path: Path, held: bool) -> None:
    service = MANIFEST.partition("---")[0]
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        if held:
            listener.listen()
        port = listener.getsockname()[1] if held else 18099
        file = tmp_path / "services.yaml"
        names = ["b"] if held else ["a", "b"]
        file.write_text("---\n".join(service.replace("default", name).replace("18099", str(port)) for name in names))

        shown, applied = areal("diff", "-f", str(file)), areal("apply", "-f", str(file))
        elsewhere = areal("diff", "-f", str(file), "--assume-capacity")

    assert (shown.code, applied.code, elsewhere.code) == (10, 10, 1)
    assert "? InferenceService/b blocked" in shown.out and ("+ InferenceService/a create" in shown.out) is not held
    assert f"error: InferenceService/b: port {port} is " in shown.err and shown.err in applied.err


def test_secret_whose_file_is_gone_is_no_change(areal: Areal, record: Record, tmp_path: Path) -> None:
    record("InferenceService", "default", {"suspend": True})
    text = (
        "apiVersion: areal.dev/v1alpha1\nkind: Model\nmetadata: {name: m}\nspec:\n  suspend: true\n"
        "  external: {url: https://example.org/v1, apiKeyFrom: {file: key}}\n"
    )
    file, key = tmp_path / "m.yaml", tmp_path / "key"
    file.write_text(text)
    key.write_text("sesame")
    assert areal("apply", "-f", str(file)).code == 0
    key.unlink()
    assert areal("diff", "-f", str(file)).code == 0
    file.write_text(text.replace("file: key", "file: other"))
    changed = areal("diff", "-f", str(file))
    assert changed.code == 1 and f"'{key}' -> 'other'" in changed.out
