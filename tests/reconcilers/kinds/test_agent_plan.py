"""Plans of an AgentService as text, its health, and what its processes are started with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from areal.errors import Conflict
from areal.reconcilers.desired import Target, with_layer
from areal.reconcilers.kinds.agent_plan import PROXY_FIELDS, WORKER_FIELDS, session_settings, with_callers_of
from areal.reconcilers.kinds.service_plan import GATEWAY_FIELDS, ROUTER_FIELDS
from areal.reconcilers.observe import Observed, ObservedRun, Seen
from areal.reconcilers.plan import Plan, Verb
from areal.reconcilers.planner import make_plan
from areal.reconcilers.planning import PlanScope, Policy
from areal.resources.fields import fields_of
from areal.resources.tree import UpdateClass
from areal.resources.validation import effective, spec_model
from areal.runtime.backends.base import Phase
from areal.state.records import StoredObject
from areal.wire.routing import Readiness
from tests.reconcilers.worlds import (
    assess,
    changed,
    created,
    front,
    model,
    replica,
    run,
    service,
    stored,
    table,
    unchanged,
    without,
    world,
)

POLLED = Readiness(period_seconds=5.0)
REF = "AgentService/tau"
SPEC = {"agent": "tau.agent:Agent"}


def plan_of(*targets: Target, observed: Observed, context: tuple[Target, ...] = ()) -> Plan:
    return make_plan(PlanScope(tuple(targets), context), observed, Policy())


def ops(plan: Plan) -> list[str]:
    return [op.to_text() for op in plan.ops]


def verbs(plan: Plan, ref: str = REF) -> list[str]:
    return [f"{op.verb} {op.target}".strip() for op in plan.ops if op.ref == ref]


def agents(spec: Mapping[str, Any] | None = None) -> StoredObject:
    return stored("AgentService", "tau", {**SPEC, **(spec or {})})


def pair(item: StoredObject, index: int = 0) -> list[ObservedRun]:
    worker = run(item, "worker", index)
    settings = session_settings(effective("AgentService", item.spec))
    return [worker, replace(run(item, "data-proxy", index, workerUrl=worker.url), settings=settings)]


def steady(pairs: int = 1, spec: Mapping[str, Any] | None = None) -> tuple[StoredObject, Observed]:
    """A service that is exactly as recorded."""
    item = agents({"pairs": pairs, **(spec or {})})
    runs = [each for index in range(pairs) for each in pair(item, index)]
    proxies = [each for each in runs if each.state.spec.component == "data-proxy"]
    return item, world([*front(item), *runs], table({"tau": proxies}, readiness=POLLED), service=REF)


def test_plan_of_new_service_starts_in_parallel_and_routes_last() -> None:
    plan = plan_of(created("AgentService", "tau", SPEC), observed=Observed())
    assert ops(plan) == [
        "[] -> #1 AgentService/tau, record, new object",
        "[1] -> #2 AgentService/tau router/0, spawn, no process",
        "[2] -> #3 AgentService/tau router/0, await-ready, started",
        "[1] -> #4 AgentService/tau gateway/0, spawn, no process",
        "[3,4] -> #5 AgentService/tau gateway/0, await-ready, started",
        "[3] -> #6 AgentService/tau router, synced, its table is whole again",
        "[1] -> #7 AgentService/tau worker/0, spawn, no process",
        "[7] -> #8 AgentService/tau worker/0, await-ready, started",
        "[1] -> #9 AgentService/tau data-proxy/0, spawn, no process",
        "[8,9] -> #10 AgentService/tau data-proxy/0, await-ready, started",
        "[3,8,10] -> #11 AgentService/tau routes, route, new replicas are ready",
        "[3,5,8,10,11] -> #12 AgentService/tau routes, visible, users ask the gateway",
    ]


def test_plan_with_model_starts_pairs_after_model() -> None:
    spec = {**SPEC, "inference": {"service": "default", "model": "qwen"}}
    plan = plan_of(
        created("InferenceService", "default", {}),
        created("Model", "qwen", {"backend": "embedded", "path": "m"}),
        created("AgentService", "tau", spec),
        observed=Observed(),
    )
    visible = next(op.id for op in plan.ops if op.verb is Verb.SETTLE and op.ref == "Model/qwen")
    spawned = {op.target: op for op in plan.ops if op.verb is Verb.SPAWN and op.ref == REF}
    assert visible in spawned["worker/0"].needs
    assert visible in spawned["data-proxy/0"].needs
    assert visible not in spawned["gateway/0"].needs
    assert spawned["data-proxy/0"].args.inputs == {
        "inferenceUrl": "http://127.0.0.1:8080",
        "inferenceKeyFrom": "generated",
    }


def test_plan_of_a_steady_service_is_empty() -> None:
    item, observed = steady(2)
    plan = plan_of(unchanged(item), observed=observed)
    assert plan.is_empty
    assert not plan.drift


@pytest.mark.parametrize(
    ("component", "after"),
    [
        ("worker", ["visible routes"]),
        ("data-proxy", ["visible routes"]),
        ("gateway", ["visible routes"]),
        ("router", ["route routes", "synced router", "visible routes"]),
    ],
)
def test_plan_after_a_process_was_killed_restarts_only_it(component: str, after: list[str]) -> None:
    item, observed = steady(2)
    dead = without(observed, f"tau-{component}-0")
    if component == "router":
        dead = replace(dead, routes={})
    plan = plan_of(unchanged(item), observed=dead)
    assert [(drift.kind, drift.target) for drift in plan.drift] == [("process-died", f"{component}/0")]
    assert verbs(plan) == [f"restart-now {component}/0", f"await-ready {component}/0", *after]


def test_plan_for_emptied_router_reports_route_missing() -> None:
    item, observed = steady()
    plan = plan_of(unchanged(item), observed=replace(observed, routes={REF: table({}, synced=False)}))
    assert [drift.kind for drift in plan.drift] == ["route-missing"]
    assert verbs(plan) == ["route routes", "synced router", "visible routes"]


def test_plan_removes_undeclared_route() -> None:
    item, observed = steady()
    routes = table({"tau": observed.of(REF, "data-proxy"), "stranger": []}, readiness=POLLED)
    plan = plan_of(unchanged(item), observed=replace(observed, routes={REF: routes}))
    assert verbs(plan) == ["unroute routes/stranger"]


def test_plan_of_changed_agent_rolls_one_pair_at_a_time() -> None:
    item, observed = steady(2)
    plan = plan_of(changed(item, {**item.spec, "agent": "tau.agent:Better"}), observed=observed)
    (part,) = plan.objects
    assert (part.action, part.decided_by, part.outlook) == ("configure", "spec.agent", "to roll")
    one = [
        "spawn worker/{}",
        "await-ready worker/{}",
        "spawn data-proxy/{}",
        "await-ready data-proxy/{}",
        "route routes",
        "drain data-proxy",
        "route routes",
        "stop data-proxy/{}",
        "stop worker/{}",
    ]
    assert verbs(plan) == ["record", *(text.format(n) for n in (0, 1) for text in one), "visible routes"]
    drain = next(op for op in plan.ops if op.verb is Verb.DRAIN)
    routed = next(op for op in plan.ops if op.verb is Verb.ROUTE)
    assert routed.id in drain.needs
    assert drain.args.seconds == 600.0
    assert routed.runs == ("tau-data-proxy-0", "tau-data-proxy-1", f"+{REF}/data-proxy/0")


def test_plan_of_changed_model_keeps_workers() -> None:
    item, observed = steady(1, {"inference": {"service": "default", "model": "a"}})
    target = changed(item, {**item.spec, "inference": {"service": "default", "model": "b"}})
    listed = verbs(plan_of(target, observed=observed))
    assert {"stop data-proxy/0", "stop gateway/0"} <= set(listed)
    assert not any("worker" in each or "router/0" in each for each in listed)


def test_plan_of_moved_inference_service_keeps_workers() -> None:
    item, observed = steady(1, {"inference": {"service": "default"}})
    told = {"inferenceUrl": "http://127.0.0.1:8080", "inferenceKeyFrom": "generated"}
    worker = run(item, "worker")
    proxy = replace(
        run(item, "data-proxy", 0, Phase.RUNNING, Seen.READY, "", workerUrl=worker.url, **told),
        settings=pair(item)[1].settings,
    )
    home = service()
    routes = {REF: table({"tau": [proxy]}, readiness=POLLED), "InferenceService/default": table({})}
    router = run(item, "router")
    gateway = run(item, "gateway", 0, Phase.RUNNING, Seen.READY, "", routerUrl=router.url, **told)
    observed = replace(world([router, gateway, worker, proxy, *front(home)]), routes=routes)
    assert plan_of(unchanged(item), observed=observed, context=(unchanged(home),)).is_empty
    moved = service({"gateway": {"port": 9999}})
    plan = plan_of(unchanged(item), observed=observed, context=(unchanged(moved),))
    assert {"stop data-proxy/0", "stop gateway/0"} <= set(verbs(plan)), "callers bring RL sessions of where it is now"
    assert not any("worker" in each for each in verbs(plan))


def test_callers_follow_moved_inference_service() -> None:
    item, home = agents({"inference": {"service": "default"}}), service()
    told = {"inferenceUrl": "http://127.0.0.1:8080", "inferenceKeyFrom": "generated"}
    proxy = run(item, "data-proxy", 0, Phase.RUNNING, Seen.READY, "", **told)

    def followed(target: Target, *runs: ObservedRun) -> list[str]:
        states = [one.state for one in runs]
        return [each.ref for each in with_callers_of((target,), [item, home], states)][1:]

    assert followed(unchanged(home), proxy) == []
    moved = changed(home, {"gateway": {"port": 9999}})
    assert followed(moved, proxy) == [REF]
    assert followed(changed(home, {"auth": {"adminKeyFrom": {"file": "/k"}}}), proxy) == [REF]
    assert followed(moved, run(item, "data-proxy", 0, Phase.EXITED, Seen.UNSEEN, "", **told)) == []
    assert followed(Target(home, "delete"), proxy) == []


def test_plan_with_recreate_stops_first_and_is_destructive() -> None:
    item, observed = steady(1, {"strategy": {"type": "Recreate"}})
    plan = plan_of(changed(item, {**item.spec, "env": {"A": "1"}}), observed=observed)
    listed = verbs(plan)
    assert listed.index("stop worker/0") < listed.index("spawn worker/0")
    assert any("strategy Recreate" in sentence for sentence in plan.destructive)


def test_plan_with_bluegreen_starts_second_set_and_switches_once() -> None:
    item, observed = steady(2, {"strategy": {"type": "BlueGreen"}})
    plan = plan_of(changed(item, {**item.spec, "env": {"A": "1"}}), observed=observed)
    switch, without_old = [op for op in plan.ops if op.verb is Verb.ROUTE]
    assert len(switch.runs) == 4
    assert switch.args.cordoned == ("tau-data-proxy-0", "tau-data-proxy-1")
    assert len(without_old.runs) == 2


def test_plan_of_scaling_up_and_down() -> None:
    item, observed = steady(1)
    up = plan_of(with_layer(item, "scale", {"pairs": 2}, "scaled 1 -> 2"), observed=observed)
    assert [each for each in verbs(up) if each.startswith(("spawn", "stop", "drain"))] == [
        "spawn worker/1",
        "spawn data-proxy/1",
    ]
    item, observed = steady(2)
    down = plan_of(with_layer(item, "scale", {"pairs": 1}, "scaled 2 -> 1"), observed=observed)
    assert verbs(down) == [
        "record",
        "drain data-proxy",
        "route routes",
        "stop data-proxy/1",
        "stop worker/1",
        "visible routes",
    ]


def test_plan_of_session_settings_configures_without_restart() -> None:
    item, observed = steady(2)
    plan = plan_of(changed(item, {**item.spec, "session": {"idleTimeoutSeconds": 5.0}}), observed=observed)
    assert verbs(plan) == ["record", "configure data-proxy/0", "configure data-proxy/1"]
    assert [op.to_json()["args"] for op in plan.ops if op.verb is Verb.CONFIGURE] == [{"idle_timeout": 5.0}] * 2


def test_plan_of_health_period_configures_without_restart() -> None:
    item, observed = steady(1)
    plan = plan_of(changed(item, {**item.spec, "healthPollSeconds": 1.0}), observed=observed)
    assert verbs(plan) == ["record", "route routes", "configure data-proxy/0", "visible routes"]
    route = next(op for op in plan.ops if op.verb is Verb.ROUTE)
    assert route.args.readiness.period_seconds == 1.0


def test_plan_of_suspended_service_stops_all_processes() -> None:
    item, observed = steady(1)
    plan = plan_of(changed(item, {**item.spec, "suspend": True}), observed=observed)
    assert verbs(plan) == ["record", "stop gateway/0", "stop router/0", "stop data-proxy/0", "stop worker/0"]
    gateway = next(op for op in plan.ops if op.target == "gateway/0")
    assert all(gateway.id in op.needs or op.target != "data-proxy/0" for op in plan.ops)
    assert gateway.args.grace_seconds == 600.0


def test_plan_of_deletion_stops_pairs_before_their_model() -> None:
    item, observed = steady(1, {"inference": {"service": "default", "model": "qwen"}})
    home, called = service(), model()
    runs = [*(each for found in observed.runs.values() for each in found), *front(home), *replica(called)]
    observed = replace(
        world(runs), routes={REF: observed.routes[REF], "InferenceService/default": table({"qwen": [runs[-1]]})}
    )
    targets = [Target(each, "delete", cause="deleted") for each in (item, home, called)]
    plan = plan_of(*targets, observed=observed)
    assert verbs(plan) == [
        "stop gateway/0",
        "stop data-proxy/0",
        "stop worker/0",
        "stop router/0",
        *("forget router/0", "forget gateway/0", "forget worker/0", "forget data-proxy/0"),
        "erase",
    ]
    last = next(op for op in plan.ops if op.ref == REF and op.target == "worker/0" and op.verb is Verb.STOP)
    first = next(op for op in plan.ops if op.ref == "InferenceService/default" and op.verb is Verb.STOP)
    assert last.id in first.needs


def test_unrequested_neighbour_is_only_routed() -> None:
    item, observed = steady()
    plan = plan_of(observed=without(observed, "tau-worker-0"), context=(unchanged(item),))
    assert plan.is_empty


def test_scheduler_of_a_recorded_service_is_immutable() -> None:
    item = agents()
    with pytest.raises(Conflict, match="immutable"):
        changed(item, {**item.spec, "scheduler": {"type": "slurm"}})


def test_every_restarting_field_belongs_to_a_process() -> None:
    needed = {
        name
        for name, info in fields_of(spec_model("AgentService")).items()
        if info.update is not None and info.update >= UpdateClass.ROLL
    }
    assert needed <= {*WORKER_FIELDS, *PROXY_FIELDS, *GATEWAY_FIELDS, *ROUTER_FIELDS}


# -- health


def test_health_counts_answering_and_routed_pairs() -> None:
    item, observed = steady(2)
    assert (assess(REF, item.spec, observed).phase, assess(REF, item.spec, observed).fraction) == ("Ready", "2/2")
    health = assess(REF, item.spec, without(observed, "tau-worker-1"))
    assert (health.phase, health.fraction) == ("Degraded", "1/2")
    assert health.message == "worker/1: killed by SIGKILL"


@pytest.mark.parametrize(("component", "phase"), [("gateway", "Degraded"), ("router", "Unknown")])
def test_health_without_gateway_or_router_is_not_ready(component: str, phase: str) -> None:
    item, observed = steady(1)
    dead = without(observed, f"tau-{component}-0", Phase.EXITED)
    dead = replace(dead, routes={}) if component == "router" else dead
    health = assess(REF, item.spec, dead)
    assert (health.phase, health.ready) == (phase, 0)
    assert f"{component}/0 of {REF} does not run" in health.message


def test_health_of_unrouted_pair_is_not_routed() -> None:
    item, observed = steady(1)
    health = assess(REF, item.spec, replace(observed, routes={REF: table({})}))
    assert (health.phase, health.reason) == ("Progressing", "NotRouted")


def test_health_names_router_that_serves_its_table_and_is_not_ready() -> None:
    item, observed = steady(1)
    why = "GET /ready answers 503 (routes.json cannot be written: Is a directory)"
    runs = tuple(
        replace(each, seen=Seen.NOT_READY, why=why) if each.state.spec.component == "router" else each
        for each in observed.runs[REF]
    )
    health = assess(REF, item.spec, replace(observed, runs={REF: runs}))
    assert (health.phase, health.message) == ("Progressing", f"router/0: {why}")
