"""Manifests to resources: values, their positions and determinism; ``--set`` and ``--values`` over the files."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from textwrap import indent
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from areal.resources.backend import engine_arg_faults
from areal.resources.kinds import API_VERSION, Ref
from areal.resources.render import RenderRequest, render
from areal.resources.resource import Rendered
from areal.resources.tree import leaves
from areal.resources.validation import validate
from areal.resources.yaml_io import dump_documents

from .helpers import HEAD, diagnostics, faults, model, rendered

SERVICE = """\
apiVersion: areal.dev/v1alpha1
kind: InferenceService
metadata:
  name: default
  labels: {team: rl}
spec:
  gateway: {port: 9000}
  models:
  - name: qwen
    backend: sglang:d2t2
    path: Qwen/Qwen3-8B
  - name: gpt
    external: {url: https://api.example.com/v1, apiKeyFrom: {env: GPT_KEY}}
"""


def test_resource_keeps_sparse_written_form() -> None:
    (found,) = rendered(
        """\
        apiVersion: areal.dev/v1alpha1
        kind: Model
        metadata:
          name: qwen
          labels: {team: rl}
          annotations: {areal.dev/protect: "true"}
          dependsOn: [trainjob/warm-up, TrainJob/warm-up]
        spec:
          backend: vllm
          path: ./m
          engineArgs: {max-batch-size: 8, ratio: 1e-3}
        """
    ).resources
    assert (found.kind, found.name, found.ref) == ("Model", "qwen", Ref("Model", "qwen"))
    assert found.labels == {"team": "rl"} and found.annotations == {"areal.dev/protect": "true"}
    assert found.depends_on == ("TrainJob/warm-up",)
    assert found.spec == {"backend": "vllm", "path": "./m", "engineArgs": {"max-batch-size": 8, "ratio": 0.001}}
    assert (found.source.file, found.source.line, len(found.source.sha256)) == ("<stdin>", 1, 64)
    assert str(found.pos_of(("engineArgs", "ratio"))) == "<stdin>:11:42"
    assert str(found.pos_of(("no", "such"))) == "<stdin>:9:3"


def test_inline_models_become_owned_models_after_their_service() -> None:
    service, qwen, gpt = rendered(SERVICE).resources
    assert service.spec == {"gateway": {"port": 9000}}
    assert [item.ref for item in (qwen, gpt)] == [Ref("Model", "qwen"), Ref("Model", "gpt")]
    assert qwen.spec == {"backend": "sglang:d2t2", "path": "Qwen/Qwen3-8B", "service": "default"}
    assert qwen.owned_by == Ref("InferenceService", "default") == gpt.owned_by
    assert qwen.labels == {"team": "rl"}
    assert str(qwen.pos_of(("path",))) == "<stdin>:11:11"
    assert qwen.text_of(("path",)) == "spec.models[qwen].path"
    assert validate("Model", qwen.spec) == []


def test_documents_and_lists_keep_file_order() -> None:
    text = f"{model(name='a')}---\n{HEAD}kind: List\nitems:\n- " + model(name="b").replace("\n", "\n  ")
    assert [item.name for item in rendered(text).resources] == ["a", "b"]


def test_spec_may_be_omitted_if_nothing_is_required() -> None:
    (found,) = rendered(f"{HEAD}kind: InferenceService\nmetadata: {{name: default}}\n").resources
    assert found.spec == {}


def test_json_manifest_is_read() -> None:
    manifest = {
        "apiVersion": API_VERSION,
        "kind": "Model",
        "metadata": {"name": "a"},
        "spec": {"backend": "embedded", "path": "m"},
    }
    (found,) = rendered(json.dumps(manifest, indent=1)).resources
    assert found.spec == manifest["spec"]


def test_references_have_positions_and_declared_flags() -> None:
    found = rendered(
        f"""\
{SERVICE}---
apiVersion: areal.dev/v1alpha1
kind: AgentService
metadata: {{name: tau2, dependsOn: [job/warm-up]}}
spec:
  agent: a.b:C
  inference: {{service: default, model: missing}}
"""
    )
    listed = [(str(item.source), str(item.target), item.path, str(item.pos)) for item in found.unresolved]
    assert listed == [
        ("AgentService/tau2", "TrainJob/warm-up", "metadata.dependsOn[0]", "<stdin>:17:36"),
        ("AgentService/tau2", "Model/missing", "spec.inference.model", "<stdin>:20:40"),
    ]
    declared = [str(item.target) for item in found.references if item.declared]
    assert declared == ["InferenceService/default"] * 3


def test_model_without_service_refers_to_default() -> None:
    (reference,) = rendered(model()).references
    assert (str(reference.target), reference.path, reference.declared) == (
        "InferenceService/default",
        "spec.service",
        False,
    )


def test_files_folders_and_stdin_are_read_in_order(tmp_path: Path) -> None:
    (tmp_path / "dir" / "sub").mkdir(parents=True)
    for path, name in (("one.yaml", "one"), ("dir/b.yml", "b"), ("dir/a.yaml", "a"), ("dir/sub/c.yaml", "c")):
        (tmp_path / path).write_text(model(name=name))
    (tmp_path / "dir" / "notes.txt").write_text("not yaml: [")
    (tmp_path / "dir" / ".hidden.yaml").write_text("not yaml: [")
    (tmp_path / "dir" / "empty.yaml").write_text("# nothing yet\n")
    (tmp_path / "dir" / "areal.schema.json").write_text('{"$schema": "of `areal init`"}')
    files = (str(tmp_path / "one.yaml"), str(tmp_path / "dir"), "-", str(tmp_path / "one.yaml"))
    flat = render(RenderRequest(files, stdin=model(name="piped")))
    assert [item.name for item in flat.resources] == ["one", "a", "b", "piped"]
    deep = render(RenderRequest(files, recursive=True, stdin=model(name="piped")))
    assert [item.name for item in deep.resources] == ["one", "a", "b", "c", "piped"]


def test_profiles_choose_documents() -> None:
    text = (
        model(name="always")
        + "---\n"
        + model(name="prod")
        + "profiles: [prod]\n---\n"
        + model(name="dev")
        + "profiles: [dev]\n"
    )
    assert [item.name for item in rendered(text).resources] == ["always"]
    assert [item.name for item in rendered(text, profile="prod").resources] == ["always", "prod"]
    assert faults(text, profile="prd") == [
        '--profile:1:1: unknown profile "prd" (did you mean "prod"?): there are dev, prod'
    ]


def test_profile_without_effect_is_refused() -> None:
    assert faults(model(), profile="prod") == ['--profile:1:1: unknown profile "prod": these manifests have none']
    assert rendered(model(name='"${{ profile }}"'), profile="prod").resources[0].name == "prod"


def test_environment_reads_are_recorded() -> None:
    text = model('{backend: embedded, path: "${{ env.ROOT }}/m", env: {A: "${{ default(env.ABSENT, \'x\') }}"}}')
    found = rendered(text, env={"ROOT": "/models", "OTHER": "y"})
    assert found.env == {"ROOT": "/models"}
    assert found.resources[0].spec["path"] == "/models/m"


def test_rendering_is_idempotent(tmp_path: Path) -> None:
    path = tmp_path / "m.yaml"
    path.write_text(SERVICE)
    first, second = (render(RenderRequest((str(path),))) for _ in range(2))
    assert first == second
    assert _text(first) == _text(second)


def test_long_dependency_chain_is_not_a_cycle() -> None:
    count = 3_000
    parts = [
        f"{HEAD}kind: TrainJob\nmetadata: {{name: j{i}, dependsOn: [job/j{i + 1}]}}\nspec: {{driver: 'a:b'}}\n"
        for i in range(count)
    ]
    found = rendered("---\n".join(parts))
    assert len(found.resources) == count and len(found.unresolved) == 1


def _text(found: Rendered) -> str:
    return json.dumps([[str(item.ref), item.spec, dict(item.labels), asdict(item.source)] for item in found.resources])


_NAMES = st.from_regex(r"[a-z][a-z0-9-]{0,8}[a-z0-9]", fullmatch=True)
_TEXT = st.text(st.characters(codec="utf-8", exclude_categories=("Cs", "Cc")), max_size=12)
_NOT_OURS = _TEXT.filter(lambda key: "${{" not in key and not list(engine_arg_faults("vllm", {key: ""})))
_ARGS = st.dictionaries(_NOT_OURS, _TEXT | st.integers(-9, 9) | st.booleans() | st.floats(0, 1), max_size=3)


@given(st.lists(st.tuples(_NAMES, st.integers(0, 9), _ARGS), unique_by=lambda item: item[0], max_size=4))
@example([("a0", 0, {"<<": "", "yes": "no"})])
def test_dumped_manifests_render_back(items: list[tuple[str, int, dict[str, Any]]]) -> None:
    manifests = [
        {
            "apiVersion": API_VERSION,
            "kind": "Model",
            "metadata": {"name": name},
            "spec": {"backend": "vllm", "path": "m", "replicas": replicas, "engineArgs": args},
        }
        for name, replicas, args in items
    ]
    if not manifests:
        return
    found = rendered(dump_documents(manifests))
    assert [item.spec for item in found.resources] == [manifest["spec"] for manifest in manifests]
    for item in found.resources:
        assert all(item.pos_of(path).line > 1 for path in leaves(item.spec))


def test_generated_resources_share_source_and_keep_item() -> None:
    found = rendered(
        """\
        apiVersion: areal.dev/v1alpha1
        generate: {each: [a, b, c]}
        template:
          kind: Model
          metadata: {name: "${{ item }}"}
          spec: {backend: embedded, path: m}
        """
    ).resources
    assert len({item.source for item in found}) == 1
    assert [(item.name, item.origin) for item in found] == [("a", "each[0]"), ("b", "each[1]"), ("c", "each[2]")]


SERVICE_WITH_MODEL = (
    f"{HEAD}kind: InferenceService\nmetadata: {{name: default}}\n"
    "spec:\n  models:\n  - {name: qwen, backend: embedded, path: m}\n"
)


def _spec(*sets: str, text: str = SERVICE_WITH_MODEL) -> dict[str, Any]:
    return {str(item.ref): item.spec for item in rendered(text, sets=sets).resources}


def test_set_without_name_applies_to_only_resource() -> None:
    assert _spec("spec.gateway.port=9000", "spec.logLevel=debug")["InferenceService/default"] == {
        "gateway": {"port": 9000},
        "logLevel": "debug",
    }


@pytest.mark.parametrize(
    ("setting", "path", "value"),
    [
        ("Model/qwen:spec.replicas=2", "replicas", 2),
        ("mdl/qwen:spec.replicas=0", "replicas", 0),
        ("spec.models[qwen].replicas=3", "replicas", 3),
        ("spec.models[0].replicas=4", "replicas", 4),
        ("Model/qwen:spec.path=", "path", None),
        ("Model/qwen:spec.suspend=true", "suspend", True),
        ("Model/qwen:spec.proxyArgs[session-ttl]=1e-3", "proxyArgs", {"session-ttl": 0.001}),
        ("Model/qwen:spec.proxyArgs={hitl-turns: 2}", "proxyArgs", {"hitl-turns": 2}),
        ("Model/qwen:spec.env.A='1'", "env", {"A": "1"}),
        ("Model/qwen:spec.chatTemplate=a=b:c", "chatTemplate", "a=b:c"),
    ],
)
def test_set_reaches_any_field(setting: str, path: str, value: Any) -> None:
    if value is None:
        assert faults(SERVICE_WITH_MODEL, sets=(setting,)) == ["--set:1:22: spec.models[qwen].path: must not be empty"]
    else:
        assert _spec(setting)["Model/qwen"][path] == value


def test_set_creates_inline_models_and_labels() -> None:
    found = rendered(
        SERVICE_WITH_MODEL,
        sets=("spec.models[new].backend=embedded", "spec.models[new].path=n", "metadata.labels[areal.dev/x]=y"),
    ).resources
    assert [item.name for item in found] == ["default", "qwen", "new"]
    assert found[0].labels == {"areal.dev/x": "y"}
    assert str(found[2].pos_of(("path",))) == "--set:2:23"


def test_set_overrides_overlay_and_earlier_set(tmp_path: Path) -> None:
    (tmp_path / "m.yaml").write_text(model())
    overlay = (
        "kind: Overlay\nbases: [m.yaml]\nnamePrefix: dev-\npatches:\n- {target: {}, merge: {spec: {replicas: 2}}}\n"
    )
    (tmp_path / "areal.overlay.yaml").write_text(HEAD + overlay)
    request = RenderRequest(overlay=str(tmp_path), sets=("Model/dev-qwen:spec.replicas=3", "spec.replicas=4"))
    assert render(request).resources[0].spec["replicas"] == 4


@pytest.mark.parametrize("null", ["null", "~", "Null"])
def test_set_to_null_removes_field(null: str) -> None:
    text = (
        f"{HEAD}kind: Model\nmetadata: {{name: m}}\nspec: {{backend: vllm, path: x, replicas: 2, engineArgs: {{a: 1}}}}"
    )

    def spec(setting: str) -> dict[str, Any]:
        return _spec(setting, text=text)["Model/m"]

    whole = {"backend": "vllm", "path": "x", "replicas": 2, "engineArgs": {"a": 1}}
    assert spec(f"spec.replicas={null}") == {key: value for key, value in whole.items() if key != "replicas"}
    assert spec(f"spec.engineArgs.a={null}") == {**whole, "engineArgs": {}}
    assert spec(f"spec.engineArgs.b={null}") == spec(f"spec.resources.gpus={null}") == whole, "nothing to remove"
    assert spec("spec.engineArgs.a=") == {**whole, "engineArgs": {"a": ""}}


@pytest.mark.parametrize(
    ("setting", "fault"),
    [
        ("spec.gatway.port=null", "--set:1:1: spec.gatway.port: there is nothing to remove, and no such field"),
        ("spec.gateway.prt=~", "--set:1:1: spec.gateway.prt: there is nothing to remove, and no such field"),
        ("x", '--set:1:1: "x" is not PATH=VALUE'),
        ("=1", "--set:1:1: a path begins with spec, metadata or values"),
        ("spce.x=1", '--set:1:1: spce.x: a path begins with spec, metadata or values (did you mean "spec"?)'),
        ("spec..x=1", '--set:1:1: "spec..x" is not a path: unexpected "." at column 5'),
        ("spec.gatway.port=1", '--set:1:1: spec.gatway: unknown field (did you mean "gateway"?)'),
        ("spec.env.A=1", "--set:1:12: spec.env.A: expected text, got 1: quote it inside the quotes of the shell"),
        ("spec.gateway.port=x", '--set:1:19: spec.gateway.port: expected an integer, got "x"'),
        ("spec.gateway.port.x=1", "--set:1:1: spec.gateway.port: expected an integer, got a map"),
        ("spec.models[7].path=x", "--set:1:1: spec.models[7].path: spec.models has no item [7]; it has 1"),
        (
            "Model/qwn:spec.path=x",
            '--set:1:11: spec.path: Model/qwn is not in these manifests (did you mean "Model/qwen"?)',
        ),
        ("Modle/qwen:spec.path=x", '--set:1:1: unknown kind "Modle" (did you mean "model"?)'),
        ("Model/Q:spec.path=x", '--set:1:1: "Q" is not a name'),
        ("spec.path=a\n---\nb", "--set:1:11: several YAML documents where one value belongs"),
        ("metadata.name=x", "--set:1:1: metadata.name: the name identifies the object: it cannot be set"),
        ("spec.x=[1", "--set:1:10: did not find expected"),
        ("spec.x=a: b: c", "--set:1:12: mapping values are not allowed"),
        ("Model/qwen:values.x=1", "--set:1:12: values.x: a value is set as values.NAME=..., for no resource"),
        ("values=1", "--set:1:1: values: a value is set as values.NAME=..., for no resource"),
        ("spec." + ".".join("a" * 100) + "=1", "--set:1:1: the path has more than 64 steps"),
    ],
)
def test_bad_set_is_one_line(setting: str, fault: str) -> None:
    found = faults(SERVICE_WITH_MODEL, sets=(setting,))
    assert len(found) == 1 and found[0].startswith(fault)


def test_ambiguous_set_suggests_naming_resource() -> None:
    (fault,) = diagnostics(
        RenderRequest(("-",), stdin=f"{model(name='a')}---\n{model(name='b')}", sets=("spec.replicas=1",))
    )
    assert fault.message == "there are 2 resources, and no one is named"
    assert fault.hint == "name one: --set Model/a:spec.replicas=..."


def test_values_are_merged_from_files_and_flags_in_order(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("root: /a\nsizes: {small: 1, large: 4}\n")
    (tmp_path / "b.yaml").write_text("root: /b\nsizes: {large: 8}\n")
    text = model('{backend: embedded, path: "${{ values.root }}", replicas: "${{ values.sizes[values.size] }}"}')
    files = (str(tmp_path / "a.yaml"), str(tmp_path / "b.yaml"))
    (found,) = rendered(text, values_files=files, sets=("values.size=large",)).resources
    assert (found.spec["path"], found.spec["replicas"]) == ("/b", 8)
    (found,) = rendered(text, values_files=files, sets=("values.size=small", "values.root=/c")).resources
    assert (found.spec["path"], found.spec["replicas"]) == ("/c", 1)


@pytest.mark.parametrize("over", ["[{name: b}]", "[]"])
def test_later_values_file_replaces_lists(tmp_path: Path, over: str) -> None:
    (tmp_path / "a.yaml").write_text("models: [{name: a, size: 1}, {name: b, size: 2}]\n")
    (tmp_path / "b.yaml").write_text(f"models: {over}\n")
    template = indent(model(name="'${{ item.name }}'"), "  ")
    text = "generate: {each: '${{ values.models }}'}\ntemplate:\n" + template
    files = (str(tmp_path / "a.yaml"), str(tmp_path / "b.yaml"))
    assert [item.name for item in rendered(text, values_files=files).resources] == ["b"] * over.count("b")


READS_VALUES = model(
    '{backend: embedded, path: "${{ values.paths[values.size] }}", replicas: "${{ values.n | default(1) }}"}'
)


@pytest.mark.parametrize(
    ("setting", "fault"),
    [
        (
            "values.sise=x",
            'values.sise: no expression reads it, and no values file has it (did you mean "values.size"?)',
        ),
        ("values.other=1", "values.other: no expression reads it, and no values file has it"),
        ("values.n=2", None),
        ("values.paths.large=/l", None),
    ],
)
def test_set_of_unused_value_is_a_fault(setting: str, fault: str | None) -> None:
    sets = ("values.size=small", "values.paths.small=/s", setting)
    if fault is None:
        assert rendered(READS_VALUES, sets=sets).resources
    else:
        assert faults(READS_VALUES, sets=sets) == [f"--set:3:1: {fault}"]


def test_set_of_value_only_in_values_file_warns(tmp_path: Path) -> None:
    (tmp_path / "v.yaml").write_text("size: small\npaths: {small: /s}\nother: {job: 1}\n")
    notes: list[str] = []
    request = {"values_files": (str(tmp_path / "v.yaml"),), "note": notes.append}
    assert rendered(READS_VALUES, sets=("values.other.job=2", "values.size=small"), **request).resources
    assert notes == ["--set:1:1: values.other.job: no effect: these manifests do not read it"]
    (fault,) = faults(READS_VALUES, sets=("values.other.jbo=2",), **request)
    assert fault.startswith("--set:1:1: values.other.jbo: no expression reads it")


def test_set_of_value_in_untaken_branch_is_accepted() -> None:
    text = model('{backend: embedded, path: "${{ values.a if values.small else values.b }}"}')
    (found,) = rendered(text, sets=("values.small=true", "values.a=/a", "values.b=/b")).resources
    assert found.spec["path"] == "/a"


def test_missing_values_file_is_only_fault_with_suggestion(tmp_path: Path) -> None:
    (tmp_path / "cpu.yaml").write_text("size: small\n")
    for name, near in (("cpuu.yaml", f' (did you mean "{tmp_path}/cpu.yaml"?)'), ("other.yaml", "")):
        file = str(tmp_path / name)
        (fault,) = diagnostics(RenderRequest(("-",), stdin=READS_VALUES, values_files=(file,), env={}))
        assert str(fault) == f"{file}:1:1: cannot be read: No such file or directory{near}"
        assert (fault.hint is None) == bool(near)


def test_faults_of_values_file_and_of_manifests_are_reported_together(tmp_path: Path) -> None:
    (tmp_path / "v.yaml").write_text("size: [1\n")
    fields = 'path: "${{ values.a }}", replicas: -1, pathh: x, env: {A: "${{ valuse.a }}"}'
    text = model(f"{{backend: embedded, {fields}}}")
    many = 'generate: {each: "${{ values.names }}"}\ntemplate: {kind: Model, metadata: {name: x}}\n'
    request = RenderRequest(("-",), stdin=f"{text}---\n{many}", values_files=(str(tmp_path / "v.yaml"),), env={})
    found = [f"{Path(each.pos.file).name} {each.path}" for each in diagnostics(request)]
    assert found == ["<stdin> spec.replicas", "<stdin> spec.pathh", "<stdin> spec.env.A", "v.yaml "]


def test_unset_value_suggests_flags() -> None:
    (fault,) = diagnostics(RenderRequest(("-",), stdin=READS_VALUES, env={}))
    assert fault.message == "values.paths is not set"
    assert fault.hint == "--values FILE or --set values.NAME=VALUE sets values"


def test_text_from_values_is_not_evaluated(tmp_path: Path) -> None:
    (tmp_path / "v.yaml").write_text('root: "${{ env.HOME }}"\n')
    text = model('{backend: embedded, path: "${{ values.root }}"}')
    (found,) = rendered(text, values_files=(str(tmp_path / "v.yaml"),), env={"HOME": "/root"}).resources
    assert found.spec["path"] == "${{ env.HOME }}"


def test_non_mapping_values_file_is_a_fault(tmp_path: Path) -> None:
    path = tmp_path / "v.yaml"
    path.write_text("- a\n")
    (fault,) = diagnostics(RenderRequest(("-",), stdin=model(), values_files=(str(path),)))
    assert str(fault) == f"{path}:1:1: a values file is a map"
