"""Overlays on disk: bases, patches, prefixes that references follow, labels, values, profiles."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from areal.resources.nodes import Diagnostic
from areal.resources.render import RenderRequest, render
from areal.resources.resource import Rendered

from .helpers import HEAD, diagnostics, model

BASE = """\
apiVersion: areal.dev/v1alpha1
kind: InferenceService
metadata: {name: default, labels: {tier: one}}
spec:
  gateway: {port: 8080}
  models:
  - {name: qwen, backend: embedded, path: "${{ values.root | default('/base') }}/qwen"}
---
apiVersion: areal.dev/v1alpha1
kind: Model
metadata: {name: alone}
spec: {backend: vllm, path: /alone, engineArgs: {a: 1, b: 2}}
---
apiVersion: areal.dev/v1alpha1
kind: AgentService
metadata: {name: tau2, dependsOn: [model/qwen, model/elsewhere]}
spec: {agent: "a:B", inference: {model: qwen}}
"""


def _write(root: Path, **files: str) -> Path:
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path = path / "areal.overlay.yaml" if not path.name.startswith("base") else path / "m.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def _overlay(body: str) -> str:
    return f"{HEAD}kind: Overlay\n{body}"


def _render(folder: Path, **request: Any) -> Rendered:
    return render(RenderRequest(overlay=str(folder), env={}, **request))


def _faults(folder: Path, **request: Any) -> tuple[Diagnostic, ...]:
    return diagnostics(RenderRequest(overlay=str(folder), env={}, **request))


def _specs(found: Rendered) -> dict[str, dict[str, Any]]:
    return {str(item.ref): item.spec for item in found.resources}


def test_patch_changes_only_its_target(tmp_path: Path) -> None:
    body = "bases: [../base]\npatches:\n- target: {name: alone}\n  merge: {spec: {engineArgs: {a: null, c: 3}}}\n"
    root = _write(tmp_path, base=BASE, prod=_overlay(body))
    specs = _specs(_render(root / "prod"))
    assert specs["Model/alone"]["engineArgs"] == {"b": 2, "c": 3}
    assert specs["Model/qwen"] == {"backend": "embedded", "path": "/base/qwen", "service": "default"}


@pytest.mark.parametrize(
    ("target", "changed"),
    [
        ("{kind: Model}", ["Model/qwen", "Model/alone"]),
        ("{kind: Model, name: 'q*'}", ["Model/qwen"]),
        ("{kind: Model, labels: {tier: one}}", ["Model/qwen"]),
    ],
)
def test_model_patch_applies_to_inline_models(tmp_path: Path, target: str, changed: list[str]) -> None:
    body = f"bases: [../base]\npatches: [{{target: {target}, merge: {{spec: {{replicas: 2}}}}}}]\n"
    root = _write(tmp_path, base=BASE, prod=_overlay(body))
    specs = _specs(_render(root / "prod"))
    assert [ref for ref, spec in specs.items() if spec.get("replicas") == 2] == changed
    assert specs["Model/qwen"]["path"] == "/base/qwen"


@pytest.mark.parametrize(
    ("target", "patched"),
    [
        ("{}", ["InferenceService/default", "Model/alone", "AgentService/tau2"]),
        ("{name: 'a*'}", ["Model/alone"]),
        ("{labels: {tier: one}}", ["InferenceService/default"]),
        ("{kind: AgentService, name: tau2}", ["AgentService/tau2"]),
    ],
)
def test_targets_match_by_kind_name_and_labels(tmp_path: Path, target: str, patched: list[str]) -> None:
    body = f"bases: [../base]\npatches:\n- {{target: {target}, merge: {{metadata: {{annotations: {{hit: 'yes'}}}}}}}}\n"
    root = _write(tmp_path, base=BASE, prod=_overlay(body))
    assert [str(item.ref) for item in _render(root / "prod").resources if item.annotations] == patched


def test_prefix_renames_and_references_follow(tmp_path: Path) -> None:
    root = _write(tmp_path, base=BASE, prod=_overlay("bases: [../base]\nnamePrefix: prod-\nlabels: {env: prod}\n"))
    found = _render(root / "prod")
    assert [str(item.ref) for item in found.resources] == [
        "InferenceService/prod-default",
        "Model/prod-qwen",
        "Model/prod-alone",
        "AgentService/prod-tau2",
    ]
    specs = _specs(found)
    assert specs["Model/prod-alone"]["service"] == "prod-default"
    assert specs["AgentService/prod-tau2"]["inference"] == {"model": "prod-qwen", "service": "prod-default"}
    assert found.resources[3].depends_on == ("Model/prod-qwen", "Model/elsewhere")
    assert [str(item.target) for item in found.unresolved] == ["Model/elsewhere"]
    assert found.resources[0].labels == {"tier": "one", "env": "prod"}
    assert found.resources[1].labels == {"tier": "one", "env": "prod"}


def test_prefix_keeps_references_to_other_objects(tmp_path: Path) -> None:
    root = _write(tmp_path, base=model(), prod=_overlay("bases: [../base]\nnamePrefix: p-\n"))
    (found,) = _render(root / "prod").resources
    assert (found.name, found.spec) == ("p-qwen", {"backend": "embedded", "path": "./m"})


def test_outer_overlay_overrides_inner_one(tmp_path: Path) -> None:
    patch = "patches:\n- {target: {name: %s}, merge: {spec: {replicas: %d}}}\n"
    inner = "bases: [../base]\nvalues: {root: /inner, x: 1}\nnamePrefix: a-\n" + patch % ("alone", 1)
    outer = "bases: [../inner]\nvalues: {root: /outer}\nnamePrefix: b-\n" + patch % ("a-alone", 2)
    root = _write(tmp_path, base=BASE, inner=_overlay(inner), outer=_overlay(outer))
    specs = _specs(_render(root / "outer"))
    assert specs["Model/b-a-alone"]["replicas"] == 2
    assert specs["Model/b-a-qwen"]["path"] == "/outer/qwen"
    specs = _specs(_render(root / "outer", sets=("values.root=/flag",)))
    assert specs["Model/b-a-qwen"]["path"] == "/flag/qwen"
    assert _specs(_render(root / "inner"))["Model/a-qwen"]["path"] == "/inner/qwen"


def test_base_can_be_used_under_two_prefixes(tmp_path: Path) -> None:
    left, right = "bases: [../base]\nnamePrefix: l-\n", "bases: [../base]\nnamePrefix: r-\n"
    root = _write(
        tmp_path,
        base=model(),
        left=_overlay(left),
        right=_overlay(right),
        both=_overlay("bases: [../left, ../right]\n"),
    )
    assert [item.name for item in _render(root / "both").resources] == ["l-qwen", "r-qwen"]


def test_profile_adds_bases_values_and_patches(tmp_path: Path) -> None:
    body = """\
bases: [../base]
values: {root: /plain}
labels: {env: dev}
profiles:
  prod:
    bases: [../base-extra]
    values: {root: "/prod"}
    labels: {env: prod}
    patches:
    - target: {kind: InferenceService}
      merge: {spec: {models: [{name: qwen, replicas: 4}], gateway: {port: "${{ values.port | default(80) }}"}}}
"""
    root = _write(tmp_path, base=BASE, **{"base-extra": model(name="extra")}, prod=_overlay(body))
    plain = _render(root / "prod")
    assert _specs(plain)["Model/qwen"]["path"] == "/plain/qwen" and len(plain.resources) == 4
    specs = _specs(_render(root / "prod", profile="prod"))
    assert specs["Model/qwen"] == {"backend": "embedded", "path": "/prod/qwen", "replicas": 4, "service": "default"}
    assert specs["InferenceService/default"] == {"gateway": {"port": 80}}
    assert "Model/extra" in specs
    (fault,) = _faults(root / "prod", profile="prd")
    assert 'unknown profile "prd" (did you mean "prod"?)' in fault.message


def test_fault_after_patching_gives_writers_position(tmp_path: Path) -> None:
    body = "bases: [../base]\npatches:\n- target: {name: alone}\n  merge:\n    spec:\n      replicas: many\n"
    root = _write(tmp_path, base=BASE.replace("a: 1", "a: 1}, replicaz: {x: 1"), prod=_overlay(body))
    found = [str(fault) for fault in _faults(root / "prod")]
    assert found == [
        f'{root}/prod/areal.overlay.yaml:8:17: spec.replicas: expected an integer, got "many"',
        f'{root}/base/m.yaml:12:57: spec.replicaz: unknown field (did you mean "replicas"?)',
    ]


@pytest.mark.parametrize(
    ("body", "place", "message"),
    [
        ("bases: [../nowhere]\n", "3:9: bases[0]", "no such file or folder"),
        ("bases: ['https://example.com/x']\n", "3:9: bases[0]", "remote bases are not read: copy the files"),
        ("bases: [../prod]\n", "3:9: bases[0]", '"../prod" leads back here: an overlay cannot build on itself'),
        ("bases: ../base\n", "3:8: bases", 'expected a list, got "../base"'),
        ("base: [../base]\n", "3:1: base", 'unknown field (did you mean "bases"?)'),
        ("namePrefix: Prod_\n", "3:13: namePrefix", ""),
        ("patches: [{merge: {}}]\n", "3:11: patches[0]", 'required field "target" is missing'),
        ("patches: [{target: {kind: Modle}, merge: {}}]\n", "3:27: patches[0].target.kind", '"Modle" is not one of'),
        (
            "bases: [../base]\npatches: [{target: {name: alon}, merge: {}}]\n",
            "4:12: patches[0].target",
            'matches no resource of the bases (did you mean "alone"?)',
        ),
        (
            "bases: [../base]\npatches: [{target: {kind: Model}, merge: {metadata: {labels: {a: b}}}}]\n",
            "4:43: patches[0].merge.metadata",
            "Model/qwen is inline in InferenceService/default, whose metadata it has",
        ),
        (
            "bases: [../base]\npatches: [{target: {name: alone}, merge: {spec: {path: '${{ values.nope }}'}}}]\n",
            "4:68: patches[0].merge.spec.path",
            "values.nope is not set",
        ),
        (
            "bases: [../base]\npatches: [{target: {name: alone}, merge: {spec: {$patch: drop}}}]\n",
            "4:58: $patch",
            'expected "delete" or "replace"',
        ),
    ],
)
def test_bad_overlay_is_one_line(tmp_path: Path, body: str, place: str, message: str) -> None:
    root = _write(tmp_path, base=BASE, prod=_overlay(body))
    (fault,) = _faults(root / "prod")
    assert str(fault).startswith(f"{root}/prod/areal.overlay.yaml:{place}: ")
    assert message in fault.message


def test_circular_overlays_are_refused(tmp_path: Path) -> None:
    root = _write(tmp_path, one=_overlay("bases: [../two]\n"), two=_overlay("bases: [../one]\n"))
    (fault,) = _faults(root / "one")
    assert (
        str(fault)
        == f'{root}/two/areal.overlay.yaml:3:9: bases[0]: "../one" leads back here: an overlay cannot build on itself'
    )


def test_multiplying_overlays_are_bounded(tmp_path: Path) -> None:
    files = {f"o{i}": _overlay(f"bases: [../o{i + 1}, ../o{i + 1}, ../o{i + 1}]\n") for i in range(20)}
    root = _write(tmp_path, base=model(), **files, o20=_overlay("bases: [../base]\n"))
    assert any("more than 1000 overlays" in fault.message for fault in _faults(root / "o0"))


def test_overlay_depth_limit_is_32(tmp_path: Path) -> None:
    files = {f"o{i}": _overlay(f"bases: [../o{i + 1}]\n") for i in range(32)}
    root = _write(tmp_path, base=model(), **files, o32=_overlay("bases: [../base]\n"))
    assert [item.name for item in _render(root / "o1").resources] == ["qwen"]
    (fault,) = _faults(root / "o0")
    assert "32 on top of each other" in fault.message


def test_overlay_count_limit_is_1000(tmp_path: Path) -> None:
    root = _write(tmp_path, o=_overlay(""), base=model(), many=_overlay(f"bases: [../base{', ../o' * 1000}]\n"))
    assert [item.name for item in _render(root / "many").resources] == ["qwen"]
    _write(tmp_path, many=_overlay(f"bases: [../base{', ../o' * 1001}]\n"))
    (fault,) = _faults(root / "many")
    assert "more than 1000 overlays" in fault.message


def test_prefix_over_unknown_kind_gives_one_line(tmp_path: Path) -> None:
    base = f"{HEAD}kind: Modle\nmetadata: {{name: m}}\nspec: {{}}\n"
    root = _write(tmp_path, base=base, prod=_overlay("bases: [../base]\nnamePrefix: p-\n"))
    (fault,) = _faults(root / "prod")
    assert 'did you mean "Model"' in str(fault)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "an overlay is one map"),
        ("- a\n", "an overlay is one map"),
        (f"{HEAD}kind: Overlay\n---\n{HEAD}kind: Overlay\n", "an overlay is one map"),
        ("a: [\n", "did not find expected node content"),
        (f"{HEAD}kind: Model\n", '"Model" is not one of Overlay'),
    ],
)
def test_invalid_overlay_file_is_explained(tmp_path: Path, text: str, message: str) -> None:
    root = _write(tmp_path, prod=text)
    (fault,) = _faults(root / "prod")
    assert message in fault.message
    if message == "an overlay is one map":
        assert str(fault).startswith(f"{root}/prod/areal.overlay.yaml:1:1: ")


def test_overlay_that_is_no_text_is_one_line(tmp_path: Path) -> None:
    root = _write(tmp_path, prod="")
    (root / "prod" / "areal.overlay.yaml").write_bytes(b"\xff\xfe")
    (fault,) = _faults(root / "prod")
    assert "areal.overlay.yaml" in str(fault)


def test_resource_without_name_or_metadata_is_one_line(tmp_path: Path) -> None:
    for text in (
        f"{HEAD}kind: Model\nmetadata: {{}}\nspec: {{backend: vllm, path: /m}}\n",
        f"{HEAD}kind: Model\nspec: {{backend: vllm, path: /m}}\n",
    ):
        root = _write(tmp_path, base=text, prod=_overlay("bases: [../base]\nnamePrefix: p-\nlabels: {a: b}\n"))
        (fault,) = _faults(root / "prod")
        assert fault.pos.file == f"{root}/base/m.yaml" and "name" in str(fault)


def test_empty_patch_changes_nothing(tmp_path: Path) -> None:
    root = _write(tmp_path, base=BASE, plain=_overlay("bases: [../base]\n"))
    _write(tmp_path, prod=_overlay("bases: [../base]\npatches: [{target: {kind: Model}, merge: {}}]\n"))
    assert _specs(_render(root / "prod")) == _specs(_render(root / "plain"))


def test_base_folder_is_read_without_its_folders(tmp_path: Path) -> None:
    root = _write(tmp_path, base=model(), prod=_overlay("bases: [../base]\n"))
    (root / "base" / "deep").mkdir()
    (root / "base" / "deep" / "m.yaml").write_text(model(name="deep"))
    assert [item.name for item in _render(root / "prod").resources] == ["qwen"]


def test_base_of_a_linked_overlay_is_beside_the_folder_itself(tmp_path: Path) -> None:
    root = _write(tmp_path, base=model(name="wrong"), real__prod=_overlay("bases: [../base]\n"))
    (root / "real" / "base").mkdir()
    (root / "real" / "base" / "m.yaml").write_text(model(name="right"))
    (root / "link").symlink_to(root / "real" / "prod")
    assert [item.name for item in _render(root / "link").resources] == ["right"]


def test_prefix_of_a_profile_replaces_that_of_its_overlay(tmp_path: Path) -> None:
    body = "bases: [../base]\nnamePrefix: dev-\nprofiles: {prod: {namePrefix: prod-}, plain: {}}\n"
    root = _write(tmp_path, base=model(), prod=_overlay(body))
    for profile, name in ((None, "dev-qwen"), ("prod", "prod-qwen"), ("plain", "dev-qwen")):
        assert [item.name for item in _render(root / "prod", profile=profile).resources] == [name]


def test_target_labels_must_all_match(tmp_path: Path) -> None:
    patch = "patches: [{target: {labels: {tier: one, zone: %s}}, merge: {spec: {logLevel: debug}}}]\n"
    base = BASE.replace("labels: {tier: one}", "labels: {tier: one, zone: a}")
    root = _write(tmp_path, base=base, a=_overlay("bases: [../base]\n" + patch % "a"))
    _write(tmp_path, b=_overlay("bases: [../base]\n" + patch % "b"))
    assert _specs(_render(root / "a"))["InferenceService/default"]["logLevel"] == "debug"
    (fault,) = _faults(root / "b")
    assert "matches no resource of the bases" in fault.message


def test_folder_without_overlay_suggests_f(tmp_path: Path) -> None:
    root = _write(tmp_path, base=BASE)
    (fault,) = _faults(root / "base")
    assert (
        fault.message == "no areal.overlay.yaml in this folder"
        and fault.hint == f"use -f {root}/base for plain manifests"
    )
    (root / "base" / "kustomization.yaml").touch()
    (fault,) = _faults(root / "base")
    assert fault.hint == f"kubectl kustomize {root}/base | areal apply -f -"
    (fault,) = _faults(root / "nowhere")
    assert (str(fault), fault.hint) == (f"{root}/nowhere:1:1: no such folder", None)
