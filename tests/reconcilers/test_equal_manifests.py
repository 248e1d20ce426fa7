"""Two manifests that mean the same, however they are written, are no change to any process."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

from areal.reconcilers.apply import wanted_of
from areal.reconcilers.desired import in_full, target_for
from areal.reconcilers.plan import Verb
from areal.resources.render import RenderRequest, render
from areal.resources.tree import UpdateClass, set_path
from areal.resources.validation import validate
from tests.reconcilers.test_update_classes import BASES, SPELLED_OUT, planned
from tests.reconcilers.worlds import front, replica, stored, wish

MORE: dict[str, tuple[dict[str, Any], ...]] = {
    "InferenceService": (
        {},
        {"logLevel": "debug"},
        {"gateway": {"port": 8081}, "limits": {"requestTimeoutSeconds": 60}},
    ),
    "Model": (
        {},
        {"backend": "sglang:d2t2", "resources": {"memory": "64Gi"}, "toolCallParser": "qwen"},
        {"replicas": 2, "engineArgs": {"max-batch-size": 8}, "env": {"A": "1"}, "reasoningParser": "deepseek_r1"},
    ),
    "AgentService": ({}, {"pairs": 2, "kwargs": {"a": [1, {"b": 2}]}}, {"session": {"idleTimeoutSeconds": 60}}),
    "TrainJob": ({}, {"resources": {"memory": "2Ti", "gpus": 1}}, {"restart": {"maxRestarts": 1}}),
}
DEFAULTS = {kind: [(path, value) for each, path, value in SPELLED_OUT if each == kind] for kind in BASES}
SPELLINGS: dict[Any, tuple[Any, ...]] = {
    "64Gi": ("65536Mi", "64.0Gi", "68719476736"),
    "2Ti": ("2048Gi",),
    "sglang:d2t2": ("sglang:t2d2", "sglang.d2m2", "sglang:d02t2", "sglang:d2t2p1"),
    "embedded:d1": ("embedded", "embedded.d1"),
    "qwen": ("hermes", "QWEN", "qwen25"),
    "deepseek_r1": ("deepseek-r1", "DeepSeek_R1"),
}


def yaml_of(draw: st.DrawFn, value: Any, values: dict[str, Any]) -> str:
    """The value in YAML's flow style: keys in any order, scalars as expressions, texts in any quotes."""
    if isinstance(value, dict):
        keys = draw(st.permutations(list(value)))
        return "{" + ", ".join(f"{json.dumps(key)}: {yaml_of(draw, value[key], values)}" for key in keys) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(yaml_of(draw, each, values) for each in value) + "]"
    if draw(st.integers(0, 4)) == 0:
        name = f"v{len(values)}"
        values[name] = value
        return f"'${{{{ values.{name} }}}}'"
    if isinstance(value, float) and value.is_integer() and draw(st.booleans()):
        return str(int(value))
    if isinstance(value, str) and draw(st.booleans()):
        return "'" + value.replace("'", "''") + "'"
    return json.dumps(value)


def respelled(draw: st.DrawFn, value: Any) -> Any:
    if isinstance(value, dict):
        return {key: respelled(draw, each) for key, each in value.items()}
    others = SPELLINGS.get(value, ()) if isinstance(value, str) else ()
    return draw(st.sampled_from((value, *others)))


def rendered(kind: str, spec: Mapping[str, Any], draw: st.DrawFn) -> dict[str, Any]:
    values: dict[str, Any] = {}
    text = yaml_of(draw, dict(spec), values)
    manifest = f"apiVersion: areal.dev/v1alpha1\nkind: {kind}\nmetadata: {{name: x}}\nspec: {text}\n"
    sets = tuple(f"values.{name}={json.dumps(value)}" for name, value in values.items())
    note(manifest)
    found = render(RenderRequest(files=("-",), stdin=manifest, sets=sets, env={}))
    return dict(wanted_of(found.resources)[0].spec)


@st.composite
def equal_pairs(draw: st.DrawFn) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """A kind, and two specs that were written differently and mean the same."""
    kind = draw(st.sampled_from(list(BASES)))
    meant = {**BASES[kind], **draw(st.sampled_from(MORE[kind]))}
    specs = []
    for _ in range(2):
        spec = respelled(draw, meant)
        for _, path, value in draw(
            st.lists(st.sampled_from([each for each in SPELLED_OUT if each[0] == kind]), max_size=3)
        ):
            there = set_path(spec, path, value)
            if in_full(kind, there) == in_full(kind, spec) and not validate(kind, there):
                spec = there
        specs.append(rendered(kind, spec, draw))
    return kind, specs[0], specs[1]


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.too_slow])
@given(equal_pairs())
def test_equivalent_manifests_change_no_process(pair: tuple[str, dict[str, Any], dict[str, Any]]) -> None:
    check_no_process_changes(*pair)


@pytest.mark.extended
@settings(deadline=None, max_examples=400, suppress_health_check=[HealthCheck.too_slow])
@given(equal_pairs())
def test_many_equivalent_manifests_change_no_process(pair: tuple[str, dict[str, Any], dict[str, Any]]) -> None:
    check_no_process_changes(*pair)


def check_no_process_changes(kind: str, before: dict[str, Any], after: dict[str, Any]) -> None:
    item = stored(kind, "x", before)
    target = target_for(wish(kind, "x", after), item, set_name=None, force_conflicts=False, replace_it=False)
    assert {change.update for change in target.changes} <= {UpdateClass.META}
    if kind == "InferenceService" or "embedded" in before.get("backend", ""):  # others want GPUs and drivers
        count = in_full(kind, before).get("replicas", 0)
        runs = front(item) if kind == "InferenceService" else []
        runs += [run for index in range(count) for run in replica(item, index)]
        verbs = {op.verb for op in planned(target, runs).ops_of(f"{kind}/x")}
        assert not verbs & {Verb.SPAWN, Verb.STOP, Verb.UNROUTE}
