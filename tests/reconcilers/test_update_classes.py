"""What a plan says of a change is what its ops do: classes are those of effects, and nothing else happens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, note, settings

from areal.errors import NoCapacity
from areal.reconcilers.desired import Target, target_for
from areal.reconcilers.observe import ObservedRun
from areal.reconcilers.plan import Plan, Verb
from areal.reconcilers.planner import make_plan
from areal.reconcilers.planning import ENV_INPUT, PlanScope, Policy
from areal.resources.tree import FieldPath, UpdateClass, leaves, set_path
from areal.resources.validation import effective, validate
from tests.reconcilers.histories import Wish, wishes, worlds
from tests.reconcilers.simulator import Simulation
from tests.reconcilers.worlds import changed, front, model, replica, service, steady, stored, table, wish, world

BASES: dict[str, dict[str, Any]] = {
    "InferenceService": {},
    "Model": {"service": "default", "backend": "embedded:d1", "path": "/m"},
    "AgentService": {"agent": "a:A", "workingDir": "/w"},
    "TrainJob": {"driver": "m:f", "workingDir": "/w"},
}
WORDS = ("rolling update", "processes are replaced", "recorded only")
NONE_RESTARTS = ("in place, no process restarts", "processes start, none restarts", "processes stop, none restarts")


def spelled_out() -> Iterator[tuple[str, FieldPath, Any]]:
    """Every field of every kind that a manifest may set to its default."""
    for kind, base in BASES.items():
        for path, value in leaves(effective(kind, base).model_dump(by_alias=True, mode="json")).items():
            with_default = set_path(base, path, value)
            if value is not None and with_default != base and not validate(kind, with_default):
                yield kind, path, value


SPELLED_OUT = list(spelled_out())


def test_defaults_are_found_in_every_kind() -> None:
    assert {kind for kind, *_ in SPELLED_OUT} == set(BASES) and len(SPELLED_OUT) > 80


@pytest.mark.parametrize(("kind", "path", "value"), SPELLED_OUT, ids=lambda each: str(each))
def test_field_equal_to_default_is_only_recorded(kind: str, path: FieldPath, value: Any) -> None:
    base = BASES[kind]
    with_default = set_path(base, path, value)
    for before, after in ((base, with_default), (with_default, base)):
        item = stored(kind, "x", before)
        target = target_for(wish(kind, "x", after), item, set_name=None, force_conflicts=False, replace_it=False)
        assert target.action == "configure"
        assert {change.update for change in target.changes} == {UpdateClass.META}
        runs = front(item) if kind == "InferenceService" else replica(item) if kind == "Model" else []
        plan = planned(target, runs)
        assert "replaced" not in plan.to_text() and "rolling" not in plan.to_text()


def planned(target: Target, runs: list[ObservedRun]) -> Plan:
    home = service()
    context = (Target(home, "unchanged"),) if target.object.kind == "Model" else ()
    seen = [*front(home), *runs] if target.object.kind == "Model" else runs
    proxies = [each for each in runs if each.state.spec.component == "data-proxy"]
    return make_plan(PlanScope((target,), context), world(seen, table({"x": proxies} if proxies else {})), Policy())


@pytest.mark.parametrize(
    ("before", "after", "words", "update"),
    [
        ({"backend": "embedded:d1"}, {"backend": "embedded:d2"}, "processes start", UpdateClass.HOT),
        ({"backend": "embedded:d2", "replicas": 1}, {"backend": "embedded:d1", "replicas": 1}, "recorded only", 0),
        ({"backend": "embedded:d1", "replicas": 1}, {"backend": "embedded:d1"}, "recorded only", UpdateClass.META),
        ({"backend": "embedded"}, {"backend": "embedded:d1"}, "recorded only", UpdateClass.META),
        ({"backend": "embedded"}, {"backend": "embedded", "path": "other"}, "rolling update", UpdateClass.ROLL),
    ],
)
def test_allocation_update_class_follows_its_effect(
    before: dict[str, Any], after: dict[str, Any], words: str, update: int
) -> None:
    home, item = service(), model(before)
    target = changed(item, {**item.spec, **after} if "replicas" in after else {**model().spec, **after})
    assert max(change.update for change in target.changes) == update
    old = replica(item)
    seen = world([*front(home), *old], table({"qwen": [old[1]]}))
    plan = make_plan(PlanScope((target,), (Target(home, "unchanged"),)), seen, Policy())
    (found,) = [each for each in plan.objects if each.ref == "Model/qwen"]
    assert words in found.cause, plan.to_text()


def test_service_env_change_replaces_no_engine() -> None:
    home, item, seen = steady()
    env = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318"}

    def started(target: Target) -> set[str]:
        plan = make_plan(PlanScope((target,), (Target(item, "unchanged"),)), seen, Policy())
        return {op.target for op in plan.ops if op.verb is Verb.SPAWN}

    assert started(changed(home, {"env": env})) == {"router/0", "gateway/0", "data-proxy/0"}
    assert started(Target(home, "unchanged")) == set()
    gone = {
        **seen.runs,
        "Model/qwen": tuple(
            replace(
                run,
                state=replace(
                    run.state, spec=replace(run.state.spec, inputs={**run.state.spec.inputs, ENV_INPUT: "x"})
                ),
            )
            for run in seen.runs["Model/qwen"]
            if run.state.spec.component == "data-proxy"
        )
        + tuple(run for run in seen.runs["Model/qwen"] if run.state.spec.component == "engine"),
    }
    seen = replace(seen, runs=gone)
    assert "data-proxy/0" in started(Target(home, "unchanged")), "what the service has no more"


def test_suspended_object_does_not_roll() -> None:
    item = model({"suspend": True})
    target = changed(item, {**item.spec, "path": "other"})
    plan = make_plan(PlanScope((target,), (Target(service(), "unchanged"),)), world(front(service())), Policy())
    (found,) = [each for each in plan.objects if each.ref == "Model/qwen"]
    assert found.cause == "recorded only"
    assert [op.verb for op in plan.ops_of("Model/qwen")] == [Verb.RECORD]


@pytest.mark.parametrize(
    ("fields", "cause"), [({"suspend": True}, "processes stop"), ({"replicas": 2}, "processes start")]
)
def test_change_that_restarts_nothing_names_affected_processes(fields: dict[str, Any], cause: str) -> None:
    item = model()
    old = replica(item)
    target = changed(item, {**item.spec, **fields})
    seen = world([*front(service()), *old], table({"qwen": [old[1]]}))
    plan = make_plan(PlanScope((target,), (Target(service(), "unchanged"),)), seen, Policy())
    (found,) = [each for each in plan.objects if each.ref == "Model/qwen"]
    assert found.cause == f"{cause}, none restarts"


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(worlds(), wishes())
def test_plan_summary_matches_its_ops(world: Simulation, wish: Wish) -> None:
    try:
        plan, _ = wish.plan(world)
    except NoCapacity:
        assume(False)
        raise
    note(plan.to_text())
    for item in plan.objects:
        if item.action != "configure" or not item.changes:
            continue
        ops = plan.ops_of(item.ref)
        stopped = {op.run for op in ops if op.verb is Verb.STOP and op.run}
        started = {op.target for op in ops if op.verb is Verb.SPAWN}
        succeeded = {slot for uid in stopped if (slot := world.runs[uid].slot) in started and world.runs[uid].is_live}
        if item.cause == "recorded only":
            assert not succeeded
        if item.cause in ("rolling update", "processes are replaced"):
            assert started, "a process gets a successor"
        if item.cause in NONE_RESTARTS:
            assert not [op for op in ops if op.verb is Verb.SPAWN and op.cause.endswith(" changed")]
            assert item.cause == NONE_RESTARTS[0] or bool(started) != bool(stopped), "one of both is all that happens"
            assert item.cause != NONE_RESTARTS[0] or bool(started) == bool(stopped)
        assert item.cause in (*WORDS, *NONE_RESTARTS, "its processes start with it")
