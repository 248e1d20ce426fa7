"""Reading of files, folders, pipes and links; one template into many resources."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from areal.resources.documents import MAX_ITEMS, TOO_MUCH
from areal.resources.nodes import ManifestError
from areal.resources.render import RenderRequest, render

from .helpers import HEAD, faults, model, rendered

_PRINT = """
import sys
from areal.resources.nodes import ManifestError
from areal.resources.resource import graph
from areal.resources.render import RenderRequest, render
try:
    found = render(RenderRequest((sys.argv[1],), env={"HOME": "/h"}))
    print([(str(r.ref), r.spec, dict(r.labels), r.depends_on) for r in found.resources], found.references, found.env)
    print(graph(found.resources, "dot"))
except ManifestError as error:
    print(error)
"""


def test_pipe_is_read_to_its_end(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe.yaml"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_text, args=(model(),), daemon=True)
    writer.start()
    (found,) = render(RenderRequest((str(pipe),))).resources
    writer.join(timeout=30)
    assert found.name == "qwen"


def test_folders_below_are_read_only_with_recursion(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "deep.yaml").write_text(model(name="deep"))
    for hidden in (".git", "below/.hidden"):
        (tmp_path / hidden).mkdir()
        (tmp_path / hidden / "no.yaml").write_text("{")
    folder = str(tmp_path)
    with pytest.raises(ManifestError) as caught:
        render(RenderRequest((folder,)))
    (fault,) = caught.value.diagnostics
    assert fault.message.startswith("no manifests in this folder (*.yaml")
    assert fault.hint == f"add -R to read the folders below {folder}"
    assert [item.name for item in render(RenderRequest((folder,), recursive=True)).resources] == ["deep"]
    (tmp_path / "top.yaml").write_text(model(name="top"))
    assert [item.name for item in render(RenderRequest((folder,))).resources] == ["top"]
    (tmp_path / "empty").mkdir()
    for recursive in (False, True):
        with pytest.raises(ManifestError) as caught:
            render(RenderRequest((str(tmp_path / "empty"),), recursive=recursive))
        assert caught.value.diagnostics[0].hint is None


def test_symlinked_folders_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "m.yaml").write_text(model())
    (tmp_path / "loop").symlink_to(tmp_path, target_is_directory=True)
    found = render(RenderRequest((str(tmp_path),), recursive=True)).resources
    assert [item.name for item in found] == ["qwen"]


def test_overlay_below_folder_is_left_out_with_a_note(tmp_path: Path) -> None:
    (tmp_path / "prod").mkdir()
    (tmp_path / "m.yaml").write_text(model("{path: x, backend: embedded}"))
    (tmp_path / "prod" / "areal.overlay.yaml").write_text("apiVersion: areal.dev/v1alpha1\nkind: Overlay\n")
    notes: list[str] = []
    found = render(RenderRequest((str(tmp_path),), recursive=True, note=notes.append)).resources
    assert len(found) == 1
    assert notes == [f"{tmp_path}/prod/areal.overlay.yaml: not read: an overlay is applied with -k {tmp_path}/prod"]


def test_files_and_an_overlay_render_together(tmp_path: Path) -> None:
    (tmp_path / "one.yaml").write_text(model(name="one"))
    (tmp_path / "prod").mkdir()
    (tmp_path / "prod" / "areal.overlay.yaml").write_text(
        f"{HEAD}kind: Overlay\nbases: [../one.yaml]\nnamePrefix: p-\n"
    )
    found = render(RenderRequest((str(tmp_path / "one.yaml"),), overlay=str(tmp_path / "prod"))).resources
    assert [item.name for item in found] == ["one", "p-one"]


def test_rendering_is_equal_across_processes(tmp_path: Path) -> None:
    text = "---\n".join(model("{backend: embedded, path: m, env: {B: b, A: '${{ env.HOME }}'}}", name=n) for n in "cab")
    job = f"{HEAD}kind: TrainJob\nmetadata: {{name: j, labels: {{z: z, a: a}}, dependsOn: [model/c, model/a]}}\n"
    good, bad = tmp_path / "good.yaml", tmp_path / "bad.yaml"
    good.write_text(f"{text}---\n{job}spec: {{driver: 'a:b'}}\n")
    bad.write_text(f"{text}---\n{job}spec: {{drivr: 1, cofig: 2, rollot: 3}}\n")
    for path in (good, bad):
        outputs = {
            subprocess.run(
                [sys.executable, "-c", _PRINT, str(path)],
                env={**os.environ, "PYTHONHASHSEED": seed},
                capture_output=True,
                text=True,
                timeout=60,
                check=True,
            ).stdout
            for seed in ("1", "2", "3")
        }
        assert len(outputs) == 1 and outputs != {""}


def _generate(generate: str, template: str = "", beside: str = "") -> str:
    body = template or "{kind: Model, metadata: {name: 'm${{ index }}'}, spec: {backend: embedded, path: m}}"
    return f"{HEAD}{beside}generate: {generate}\ntemplate: {body}\n"


def test_each_over_maps_keeps_types() -> None:
    found = rendered(
        """\
        apiVersion: areal.dev/v1alpha1
        generate:
          each:
          - {name: small, replicas: 1}
          - {name: large, replicas: 4}
        template:
          kind: Model
          metadata: {name: "qwen-${{ item.name }}"}
          spec:
            backend: embedded
            path: ./${{ item.name }}
            replicas: ${{ item.replicas }}
        """
    ).resources
    assert [(item.name, item.spec["path"], item.spec["replicas"]) for item in found] == [
        ("qwen-small", "./small", 1),
        ("qwen-large", "./large", 4),
    ]
    assert str(found[1].pos_of(("replicas",))) == "<stdin>:12:15"


def test_matrix_runs_the_last_axis_fastest() -> None:
    spec = "{backend: 'vllm:t${{ item.tp }}', path: m}"
    template = f"{{kind: Model, metadata: {{name: '${{{{ item.size }}}}-${{{{ item.tp }}}}'}}, spec: {spec}}}"
    found = rendered(_generate("{matrix: {size: [7b, 32b], tp: [1, 2]}}", template)).resources
    assert [item.name for item in found] == ["7b-1", "7b-2", "32b-1", "32b-2"]


def test_items_may_come_from_values_and_axes_from_expressions() -> None:
    found = rendered(_generate('{each: "${{ values.models }}"}'), sets=("values.models=[a, b, c]",))
    assert len(found.resources) == 3
    found = rendered(_generate('{matrix: {i: "${{ range(3) }}", j: [0, 1]}}'))
    assert len(found.resources) == 6
    assert rendered(_generate("{each: []}")).resources == ()


def test_template_may_be_several_resources() -> None:
    template = "\n- {kind: Model, metadata: {name: '${{ item }}'}, spec: {backend: embedded, path: m}}"
    template += (
        "\n- {kind: TrainJob, metadata: {name: '${{ item }}'}, spec: {driver: 'a:b', rollout: {model: '${{ item }}'}}}"
    )
    found = rendered(_generate("{each: [a, b]}", template)).resources
    assert [str(item.ref) for item in found] == ["Model/a", "TrainJob/a", "Model/b", "TrainJob/b"]


def test_profiles_beside_generate_apply_to_its_resources() -> None:
    text = _generate("{each: [1]}", beside="profiles: [prod]\n")
    assert rendered(text).resources == ()
    assert len(rendered(text, profile="prod").resources) == 1


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (_generate("{each: 3}"), "2:18: generate.each: expected a list, got 3"),
        (_generate("{each: {a: 1}}"), "2:18: generate.each: expected a list, got a map"),
        (_generate("{each: null}"), "2:18: generate.each: expected a list, got null"),
        (_generate("{matrix: [1]}"), "2:20: generate.matrix: expected a map from a name to a list of values"),
        (_generate("{matrix: {a: 1}}"), "2:24: generate.matrix.a: expected a list, got 1"),
        (_generate("{eech: []}"), '2:12: generate.eech: unknown field (did you mean "each"?): "each" or "matrix"'),
        (_generate("{each: [], matrix: {}}"), '2:1: generate: exactly one of "each" and "matrix" is needed'),
        (_generate('{each: "${{ values.x }}"}'), "2:30: generate.each: values.x is not set"),
        (_generate("{each: []}", beside="spec: {}\n"), '2:1: spec: unknown field beside "generate"'),
        (_generate("{each: [1]}", "3"), "3:11: template: expected a resource, or a list of resources"),
        (f"{HEAD}generate: {{each: [1]}}\n", '2:1: "generate" needs a "template" beside it'),
        (
            _generate(f'{{each: "${{{{ range({MAX_ITEMS}) + [1] }}}}"}}'),
            '2:36: generate.each: "+": the list has more than',
        ),
        (
            _generate('{matrix: {a: "${{ range(300) }}", b: "${{ range(300) }}"}}'),
            f"2:20: generate.matrix: 90000 combinations, at most {MAX_ITEMS} are allowed",
        ),
    ],
)
def test_bad_generate_is_one_line(text: str, fault: str) -> None:
    (found,) = faults(text)
    assert found.startswith(fault)


def test_fault_of_every_item_is_reported_once() -> None:
    template = "{kind: Model, metadata: {name: 'm${{ item }}'}, spec: {backend: embedded, path: m, replicaz: 1}}"
    assert faults(_generate('{each: "${{ range(500) }}"}', template)) == [
        '3:94: spec.replicaz: unknown field (did you mean "replicas"?) (each[0] and 499 more)'
    ]


def test_fault_of_one_item_names_item() -> None:
    template = (
        "{kind: Model, metadata: {name: 'm${{ index }}'}, spec: {backend: embedded, path: m, replicas: '${{ item }}'}}"
    )
    assert faults(_generate("{each: [1, two, 3]}", template)) == [
        '3:105: spec.replicas: expected an integer, got "two" (each[1])'
    ]


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("env: {A: '${{ item }}'}", "7", "expected text, got an integer: string() makes it text"),
        ("env: {A: '${{ item }}'}", "true", "expected text, got a boolean: string() makes it text"),
        ("replicas: '${{ item }}'", "'7'", "expected an integer, got text: int() makes it an integer"),
        ("replicas: '${{ item }}'", "2.0", "expected an integer, got a number: int() makes it an integer"),
        ("resources: {cpus: '${{ item }}'}", "'1e-3'", "expected a number, got text: float() makes it a number"),
        ("suspend: '${{ item }}'", "'true'", 'expected true or false, got text: compare it, as in env.NAME == "true"'),
        ("env: {A: '${{ item }}'}", "null", "expected text, got null"),
        ("suspend: '${{ item }}'", "7", "expected true or false, got 7"),
    ],
)
def test_value_of_expression_names_its_conversion(field: str, value: str, message: str) -> None:
    template = (
        f"{{kind: Model, metadata: {{name: 'm${{{{ index }}}}'}}, spec: {{backend: embedded, path: m, {field}}}}}"
    )
    found = faults(_generate(f"{{each: [{value}, {value}]}}", template))
    assert [each.partition(" spec.")[2].partition(": ")[2] for each in found] == [f"{message} (each[0] and 1 more)"]


def test_expressions_of_a_whole_rendering_are_bounded() -> None:
    big = "${{ range(19000) }}"
    spec = f"{{backend: vllm, path: m, engineArgs: {{a: '{big}', b: '{big}', c: '{big}'}}}}"
    template = f"{{kind: Model, metadata: {{name: 'm${{{{ index }}}}'}}, spec: {spec}}}"
    found = faults(_generate('{each: "${{ range(200) }}"}', template))
    assert any(TOO_MUCH in fault for fault in found)


def test_expression_with_escaped_character_is_evaluated() -> None:
    (found,) = rendered(model(r'{path: "\x24{{ string(1 + 1) }}", backend: embedded}')).resources
    assert found.spec["path"] == "2"
