"""``explain``, ``init`` and ``graph``: text for people, made from the same models."""

from __future__ import annotations

import re

import pytest

from areal.errors import NotFound
from areal.resources.explain import explain, init
from areal.resources.fields import all_fields, fields_of
from areal.resources.kinds import KINDS
from areal.resources.resource import graph
from areal.resources.tree import path_text
from areal.resources.validation import spec_model

from .helpers import HEAD, model, rendered


def test_explain_field_gives_type_default_and_cost() -> None:
    text = explain("inferenceservice.spec.gateway.port")
    assert "FIELD:   spec.gateway.port" in text
    assert "TYPE:    integer from 1 to 65535 (port)" in text
    assert "DEFAULT: 8080" in text
    assert "CHANGE:  RECREATE" in text


def test_explain_map_lists_its_fields() -> None:
    text = explain("isvc.spec.gateway")
    assert re.findall(r"^  (\w+):", text, re.MULTILINE) == ["host", "port", "relays"]
    assert 'host: text = "127.0.0.1"  [RECREATE]' in text


def test_explain_cost_includes_parent_update_class() -> None:
    assert "CHANGE:  IMMUTABLE" in explain("trainjob.spec.scheduler.slurm.partition")
    assert "CHANGE:  RECREATE" in explain("isvc.spec.scheduler.slurm.partition")
    assert "partition: text  [IMMUTABLE]" in explain("trainjob.spec.scheduler.slurm")


@pytest.mark.parametrize(
    "path",
    [
        "model",
        "MODEL.spec",
        "isvc.spec.models[qwen].replicas",
        "model.spec.envFrom.TOKEN.file",
        "job.metadata",
        "overlay.patches.target",
    ],
)
def test_explain_accepts_every_path_form(path: str) -> None:
    assert explain(path).startswith("KIND:")


def test_explain_describes_every_field() -> None:
    for kind in KINDS:
        for path, _ in all_fields(spec_model(kind)):
            dotted = path_text(path).replace("[]", "").replace("[*]", ".any").replace("*", "any")
            assert "FIELD:" in explain(f"{kind.lower()}.spec.{dotted}")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("modle", 'unknown kind "modle" (did you mean "model"?)'),
        ("model.spec.pth", 'Model.spec has no field pth (did you mean "path"?)'),
        ("model.spce", 'Model has no field spce (did you mean "spec"?)'),
        ("model.spec.path.x", "Model.spec.path is text: it has no fields to explain"),
        ("isvc.spec.gateway.prt", 'InferenceService.spec.gateway has no field prt (did you mean "port"?)'),
    ],
)
def test_explain_of_unknown_field_suggests_name(path: str, message: str) -> None:
    with pytest.raises(NotFound) as caught:
        explain(path)
    assert str(caught.value) == message


@pytest.mark.parametrize("kind", KINDS)
def test_init_renders_and_shows_every_field(kind: str) -> None:
    text = init(kind)
    assert text.startswith("# yaml-language-server: $schema=areal.schema.json\n")
    (found,) = rendered(text).resources
    assert found.kind == kind
    for name in fields_of(spec_model(kind)):
        assert re.search(rf"^  (# )?{name}:", text, re.MULTILINE), name


@pytest.mark.parametrize("kind", KINDS)
def test_init_each_comment_can_be_uncommented(kind: str) -> None:
    lines = init(kind).splitlines()
    for name in fields_of(spec_model(kind)):
        start = next((at for at, line in enumerate(lines) if line.startswith(f"  # {name}:")), None)
        if start is None or name in ("external", "engineApiKeyFrom"):  # they go with other fields than the rest
            continue
        end = start + 1
        while end < len(lines) and lines[end].startswith(("  #   ", "  # - ")):
            end += 1
        opened = [line.replace("  # ", "  ", 1) if start <= at < end else line for at, line in enumerate(lines)]
        resource = rendered("\n".join(opened)).resources[0]
        assert name in resource.spec or name == "models"


MANIFESTS = (
    f"{HEAD}kind: InferenceService\nmetadata: {{name: default}}\nspec:\n  models:\n"
    "  - {name: qwen, backend: embedded, path: m}\n---\n"
    f"{HEAD}kind: AgentService\nmetadata: {{name: tau2, dependsOn: [job/warm]}}\n"
    "spec: {agent: 'a:B', inference: {model: qwen}}\n"
)


def test_graph_text_lists_needs_in_order() -> None:
    assert graph(rendered(MANIFESTS).resources, "text") == (
        "InferenceService/default\n"
        "Model/qwen (inline) -> InferenceService/default\n"
        "AgentService/tau2 -> InferenceService/default, Model/qwen, TrainJob/warm?\n"
    )


def test_graph_dot_dashes_external_nodes() -> None:
    text = graph(rendered(MANIFESTS).resources, "dot")
    assert text.startswith("digraph areal {") and text.endswith("}\n")
    assert '  "TrainJob/warm" [style=dashed];' in text
    assert '  "AgentService/tau2" -> "Model/qwen" [label="model"];' in text


def test_graph_mermaid_numbers_its_nodes() -> None:
    lines = graph(rendered(MANIFESTS).resources, "mermaid").splitlines()
    assert lines[0] == "flowchart LR"
    assert '  n1["Model/qwen"]' in lines and "  n1 -->|service| n0" in lines
    assert '  n3["TrainJob/warm"]:::elsewhere' in lines and "  n2 -->|dependsOn| n3" in lines


def test_graph_is_independent_of_file_order() -> None:
    forward = rendered(f"{model(name='a')}---\n{model(name='b')}").resources
    backward = rendered(f"{model(name='b')}---\n{model(name='a')}").resources
    assert all(graph(forward, style) == graph(backward, style) for style in ("text", "dot", "mermaid"))


def test_graph_unknown_format_is_refused() -> None:
    with pytest.raises(ValueError, match="no graph format"):
        graph([], "svg")
