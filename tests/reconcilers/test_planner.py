"""Plans as text: what would be done, in which order, and why. No process is needed to read a plan."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import FrameType

import pytest

from areal.errors import Conflict, NoCapacity
from areal.reconcilers.desired import Target, deletions, with_layer
from areal.reconcilers.kinds.model_plan import ENGINE_FIELDS, PROXY_FIELDS
from areal.reconcilers.observe import Observed
from areal.reconcilers.outcomes import outcome_of
from areal.reconcilers.plan import Op, Plan, Report, StartRun, StopRun, Verb
from areal.reconcilers.planner import make_plan
from areal.reconcilers.planning import PlanScope, Policy
from areal.resources.fields import fields_of
from areal.resources.tree import UpdateClass
from areal.resources.validation import spec_model
from areal.runtime.backends.base import Phase
from areal.state.records import StoredObject
from areal.wire.bodies import ConfigureRouter
from areal.wire.routing import Readiness
from tests.reconcilers.worlds import (
    MODEL,
    SERVICE,
    changed,
    created,
    front,
    model,
    replica,
    run,
    service,
    steady,
    stored,
    table,
    unchanged,
    without,
    world,
)


def plan_of(*targets: Target, observed: Observed, policy: Policy | None = None) -> Plan:
    return make_plan(PlanScope(tuple(targets)), observed, policy or Policy())


def ops(plan: Plan) -> list[str]:
    return [op.to_text() for op in plan.ops]


def verbs(plan: Plan, ref: str = "") -> list[str]:
    return [f"{op.verb} {op.target}".strip() for op in plan.ops if not ref or op.ref == ref]


def test_plan_of_new_service_and_model_routes_last() -> None:
    spec = {"service": "default", "backend": "embedded:d1", "path": "m"}
    plan = plan_of(created("InferenceService", "default", {}), created("Model", "qwen", spec), observed=Observed())
    assert ops(plan) == [
        "[] -> #1 InferenceService/default, record, new object",
        "[] -> #2 Model/qwen, record, new object",
        "[1] -> #3 InferenceService/default router/0, spawn, no process",
        "[3] -> #4 InferenceService/default router/0, await-ready, started",
        "[1] -> #5 InferenceService/default gateway/0, spawn, no process",
        "[4,5] -> #6 InferenceService/default gateway/0, await-ready, started",
        "[4] -> #7 InferenceService/default router, configure, router starts empty",
        "[7] -> #8 InferenceService/default router, synced, its table is whole again",
        "[2] -> #9 Model/qwen engine/0, spawn, no process",
        "[9] -> #10 Model/qwen engine/0, await-ready, started",
        "[2] -> #11 Model/qwen data-proxy/0, spawn, no process",
        "[10,11] -> #12 Model/qwen data-proxy/0, await-ready, started",
        "[10,12] -> #13 Model/qwen data-proxy/0, warm-up, before it is routed",
        "[7,10,12,13] -> #14 Model/qwen routes, route, new replicas are ready",
        "[6,7,10,12,14] -> #15 Model/qwen routes, visible, users ask the gateway",
    ]
    assert {op.args.successor for op in plan.ops if op.verb is Verb.SPAWN} == {False}, "they replace nothing"


def test_awaited_object_is_healed_with_its_cause() -> None:
    home, item, observed = steady()
    assert {each.action for each in plan_of(unchanged(home), unchanged(item), observed=observed).objects} == {
        "unchanged"
    }
    plan = plan_of(unchanged(home), unchanged(item), observed=without(observed, "qwen-engine-0", Phase.STARTING))
    causes = {each.ref: each.cause for each in plan.objects if each.action == "heal"}
    assert causes == {"Model/qwen": "was starting"}


def test_plan_of_steady_world_is_empty() -> None:
    home, item, observed = steady(2)
    plan = plan_of(unchanged(home), unchanged(item), observed=observed)
    assert plan.is_empty
    assert not plan.drift
    assert [part.action for part in plan.objects] == ["unchanged", "unchanged"]


@pytest.mark.parametrize("component", ["engine", "data-proxy"])
def test_plan_after_killed_replica_process_restarts_only_it(component: str) -> None:
    home, item, observed = steady()
    plan = plan_of(unchanged(home), unchanged(item), observed=without(observed, f"qwen-{component}-0"))
    assert [(drift.kind, drift.target) for drift in plan.drift] == [("process-died", f"{component}/0")]
    assert verbs(plan) == [f"restart-now {component}/0", f"await-ready {component}/0", "visible routes"]


def test_plan_after_killed_router_does_not_touch_engines() -> None:
    home, item, observed = steady()
    dead = replace(without(observed, "default-router-0"), routes={})
    plan = plan_of(unchanged(home), unchanged(item), observed=dead)
    assert verbs(plan) == [
        "restart-now router/0",
        "await-ready router/0",
        "configure router",
        "route routes",
        "synced router",
        "visible routes",
    ]


def test_plan_for_emptied_router_reports_route_missing() -> None:
    home, item, observed = steady()
    empty = replace(observed, routes={SERVICE: table({}, synced=False)})
    plan = plan_of(unchanged(home), unchanged(item), observed=empty)
    assert [drift.kind for drift in plan.drift] == ["route-missing"]
    assert verbs(plan) == ["route routes", "synced router", "visible routes"]


def test_plan_for_foreign_routes_reports_route_extra() -> None:
    home, item, observed = steady()
    stranger = run(item, "data-proxy", 5, uid="stranger")
    known = list(observed.of(MODEL, "data-proxy"))
    plan = plan_of(
        unchanged(home),
        unchanged(item),
        observed=replace(observed, routes={SERVICE: table({"qwen": [*known, stranger]})}),
    )
    assert [drift.kind for drift in plan.drift] == ["route-extra"]
    assert verbs(plan, MODEL) == ["route routes", "visible routes"]


def test_plan_for_dead_shim_sweeps_session_before_successor() -> None:
    home, item, observed = steady()
    plan = plan_of(unchanged(home), unchanged(item), observed=without(observed, "qwen-engine-0", Phase.DEAD))
    assert verbs(plan, MODEL)[:3] == ["stop engine/0", "spawn engine/0", "await-ready engine/0"]
    cut = outcome_of(plan, [Report(plan, skipped={op.id for op in plan.ops})])
    told = {each.ref: (each.action, each.message) for each in cut.objects}
    assert told[MODEL] == ("failed", "not healed: an earlier step failed")


def test_plan_of_unobservable_run_does_nothing_with_reason() -> None:
    home, item, observed = steady()
    plan = plan_of(unchanged(home), unchanged(item), observed=without(observed, "qwen-engine-0", Phase.UNKNOWN))
    assert plan.is_empty
    assert any("cannot be seen" in reason for reason in plan.unknown)
    outcome = outcome_of(plan)
    assert outcome.exit_code == 9, "whether it has converged is not known"
    told = {each.ref: each.message for each in outcome.objects}
    assert told[MODEL].startswith("not converged: engine/0 cannot be seen") and told[SERVICE] == ""
    assert not plan.drift, "it is named once"


def test_plan_beside_a_router_that_does_not_answer_names_each_object_once() -> None:
    home, item, observed = steady()
    plan = plan_of(unchanged(home), unchanged(item), observed=replace(observed, routes={SERVICE: "it timed out"}))
    assert plan.is_empty
    assert [(drift.ref, drift.kind) for drift in plan.drift] == [(SERVICE, "table-unreadable"), (MODEL, "not-ready")]
    message = "the replicas are ready, but it timed out"
    assert plan.drift[1].message == message
    assert {each.ref: each.unseen for each in plan.objects} == {SERVICE: "it timed out", MODEL: message}


def test_plan_of_changed_engine_arg_rolls_one_replica_at_a_time() -> None:
    home, item, observed = steady(2)
    target = changed(item, {**item.spec, "engineArgs": {"maxBatchSize": 8}})
    plan = plan_of(unchanged(home), target, observed=observed)
    part = next(part for part in plan.objects if part.ref == MODEL)
    assert (part.action, part.decided_by) == ("configure", "spec.engineArgs.maxBatchSize")
    assert part.cause == "rolling update"
    one = [
        "spawn engine/{}",
        "await-ready engine/{}",
        "spawn data-proxy/{}",
        "await-ready data-proxy/{}",
        "warm-up data-proxy/{}",
        "route routes",
        "drain data-proxy",
        "route routes",
        "stop data-proxy/{}",
        "stop engine/{}",
    ]
    expected = [text.format(index) for index in (0, 1) for text in one]
    assert verbs(plan) == ["record", *expected, "visible routes"]
    second = next(op for op in plan.ops if op.verb is Verb.SPAWN and op.target == "engine/1")
    last_stop = next(op for op in plan.ops if op.verb is Verb.STOP and op.target == "engine/0")
    assert last_stop.id in second.needs


def test_plan_stops_old_replica_only_after_successor_is_routed() -> None:
    home, item, observed = steady(3)
    target = changed(item, {**item.spec, "path": "models/other"})
    plan = plan_of(unchanged(home), target, observed=observed)
    assert_safe(plan)


def assert_safe(plan: Plan) -> None:
    """Every STOP of a routed data proxy comes after a ROUTE that holds its successor, and after its drain."""
    reach: dict[int, set[int]] = {}
    for op in plan.ops:
        reach[op.id] = set(op.needs).union(*(reach[need] for need in op.needs))
        if op.verb is Verb.STOP and op.target.startswith("data-proxy"):
            before = [plan.ops[number - 1] for number in reach[op.id]]
            assert any(b.verb is Verb.DRAIN and b.run == op.run for b in before)
            assert any(b.verb is Verb.ROUTE and any(r.startswith("+") for r in b.runs) for b in before)


def test_plan_of_changed_chat_template_keeps_engines() -> None:
    home, item, observed = steady()
    target = changed(item, {**item.spec, "chatTemplate": "t.jinja"})
    plan = plan_of(unchanged(home), target, observed=observed)
    assert not any(op.target.startswith("engine") for op in plan.ops)
    assert "stop data-proxy/0" in verbs(plan)


def test_plan_with_recreate_stops_first_and_is_destructive() -> None:
    home, item, observed = steady(1, {"strategy": {"type": "Recreate"}})
    target = changed(item, {**item.spec, "path": "models/other"})
    plan = plan_of(unchanged(home), target, observed=observed)
    listed = verbs(plan, MODEL)
    assert listed.index("stop engine/0") < listed.index("spawn engine/0")
    assert any("strategy Recreate" in sentence for sentence in plan.destructive)


def test_plan_with_bluegreen_switches_all_routes_at_once() -> None:
    home, item, observed = steady(3, {"strategy": {"type": "BlueGreen"}})
    target = changed(item, {**item.spec, "path": "models/other"})
    plan = plan_of(unchanged(home), target, observed=observed)
    routes = [op for op in plan.ops if op.verb is Verb.ROUTE]
    switch, without_old = routes
    old = [run for run in switch.runs if not run.startswith("+")]
    assert len(old) == 3 and list(switch.args.cordoned) == old, "they only go on with the sessions that they have"
    assert len(switch.runs) == 6
    assert without_old.runs == tuple(run for run in switch.runs if run not in old)
    drained = {op.id for op in plan.ops if op.verb is Verb.DRAIN}
    assert drained <= set(without_old.needs)


def test_plan_without_a_spare_gpu_and_one_replica_is_refused() -> None:
    spec = {"backend": "sglang:d1t2", "path": "Qwen/Qwen3-8B"}
    home, item, observed = steady(1, spec)
    target = changed(item, {**item.spec, "path": "Qwen/Qwen3-4B"})
    with pytest.raises(NoCapacity, match="rolling update of one replica needs 2 spare GPUs; 1 are free") as caught:
        plan_of(unchanged(home), target, observed=observed, policy=Policy(free_gpus=1))
    assert "--allow-downtime" in (caught.value.hint or "")


def test_plan_of_two_replicas_without_spare_gpu_gives_up_one() -> None:
    home, item, observed = steady(2, {"backend": "sglang:t1", "path": "Qwen/Qwen3-8B"})
    target = changed(item, {**item.spec, "path": "Qwen/Qwen3-4B"})
    plan = plan_of(unchanged(home), target, observed=observed)
    listed = verbs(plan, MODEL)
    assert listed.index("stop engine/0") < listed.index("spawn engine/0") < listed.index("stop engine/1")
    assert any("1/2" in sentence for sentence in plan.destructive)


def test_plan_exceeding_free_gpus_is_refused() -> None:
    spec = {"service": "default", "backend": "sglang:d4t2", "path": "Qwen/Qwen3-8B"}
    with pytest.raises(NoCapacity, match="needs 8 GPUs for 4 new replicas; 4 are free"):
        plan_of(
            unchanged(service()),
            created("Model", "qwen", spec),
            observed=world(front(service())),
            policy=Policy(free_gpus=4),
        )


def test_plan_of_scale_down_drains_before_stopping_extra_replica() -> None:
    home, item, observed = steady(2)
    target = with_layer(item, "scale", {"replicas": 1}, "scaled 2 -> 1")
    plan = plan_of(unchanged(home), target, observed=observed)
    assert verbs(plan, MODEL) == [
        "record",
        "drain data-proxy",
        "route routes",
        "stop data-proxy/1",
        "stop engine/1",
        "visible routes",
    ]


def test_plan_of_scale_up_publishes_full_set_once_ready() -> None:
    home, item, observed = steady(1)
    target = with_layer(item, "scale", {"replicas": 3}, "scaled 1 -> 3")
    plan = plan_of(unchanged(home), target, observed=observed)
    (route,) = [op for op in plan.ops if op.verb is Verb.ROUTE]
    assert route.runs == ("qwen-data-proxy-0", "+Model/qwen/data-proxy/1", "+Model/qwen/data-proxy/2")
    assert route.args.expected == 3


def test_plan_of_suspended_service_stops_its_models() -> None:
    home, item, observed = steady()
    target = changed(home, {"suspend": True})
    plan = plan_of(target, unchanged(item), observed=observed)
    assert {"stop gateway/0", "stop router/0", "stop engine/0", "stop data-proxy/0"} <= set(verbs(plan))
    assert not any(op.verb is Verb.SPAWN for op in plan.ops)


def test_plan_of_hot_setting_configures_router_without_restart() -> None:
    home, item, observed = steady()
    target = changed(home, {"limits": {"maxQueuedRequests": 7}, "router": {"strategy": "round_robin"}})
    plan = plan_of(target, unchanged(item), observed=observed)
    assert verbs(plan) == ["record", "configure router"]
    assert plan.ops[1].args.strategy == "round_robin"


def test_plan_of_new_router_port_replaces_its_gateway_too() -> None:
    home, item, observed = steady()
    plan = plan_of(changed(home, {"router": {"port": 20099}}), unchanged(item), observed=observed)
    found = [each for each in verbs(plan, SERVICE) if each.split()[0] in ("stop", "spawn")]
    assert found == ["stop router/0", "spawn router/0", "spawn gateway/0", "stop gateway/0"]
    same = plan_of(changed(home, {"router": {"port": 20001}}), unchanged(item), observed=observed)
    assert not [each for each in verbs(same) if each.endswith("gateway/0")]


def test_plan_of_readiness_probe_configures_router_only() -> None:
    home, item, observed = steady()
    told = Readiness(period_seconds=1.0, timeout_seconds=2.0, failure_threshold=3, success_threshold=2)
    assert plan_of(unchanged(home), unchanged(item), observed=observed).is_empty
    target = changed(item, {**item.spec, "probes": {"readiness": {"failureThreshold": 5}}})
    plan = plan_of(unchanged(home), target, observed=observed)
    assert verbs(plan) == ["record", "route routes", "visible routes"]
    assert plan.ops[1].args.readiness == replace(told, failure_threshold=5)
    assert plan.ops[1].cause == "probes.readiness changed"


def test_plan_of_changed_gateway_port_overlaps_gateways() -> None:
    home, item, observed = steady()
    target = changed(home, {"gateway": {"port": 8081}})
    plan = plan_of(target, unchanged(item), observed=observed)
    assert verbs(plan, SERVICE) == ["record", "spawn gateway/0", "await-ready gateway/0", "stop gateway/0"]


def test_plan_of_immutable_change_is_conflict_naming_field() -> None:
    _, item, _ = steady()
    with pytest.raises(Conflict, match=r"spec\.service"):
        changed(item, {**item.spec, "service": "other"})


def neighbourhood(synced: bool) -> tuple[StoredObject, StoredObject, StoredObject, Observed]:
    """A routed model, and beside it one whose engine has died and which is not in the router's table."""
    home, item, observed = steady()
    other = model(name="other")
    seen = replace(observed, runs={**observed.runs, "Model/other": tuple(replica(other))})
    routed = {"qwen": observed.of(MODEL, "data-proxy")}
    seen = replace(seen, routes={SERVICE: table(routed, synced=synced)})
    return home, item, other, without(seen, "other-engine-0")


def test_plan_restores_only_routes_of_neighbour_model() -> None:
    home, item, other, observed = neighbourhood(synced=False)
    plan = make_plan(PlanScope((unchanged(item),), context=(unchanged(home), unchanged(other))), observed, Policy())
    assert verbs(plan, "Model/other") == ["route routes", "visible routes"]


def test_plan_leaves_neighbour_model_being_started_alone() -> None:
    home, item, other, observed = neighbourhood(synced=True)
    plan = make_plan(PlanScope((unchanged(item),), context=(unchanged(home), unchanged(other))), observed, Policy())
    assert verbs(plan, "Model/other") == []
    assert [part.ref for part in plan.objects] == [MODEL], "neighbours of which nothing is done are not shown"


def test_plan_of_deletion_stops_traffic_first_and_erases_last() -> None:
    home, item, observed = steady()
    plan = plan_of(Target(home, "delete"), Target(item, "delete"), observed=observed)
    listed = [f"{op.ref} {op.verb} {op.target}".strip() for op in plan.ops]
    assert listed[0] == f"{SERVICE} stop gateway/0"
    assert listed.index(f"{MODEL} stop engine/0") < listed.index(f"{SERVICE} stop router/0")
    assert listed[-1] == f"{SERVICE} erase"
    assert not any(op.verb is Verb.DRAIN for op in plan.ops)


def test_plan_of_model_deletion_drains_and_unroutes() -> None:
    home, item, observed = steady()
    plan = make_plan(PlanScope((Target(item, "delete"),), (unchanged(home),)), observed, Policy())
    assert verbs(plan) == [
        "drain data-proxy",
        "unroute routes",
        "stop data-proxy/0",
        "stop engine/0",
        "forget engine/0",
        "forget data-proxy/0",
        "erase",
    ]


def test_plan_of_explicit_default_keeps_running_processes() -> None:
    home, item, observed = steady()
    target = changed(item, {**item.spec, "replicas": 1, "engineArgs": {}})
    plan = plan_of(unchanged(home), target, observed=observed)
    assert not any(op.verb in (Verb.SPAWN, Verb.STOP) for op in plan.ops)


def test_plan_text_round_trips_through_json() -> None:
    home, item, observed = steady()
    plan = plan_of(unchanged(home), changed(item, {**item.spec, "path": "x"}), observed=observed)
    data = plan.to_json()
    assert data["ops"][0]["verb"] == "record"
    assert [change["path"] for change in data["objects"][1]["changes"]] == ["spec.path"]


def test_every_rolling_field_replaces_a_process() -> None:
    """A field that no component looks at would be recorded, and have no effect."""
    rolling = {name for name, field in fields_of(spec_model("Model")).items() if field.update is UpdateClass.ROLL}
    assert rolling == {*ENGINE_FIELDS, *PROXY_FIELDS}


def test_plan_for_running_engine_handles_only_data_proxy() -> None:
    spec = {"service": "default", "backend": "sglang:d1t4", "path": "m", "engineUrl": "http://10.0.0.2:30000"}
    plan = plan_of(created("InferenceService", "default", {}), created("Model", "qwen", spec), observed=Observed())
    started = [op for op in plan.ops if op.verb is Verb.SPAWN and op.ref == "Model/qwen"]
    assert [op.target for op in started] == ["data-proxy/0"]
    assert all(not op.args.engine and not op.args.gpus for op in started)
    assert "warm-up" in {op.verb.value for op in plan.ops if op.ref == "Model/qwen"}


def calls_of_a_plan(models: int) -> int:
    """Functions that are called to plan a service that runs with so many models that are suspended."""
    home, _, observed = steady(1)
    spec = {"service": "default", "backend": "embedded:d1", "path": "m", "suspend": True}
    targets = [unchanged(home), *(created("Model", f"m{number}", spec) for number in range(models))]
    calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        make_plan(PlanScope(tuple(targets)), observed, Policy())
    finally:
        sys.setprofile(before)
    return calls


def test_planning_cost_is_linear_in_models() -> None:
    calls_of_a_plan(10)  # what is done once
    assert calls_of_a_plan(400) < 5 * calls_of_a_plan(100)


def test_deletion_of_unobservable_object_is_refused() -> None:
    home, item, observed = steady()
    hidden = without(observed, "qwen-engine-0", Phase.UNKNOWN)
    plan = make_plan(PlanScope((Target(item, "delete"),), (unchanged(home),)), hidden, Policy())
    (refused,) = (part for part in plan.objects if part.ref == MODEL)
    assert (refused.action, verbs(plan, MODEL)) == ("blocked", [])
    assert "engine/0 cannot be seen" in refused.cause
    assert not plan.destructive and not plan.drift
    seen = make_plan(PlanScope((Target(item, "delete"),), (unchanged(home),)), observed, Policy())
    assert seen.destructive == (f"{MODEL} is deleted",)


def test_cascade_is_refused_when_one_object_is_unobservable() -> None:
    home, item, observed = steady()
    job = stored("TrainJob", "learn", {"driver": "my.code:main"}, depends_on=(MODEL,))
    own = stored("InferenceService", "own", {}, owner="TrainJob/learn")
    hidden = without(observed, "qwen-engine-0", Phase.UNKNOWN)

    def deleted(*refs: str) -> dict[str, str]:
        targets = deletions([home, item, job, own], refs, cascade=True)
        plan = make_plan(PlanScope(tuple(targets), (unchanged(home),)), hidden, Policy())
        assert {op.ref for op in plan.ops} - {SERVICE} == {part.ref for part in plan.objects if part.action == "delete"}
        return {part.ref: part.cause for part in plan.objects if part.action == "blocked"}

    assert deleted(MODEL)["TrainJob/learn"] == f"TrainJob/learn is not deleted: {MODEL} cannot be deleted"
    assert deleted(MODEL)["InferenceService/own"] == (
        "InferenceService/own is not deleted: TrainJob/learn cannot be deleted"
    )
    assert deleted(MODEL, "TrainJob/learn").keys() == {MODEL}
    assert not deleted("TrainJob/learn")


@pytest.mark.parametrize("strategy", ["Rolling", "BlueGreen", "Recreate"])
def test_planning_cost_is_linear_in_replicas(strategy: str) -> None:
    def size(count: int) -> int:
        home, item, observed = steady(count, {"backend": "sglang:t1", "strategy": {"type": strategy}})
        target = changed(item, {**item.spec, "path": "models/other"})
        plan = plan_of(unchanged(home), target, observed=observed, policy=Policy(free_gpus=count))
        return sum(len(op.needs) for op in plan.ops)

    assert size(200) < 2.2 * size(100)


def test_deletion_cost_is_linear_in_replicas() -> None:
    def size(count: int) -> int:
        home, item, observed = steady(count)
        plan = plan_of(unchanged(home), Target(item, "delete"), observed=observed)
        assert "barrier" in verbs(plan)
        return sum(len(op.needs) + len(op.after) for op in plan.ops)

    assert size(200) < 2.2 * size(100)


def test_plan_names_failed_rollout_and_leaves_it() -> None:
    home, item, seen = steady()
    failed = {"type": "Degraded", "status": "True", "reason": "RolloutFailed", "message": "exited 1"}
    item = replace(item, status={"conditions": [{**failed, "observedGeneration": item.generation}]})
    plan = make_plan(PlanScope((unchanged(home), unchanged(item))), seen, Policy())
    assert plan.is_empty
    assert [(drift.ref, drift.kind, drift.message) for drift in plan.drift] == [
        ("Model/qwen", "rollout-failed", "exited 1")
    ]


def test_plan_beside_an_unreadable_object_unroutes_nothing() -> None:
    home, _, seen = steady()
    scope = PlanScope((unchanged(home),), unreadable={"Model/qwen": ("it is damaged", "")})
    assert make_plan(scope, seen, Policy()).is_empty
    assert [op.verb for op in make_plan(PlanScope((unchanged(home),)), seen, Policy()).ops] == [Verb.UNROUTE]


def test_op_to_json_keeps_the_names_of_saved_plans() -> None:
    spawn = Op(2, Verb.SPAWN, "Model/a", "engine/0", "no process", args=StartRun(engine="e", gpus=2, inputs={"k": 1}))
    stop = Op(3, Verb.STOP, "Model/a", "engine/0", "deleted", args=StopRun(5.0), after=(1,))
    router = ConfigureRouter(strategy="round_robin")
    assert spawn.to_json()["args"] == {"engine": "e", "gpus": 2, "inputs": {"k": 1}}
    assert stop.to_json()["args"] == {"graceSeconds": 5.0, "after": [1]}
    assert Op(4, Verb.CONFIGURE, "Model/a", "router", "", args=router).to_json()["args"] == {"strategy": "round_robin"}
