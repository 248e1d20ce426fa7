"""``--set`` and ``--values``: over what the files say, with the flag as their position."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from areal.resources.render import RenderRequest, render

from .helpers import HEAD, diagnostics, faults, model, rendered

SERVICE = (
    f"{HEAD}kind: InferenceService\nmetadata: {{name: default}}\n"
    "spec:\n  models:\n  - {name: qwen, backend: embedded, path: m}\n"
)


def _spec(*sets: str, text: str = SERVICE) -> dict[str, Any]:
    return {str(item.ref): item.spec for item in rendered(text, sets=sets).resources}


def test_set_without_a_name_is_for_the_only_resource() -> None:
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
        ("Model/qwen:spec.proxyArgs[a.b]=1e-3", "proxyArgs", {"a.b": 0.001}),
        ("Model/qwen:spec.proxyArgs={x: [1, 2]}", "proxyArgs", {"x": [1, 2]}),
        ("Model/qwen:spec.env.A='1'", "env", {"A": "1"}),
        ("Model/qwen:spec.toolCallParser=a=b:c", "toolCallParser", "a=b:c"),
    ],
)
def test_set_reaches_any_field(setting: str, path: str, value: Any) -> None:
    if value is None:
        assert faults(SERVICE, sets=(setting,)) == ["--set:1:22: spec.models[qwen].path: must not be empty"]
    else:
        assert _spec(setting)["Model/qwen"][path] == value


def test_set_creates_inline_models_and_labels() -> None:
    found = rendered(
        SERVICE,
        sets=("spec.models[new].backend=embedded", "spec.models[new].path=n", "metadata.labels[areal.dev/x]=y"),
    ).resources
    assert [item.name for item in found] == ["default", "qwen", "new"]
    assert found[0].labels == {"areal.dev/x": "y"}
    assert str(found[2].pos_of(("path",))) == "--set:2:23"


def test_set_wins_over_an_overlay_and_a_later_one_over_an_earlier(tmp_path: Path) -> None:
    (tmp_path / "m.yaml").write_text(model())
    overlay = (
        "kind: Overlay\nbases: [m.yaml]\nnamePrefix: dev-\npatches:\n- {target: {}, merge: {spec: {replicas: 2}}}\n"
    )
    (tmp_path / "areal.overlay.yaml").write_text(HEAD + overlay)
    request = RenderRequest(overlay=str(tmp_path), sets=("Model/dev-qwen:spec.replicas=3", "spec.replicas=4"))
    assert render(request).resources[0].spec["replicas"] == 4


@pytest.mark.parametrize(
    ("setting", "fault"),
    [
        ("x", '--set:1:1: "x" is not PATH=VALUE'),
        ("=1", "--set:1:1: a path begins with spec, metadata or values"),
        ("spce.x=1", '--set:1:1: spce.x: a path begins with spec, metadata or values (did you mean "spec"?)'),
        ("spec..x=1", '--set:1:1: "spec..x" is not a path: unexpected "." at column 5'),
        ("spec.gatway.port=1", '--set:1:1: spec.gatway: unknown field (did you mean "gateway"?)'),
        ("spec.gateway.port=x", '--set:1:19: spec.gateway.port: expected an integer, got "x"'),
        ("spec.gateway.port.x=1", "--set:1:1: spec.gateway.port: expected an integer, got a map"),
        ("spec.models[7].path=x", "--set:1:1: spec.models[7].path: spec.models has no item [7]; it has 1"),
        (
            "Model/qwn:spec.path=x",
            '--set:1:11: spec.path: Model/qwn is not in these manifests (did you mean "Model/qwen"?)',
        ),
        ("Modle/qwen:spec.path=x", '--set:1:1: unknown kind "Modle" (did you mean "model"?)'),
        ("Model/Q:spec.path=x", '--set:1:1: "Q" is not a name'),
        ("metadata.name=x", "--set:1:1: metadata.name: the name is who the object is: it cannot be set"),
        ("spec.x=[1", "--set:1:10: did not find expected"),
        ("spec.x=a: b: c", "--set:1:12: mapping values are not allowed"),
        ("Model/qwen:values.x=1", "--set:1:12: values.x: a value is set as values.NAME=..., for no resource"),
        ("values=1", "--set:1:1: values: a value is set as values.NAME=..., for no resource"),
        ("spec." + ".".join("a" * 100) + "=1", "--set:1:1: the path has more than 64 steps"),
    ],
)
def test_bad_set_is_one_line(setting: str, fault: str) -> None:
    found = faults(SERVICE, sets=(setting,))
    assert len(found) == 1 and found[0].startswith(fault)


def test_set_without_a_name_among_several_says_how() -> None:
    (fault,) = diagnostics(
        RenderRequest(("-",), stdin=f"{model(name='a')}---\n{model(name='b')}", sets=("spec.replicas=1",))
    )
    assert fault.message == "there are 2 resources, and no one is named"
    assert fault.hint == "name one: --set Model/a:spec.replicas=..."


def test_values_come_from_files_and_flags_in_order(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("root: /a\nsizes: {small: 1, large: 4}\n")
    (tmp_path / "b.yaml").write_text("root: /b\nsizes: {large: 8}\n")
    text = model('{backend: embedded, path: "${{ values.root }}", replicas: "${{ values.sizes[values.size] }}"}')
    files = (str(tmp_path / "a.yaml"), str(tmp_path / "b.yaml"))
    (found,) = rendered(text, values_files=files, sets=("values.size=large",)).resources
    assert (found.spec["path"], found.spec["replicas"]) == ("/b", 8)
    (found,) = rendered(text, values_files=files, sets=("values.size=small", "values.root=/c")).resources
    assert (found.spec["path"], found.spec["replicas"]) == ("/c", 1)


def test_text_from_values_is_never_evaluated_again(tmp_path: Path) -> None:
    (tmp_path / "v.yaml").write_text('root: "${{ env.HOME }}"\n')
    text = model('{backend: embedded, path: "${{ values.root }}"}')
    (found,) = rendered(text, values_files=(str(tmp_path / "v.yaml"),), env={"HOME": "/root"}).resources
    assert found.spec["path"] == "${{ env.HOME }}"


def test_values_file_that_is_no_map_is_a_fault(tmp_path: Path) -> None:
    path = tmp_path / "v.yaml"
    path.write_text("- a\n")
    (fault,) = diagnostics(RenderRequest(("-",), stdin=model(), values_files=(str(path),)))
    assert str(fault) == f"{path}:1:1: a values file is a map"
