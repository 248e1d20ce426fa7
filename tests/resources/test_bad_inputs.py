"""What a user gets wrong: each mistake alone gives one line with the place and what to write instead."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from areal.resources.nodes import ManifestError
from areal.resources.render import RenderRequest, render
from areal.resources.yaml_io import MAX_FILE_BYTES

from .helpers import HEAD, diagnostics, faults, model

NAME = 'is not a name: lower case letters, digits and "-", which is neither first nor last'
DIMENSION = 'unknown dimension "q": d data, t tensor, p pipeline, c context, e expert'
MODEL = HEAD + "kind: Model\nmetadata: {name: qwen}\nspec:\n  backend: embedded\n  path: ./m\n"


@pytest.mark.parametrize(
    ("extra", "fault"),
    [
        ("  replicaz: 2\n", '7:3: spec.replicaz: unknown field (did you mean "replicas"?)'),
        ("  engine_args: {}\n", '7:3: spec.engine_args: unknown field (did you mean "engineArgs"?)'),
        ("  zzz: 2\n", "7:3: spec.zzz: unknown field"),
        (
            "  probes:\n    liveness: {period: 1}\n",
            '8:16: spec.probes.liveness.period: unknown field (did you mean "periodSeconds"?)',
        ),
        ("  replicas: two\n", '7:13: spec.replicas: expected an integer, got "two"'),
        ("  replicas: '2'\n", '7:13: spec.replicas: expected an integer, got "2": remove the quotes'),
        ("  replicas: 2e0\n", "7:13: spec.replicas: expected an integer, got 2.0: write 2"),
        ("  suspend: 'true'\n", '7:12: spec.suspend: expected true or false, got "true": remove the quotes'),
        (
            "  resources: {cpus: '1e-3'}\n",
            '7:21: spec.resources.cpus: expected a number, got "1e-3": remove the quotes',
        ),
        ("  suspend: yes\n", '7:12: spec.suspend: expected true or false, got "yes": write true'),
        ("  suspend: Off\n", '7:12: spec.suspend: expected true or false, got "Off": write false'),
        ("  env: {A: 1}\n", "7:12: spec.env.A: expected text, got 1: quote it"),
        ("  env: {A: on}\n", None),
        ("  env: {A.b-c: x}\n", None),
        ('  env: {"A=B": x}\n', '7:9: spec.env[A=B]: "A=B" is not a valid name of an environment variable'),
        ("  envFrom: {'': {env: A}}\n", '7:13: spec.envFrom[]: "" is not a valid name of an environment variable'),
        ('  env: {A: "x\\0y"}\n', "7:12: the character U+0000 is not allowed in text"),
        ("  resources: 3\n", "7:14: spec.resources: expected a map, got 3"),
        ("  resources:\n  - gpus: 1\n", "7:3: spec.resources: expected a map, got a list"),
        ("  path: ./again\n", '7:3: duplicate key "path": first at line 6, column 3'),
        (
            "  service: ../x\n",
            '7:12: spec.service: "../x" ' + NAME,
        ),
        ("statuss: {}\n", "7:1: statuss: unknown field"),
        ("status: {}\n", "7:1: status: status is written by areal: remove it"),
        ("profiles: prod\n", "7:1: profiles: expected a list of profile names"),
    ],
)
def test_one_mistake_gives_one_line(extra: str, fault: str | None) -> None:
    if fault is None:
        render(RenderRequest(("-",), stdin=MODEL + extra))
    else:
        assert faults(MODEL + extra) == [fault]


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("kind: Model", "kind: Modell", '2:7: kind: unknown kind "Modell" (did you mean "Model"?)'),
        ("kind: Model", "kind: model", '2:7: kind: unknown kind "model" (did you mean "Model"?)'),
        ("kind: Model", "kind: [Model]", "2:7: kind: expected text, got a list"),
        ("kind: Model\n", "", '1:1: required field "kind" is missing'),
        (HEAD, "", '1:1: required field "apiVersion" is missing: write areal.dev/v1alpha1'),
        ("v1alpha1", "v9", '1:13: apiVersion: unknown version "areal.dev/v9": this areal reads areal.dev/v1alpha1'),
        ("{name: qwen}", "{}", '3:1: metadata: required field "name" is missing'),
        ("metadata: {name: qwen}\n", "", '1:1: required field "metadata" is missing: it holds the name'),
        (
            "name: qwen",
            "name: ../qwen",
            '3:18: metadata.name: "../qwen" ' + NAME,
        ),
        (
            "name: qwen",
            "name: Qwen3",
            '3:18: metadata.name: "Qwen3" ' + NAME,
        ),
        ("name: qwen", "name: 8", "3:18: metadata.name: expected text, got 8: quote it"),
        (
            "name: qwen",
            "name: q, labels: {a: b c}",
            '3:33: metadata.labels.a: "b c" is no label value: '
            'at most 63 letters, digits and "-_.", no sign first or last',
        ),
        (
            "name: qwen",
            "name: q, dependsOn: [qwen]",
            '3:33: metadata.dependsOn[0]: "qwen" is not a reference: write KIND/NAME, for example model/qwen',
        ),
        (
            "name: qwen",
            "name: q, dependsOn: [modle/q]",
            '3:33: metadata.dependsOn[0]: unknown kind "modle" (did you mean "model"?)',
        ),
        (
            "embedded",
            "sglang:d2q2",
            "5:21: spec.backend: " + DIMENSION,
        ),
        (
            "embedded",
            '"sglang:d2q2"',
            "5:22: spec.backend: " + DIMENSION,
        ),
        ("spec:\n  backend: embedded\n  path: ./m\n", "spec: 3\n", "4:7: spec: expected a map, got 3"),
        (
            "  backend: embedded\n",
            "",
            '4:1: spec: required field "backend" is missing (or "external", for a model behind a URL)',
        ),
        ("  backend: embedded\n", "\tbackend: embedded\n", "5:1: a tab cannot indent YAML: use spaces"),
        ("backend: embedded", "backend: *engine", "5:12: unknown alias *engine: no &engine before it in this document"),
    ],
)
def test_one_edited_mistake_gives_one_line(old: str, new: str, fault: str) -> None:
    assert faults(MODEL.replace(old, new, 1)) == [fault]


def test_all_mistakes_of_all_files_are_reported_together(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(MODEL.replace("embedded", "vlm:d2") + "  replicaz: 1\n")
    (tmp_path / "b.yaml").write_text(MODEL.replace("./m", "{}").replace("qwen", "b"))
    (tmp_path / "c.yaml").write_text("a: [\n")
    found = diagnostics(RenderRequest((str(tmp_path), str(tmp_path / "absent.yaml"))))
    assert [(Path(fault.pos.file).name, fault.path) for fault in found] == [
        ("a.yaml", "spec.backend"),
        ("a.yaml", "spec.replicaz"),
        ("b.yaml", "spec.path"),
        ("c.yaml", ""),
        ("absent.yaml", ""),
    ]


def test_diagnostics_have_exit_status_and_hints() -> None:
    with pytest.raises(ManifestError) as caught:
        render(RenderRequest(("-",), stdin=MODEL.replace("kind: Model", "kind: Pod")))
    (fault,) = caught.value.diagnostics
    assert caught.value.exit_code == 3
    assert str(fault) == caught.value.message
    assert fault.to_json() == {
        "file": "<stdin>",
        "line": 2,
        "col": 7,
        "path": "kind",
        "message": 'unknown kind "Pod"',
        "hint": "kinds: InferenceService, Model, AgentService, TrainJob",
    }
    assert caught.value.hint == fault.hint


def test_duplicate_object_error_names_both_places(tmp_path: Path) -> None:
    one, two = tmp_path / "1.yaml", tmp_path / "2.yaml"
    one.write_text(MODEL)
    two.write_text(MODEL)
    (fault,) = diagnostics(RenderRequest((str(one), str(two))))
    assert str(fault) == f"{two}:3:18: metadata.name: Model/qwen is declared twice: first at {one}:3:18"


def test_served_names_are_unique_per_service() -> None:
    named = f"{HEAD}kind: Model\nmetadata: {{name: %s}}\nspec: {{backend: embedded, path: m, service: %s, %s}}\n"
    (odd,) = faults(named % ("a", "s", 'servedModelName: "a:b"'))
    assert 'must be letters, digits, ".", "_", "/" and "-"' in odd and odd.endswith('got "a:b"')
    same = named % ("a", "s", "servedModelName: Q/q") + "---\n" + named % ("b", "s", "servedModelName: Q/q")
    (fault,) = faults(same)
    assert "spec.servedModelName" in fault and "call Model/a" in fault
    (plain,) = faults(named % ("b", "s", "servedModelName: a") + "---\n" + named % ("a", "s", "replicas: 1"))
    assert "metadata.name" in plain and "call Model/b" in plain
    both = named % ("a", "s", "servedModelName: Q/q") + "---\n" + named % ("b", "t", "servedModelName: Q/q")
    assert len(render(RenderRequest(("-",), stdin=both)).resources) == 2, "of two services they may be the same"
    inline = f"{HEAD}kind: InferenceService\nmetadata: {{name: s}}\nspec:\n  models:\n"
    inline += (
        "  - {name: a, backend: embedded, path: m}\n  - {name: b, backend: embedded, path: m, servedModelName: a}\n"
    )
    (third,) = faults(inline)
    assert "spec.models[b].servedModelName" in third
    for bad in ("''", "'a:b'", "'/a'", "'a b'", "3"):
        assert faults(named % ("a", "s", f"servedModelName: {bad}"))


def test_inline_model_and_document_of_one_name_collide() -> None:
    service = f"{HEAD}kind: InferenceService\nmetadata: {{name: s}}\nspec:\n  models:\n"
    service += "  - {name: qwen, backend: embedded, path: m}\n"
    assert faults(f"{model()}---\n{service}") == [
        "11:12: spec.models[qwen].name: Model/qwen is declared twice: first at <stdin>:3:18"
    ]


def test_inline_models_of_one_name_collide() -> None:
    service = f"{HEAD}kind: InferenceService\nmetadata: {{name: s}}\nspec:\n  models:\n"
    item = "  - {name: qwen, backend: embedded, path: m}\n"
    assert faults(service + item + item) == [
        "7:12: spec.models[qwen].name: Model/qwen is declared twice: first at <stdin>:6:12"
    ]


def test_duplicate_generated_names_name_their_items() -> None:
    text = (
        f"{HEAD}generate: {{each: [1, 2]}}\n"
        "template:\n  kind: Model\n  metadata: {name: same}\n  spec: {backend: embedded, path: m}\n"
    )
    assert faults(text) == [
        "5:20: metadata.name: Model/same is declared twice: first at <stdin>:5:20 by each[0], again by each[1]"
    ]


def test_dependency_cycle_error_names_every_edge() -> None:
    job = f"{HEAD}kind: TrainJob\nmetadata: {{name: j, dependsOn: [model/qwen]}}\nspec: {{driver: 'a:b'}}\n"
    loop = model().replace("name: qwen", "name: qwen, dependsOn: [job/j]")
    cycle = "Model/qwen -> TrainJob/j (<stdin>:3:36) -> Model/qwen (<stdin>:8:33)"
    assert faults(f"{loop}---\n{job}") == [f"3:36: metadata.dependsOn[0]: dependency cycle: {cycle}"]


def test_cycle_through_an_implied_reference_is_found() -> None:
    service = f"{HEAD}kind: InferenceService\nmetadata: {{name: default, dependsOn: [model/qwen]}}\n"
    (fault,) = faults(f"{service}---\n{model()}")
    assert "dependency cycle: InferenceService/default -> Model/qwen" in fault and "InferenceService/default (" in fault


def test_self_dependency_is_a_cycle() -> None:
    (fault,) = faults(model().replace("name: qwen", "name: qwen, dependsOn: [model/qwen]"))
    assert "dependency cycle: Model/qwen -> Model/qwen" in fault


@pytest.mark.parametrize(
    ("data", "fault"),
    [
        (b"", "1:1: no resources: the file is empty"),
        (b"# only this\n---\n", "1:1: no resources: the file is empty"),
        (b"a: \xff\n", "1:4: not UTF-8: byte 0xff"),
        (b"a: 1\nb: caf\xe9\n", "2:7: not UTF-8: byte 0xe9"),
        ("a: 1".encode("utf-16"), "1:1: UTF-16 text: save it as UTF-8"),
        (b"\x7fELF\x02\x01\x01\x00\x00\x80\xff", "1:10: binary data"),
        (b"PK\x03\x04", "1:3: binary data: the character U+0003 is not allowed in YAML"),
        (b"just text\n", "1:1: a resource is a map with apiVersion, kind, metadata and spec"),
        (b"- a\n- b\n", "1:1: a resource is a map with apiVersion, kind, metadata and spec"),
        (b"\xef\xbb\xbfkind: [\n", "2:1: did not find expected node content"),
    ],
)
def test_bad_file_is_one_line(tmp_path: Path, data: bytes, fault: str) -> None:
    path = tmp_path / "x.yaml"
    path.write_bytes(data)
    found = [str(each) for each in diagnostics(RenderRequest((str(path),)))]
    assert len(found) == 1 and found[0].startswith(f"{path}:{fault}")


def test_url_and_link_to_nowhere_are_explained(tmp_path: Path) -> None:
    link = tmp_path / "m.yaml"
    link.symlink_to("nowhere.yaml")
    dangling, url = diagnostics(RenderRequest(("https://example.com/m.yaml", str(link))))
    assert str(url) == "https://example.com/m.yaml:1:1: a URL is not a file"
    assert url.hint == "curl -fsSL https://example.com/m.yaml | areal apply -f -"
    assert str(dangling).endswith("cannot be read: No such file or directory")


def test_missing_or_unreadable_path_is_explained(tmp_path: Path) -> None:
    (fault,) = diagnostics(RenderRequest((str(tmp_path / "no.yaml"),)))
    assert str(fault) == f"{tmp_path}/no.yaml:1:1: cannot be read: No such file or directory"


def test_folder_without_manifests_suggests_subfolders(tmp_path: Path) -> None:
    (fault,) = diagnostics(RenderRequest((str(tmp_path),)))
    assert "no manifests in this folder (*.yaml, *.yml, *.json)" in fault.message and fault.hint is None
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "m.yaml").write_text(MODEL)
    (fault,) = diagnostics(RenderRequest((str(tmp_path),)))
    assert fault.hint == f"add -R to read the folders below {tmp_path}"


def test_folder_of_empty_manifests_is_empty(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("# later\n")
    (fault,) = diagnostics(RenderRequest((str(tmp_path),)))
    assert fault.message == "no resources: every manifest in this folder is empty"


def test_overlay_folder_given_with_f_suggests_k(tmp_path: Path) -> None:
    (tmp_path / "areal.overlay.yaml").write_text("")
    (fault,) = diagnostics(RenderRequest((str(tmp_path),)))
    assert fault.hint == f"use -k {tmp_path}"


def test_huge_file_is_refused_without_reading(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    with path.open("wb") as file:
        os.truncate(file.fileno(), 50 * MAX_FILE_BYTES)
    (fault,) = diagnostics(RenderRequest((str(path),)))
    assert fault.message == "larger than 16 MiB, which no manifest is"


def test_endless_device_is_refused() -> None:
    (fault,) = diagnostics(RenderRequest(("/dev/zero",)))
    assert fault.message == "larger than 16 MiB, which no manifest is"


def test_alias_bomb_is_refused() -> None:
    lines = [
        "x0: &x0 [a, a, a, a, a, a, a, a, a, a]",
        *(f"x{i}: &x{i} [{', '.join([f'*x{i - 1}'] * 10)}]" for i in range(1, 20)),
    ]
    assert any("alias bomb" in fault for fault in faults("\n".join(lines)))


def test_values_file_given_as_manifest_suggests_flag() -> None:
    with pytest.raises(ManifestError) as caught:
        render(RenderRequest(("-",), stdin="size: 7b\n"))
    assert caught.value.hint == "values go in with --values"


def test_expression_fault_hides_and_adds_no_other_fault() -> None:
    text = MODEL.replace("./m", "${{ values.root }}/m") + "  replicaz: 1\n"
    assert faults(text) == [
        "6:20: spec.path: values.root is not set",
        '7:3: spec.replicaz: unknown field (did you mean "replicas"?)',
    ]


def test_unquoted_expression_in_braces_gets_hint() -> None:
    (fault,) = diagnostics(RenderRequest(("-",), stdin=HEAD + "spec: {a: ${{ values.x }}}\n"))
    assert fault.hint == 'quote "${{ }}" inside { } or [ ]'
