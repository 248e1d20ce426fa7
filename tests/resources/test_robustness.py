"""Whatever is in the files, on the flags and in the values: resources or diagnostics, never anything else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from areal.resources.explain import init
from areal.resources.kinds import API_VERSION, KINDS
from areal.resources.nodes import ManifestError
from areal.resources.render import RenderRequest, render

_TEMPLATED = """\
apiVersion: areal.dev/v1alpha1
kind: InferenceService
metadata: {name: default, labels: {a: b}, dependsOn: [job/j]}
spec:
  gateway: {port: "${{ values.port | default(8080) }}", host: 127.0.0.1}
  auth: {adminKeyFrom: {env: KEY}}
  models:
  - &m {name: qwen, backend: "sglang:d2t2", path: "${{ env.HOME }}/m", engineArgs: {a: 1e-3}}
  - {<<: *m, name: other}
---
apiVersion: areal.dev/v1alpha1
generate: {matrix: {size: [7b, 32b], tp: [1, 2]}}
template:
  kind: Model
  metadata: {name: "m-${{ item.size }}-${{ index }}"}
  spec: {backend: "vllm:t${{ item.tp }}", path: ./m, replicas: "${{ item.tp * 2 }}"}
---
apiVersion: areal.dev/v1alpha1
kind: TrainJob
metadata: {name: j}
spec: {driver: "a:b", rollout: {model: qwen}, config: {x: [1, {y: 2}]}}
"""
_SEEDS = [_TEMPLATED, *(init(kind) for kind in KINDS)]
_SNIPPETS = [
    "\t",
    "\0",
    "*m",
    "&m ",
    "<<: ",
    "${{",
    "}}",
    "{",
    "}",
    "[",
    "]",
    ": ",
    "- ",
    "---\n",
    "!!int ",
    "|",
    "'",
    '"',
    "#",
]
_NAMES = ["name", "kind", "metadata", "spec", "models", "generate", "template", "each", "matrix", "profiles", "labels"]
_FIELDS = [*_NAMES, "apiVersion", "dependsOn", "backend", "path", "items", "external", "gateway", "inference", "config"]
_WORDS = [
    *KINDS,
    "List",
    "Overlay",
    API_VERSION,
    "a",
    "../x",
    "${{ values.a }}",
    "${{ item }}",
    "sglang:d2",
    "model/a",
    "",
]


def _outcome(request: RenderRequest) -> None:
    try:
        found = render(request)
    except ManifestError as error:
        assert error.diagnostics
        for fault in error.diagnostics:
            assert fault.pos.line >= 1 and fault.pos.col >= 1 and fault.message
    else:
        json.dumps([resource.spec for resource in found.resources], allow_nan=False)


def _edited(seed: str, edits: list[tuple[int, int, str]]) -> str:
    for at, cut, text in edits:
        at %= len(seed) + 1
        seed = seed[:at] + text + seed[at + cut :]
    return seed


_EDITS = st.lists(
    st.tuples(st.integers(0, 10_000), st.integers(0, 12), st.sampled_from(_SNIPPETS) | st.text(max_size=3)), max_size=4
)
_TREES = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 9) | st.floats(0, 1) | st.sampled_from(_WORDS),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(_FIELDS), inner, max_size=4),
    max_leaves=16,
)


@settings(max_examples=200)
@given(st.sampled_from(_SEEDS), _EDITS)
def test_edited_manifest_renders_or_is_explained(seed: str, edits: list[tuple[int, int, str]]) -> None:
    _outcome(RenderRequest(("-",), stdin=_edited(seed, edits), env={"HOME": "/root"}))


@settings(max_examples=200)
@given(st.dictionaries(st.sampled_from(_FIELDS), _TREES, max_size=5), st.sampled_from(list(KINDS)), _TREES)
def test_any_resource_tree_renders_or_is_explained(extra: dict[str, Any], kind: str, spec: Any) -> None:
    document = {"apiVersion": API_VERSION, "kind": kind, "metadata": {"name": "a"}, "spec": spec, **extra}
    _outcome(RenderRequest(("-",), stdin=json.dumps(document), env={}))


@given(
    st.text("spec.models[]gtwyrp0=:{}/ModelAB", max_size=24) | st.sampled_from([f"spec.{name}=" for name in _FIELDS]),
    _TREES,
)
def test_any_setting_renders_or_is_explained(start: str, value: Any) -> None:
    for text in (start, f"{start}={json.dumps(value)}", f"Model/qwen:{start}={json.dumps(value)}"):
        _outcome(RenderRequest(("-",), stdin=_TEMPLATED, sets=(text,), env={"HOME": "/root"}))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(_TREES, _TREES, _TREES)
def test_any_overlay_and_values_render_or_are_explained(tmp_path: Path, patch: Any, target: Any, values: Any) -> None:
    (tmp_path / "base.yaml").write_text(_TEMPLATED)
    (tmp_path / "values.yaml").write_text(json.dumps(values))
    overlay = {
        "apiVersion": API_VERSION,
        "kind": "Overlay",
        "bases": ["base.yaml"],
        "namePrefix": "p-",
        "values": values,
        "patches": [{"target": {"kind": "Model"}, "merge": patch}, {"target": target, "merge": {"spec": patch}}],
    }
    (tmp_path / "areal.overlay.yaml").write_text(json.dumps(overlay))
    _outcome(RenderRequest(overlay=str(tmp_path), values_files=(str(tmp_path / "values.yaml"),), env={"HOME": "/root"}))
    del overlay["patches"][1]
    (tmp_path / "areal.overlay.yaml").write_text(json.dumps(overlay))
    _outcome(RenderRequest(overlay=str(tmp_path), env={"HOME": "/root"}))


@pytest.mark.parametrize("depth", [40, 63])
def test_deep_but_allowed_trees_pass_every_stage(tmp_path: Path, depth: int) -> None:
    deep: Any = "x"
    for _ in range(depth - 5):
        deep = {"a": deep}
    document = {
        "apiVersion": API_VERSION,
        "kind": "Model",
        "metadata": {"name": "a"},
        "spec": {"backend": "vllm", "path": "m", "engineArgs": {"deep": deep, "more": "${{ values.deep }}"}},
    }
    (tmp_path / "v.yaml").write_text(json.dumps({"deep": deep}))
    found = render(RenderRequest(("-",), stdin=json.dumps(document), values_files=(str(tmp_path / "v.yaml"),)))
    assert found.resources[0].spec["engineArgs"] == {"deep": deep, "more": deep}
