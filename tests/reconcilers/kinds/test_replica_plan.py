"""Plans of replicas behind a router: which are replaced together, in which order, and what is said of downtime."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from areal.errors import NoCapacity
from areal.reconcilers.desired import Target, with_layer
from areal.reconcilers.observe import Observed, Seen
from areal.reconcilers.plan import FEWER_REPLICAS, Plan, Verb
from areal.reconcilers.planner import make_plan
from areal.reconcilers.planning import PlanScope, Policy
from areal.runtime.backends.base import Capacity, Phase
from areal.state.records import StoredObject
from tests.reconcilers.worlds import (
    MODEL,
    SERVICE,
    changed,
    created,
    front,
    model,
    replica,
    service,
    snapshot,
    steady,
    table,
    unchanged,
    without,
    world,
)

GPU = {"backend": "sglang:t1", "path": "models/qwen"}


def planned(target: Target, observed: Observed, free: int = 0, *, allow_downtime: bool = False) -> Plan:
    targets = (target,) if target.ref == SERVICE else (unchanged(service()), target)
    return make_plan(PlanScope(targets), observed, Policy(allow_downtime, free_gpus=free))


def moved(count: int, spec: dict[str, Any], free: int = 0, **options: Any) -> Plan:
    """The plan of another path for all of ``count`` replicas that serve."""
    _, item, observed = steady(count, {**GPU, **spec})
    return planned(changed(item, {**item.spec, "path": "models/other"}), observed, free, **options)


def steps(plan: Plan, component: str = "engine") -> str:
    """Starts and stops, in order: "+0 -0" is a successor in replica 0 before the old process stops."""
    signs = {Verb.SPAWN: "+", Verb.STOP: "-"}
    found = [op for op in plan.ops if op.verb in signs and op.target.startswith(component)]
    return " ".join(f"{signs[op.verb]}{op.target[-1]}" for op in found)


def of_model(plan: Plan) -> list[str]:
    return [f"{op.verb} {op.target}".strip() for op in plan.ops if op.ref == MODEL]


def seen_as(observed: Observed, uid: str, seen: Seen, phase: Phase = Phase.RUNNING) -> Observed:
    runs = {
        ref: tuple(
            replace(one, seen=seen, state=replace(one.state, phase=phase)) if one.uid == uid else one for one in each
        )
        for ref, each in observed.runs.items()
    }
    return replace(observed, runs=runs)


def routed(observed: Observed, states: dict[str, str], *, synced: bool = True) -> Observed:
    """``states``: of the data proxies in the router's table, by uid."""
    urls = {one.uid: one.url for one in observed.of(MODEL)}
    workers = [(uid, urls[uid], state) for uid, state in states.items()]
    return replace(observed, routes={SERVICE: snapshot({"qwen": workers}, synced=synced)})


@pytest.mark.parametrize(
    ("spec", "free", "order"),
    [
        ({}, 2, "+0 +1 -0 -1 +2 +3 -2 -3"),
        ({}, 3, "+0 +1 +2 -0 -1 -2 +3 -3"),
        ({}, 9, "+0 +1 +2 +3 -0 -1 -2 -3"),
        ({"strategy": {"maxSurge": 1}}, 9, "+0 -0 +1 -1 +2 -2 +3 -3"),
        ({"strategy": {"maxSurge": 3}}, 2, "+0 +1 -0 -1 +2 +3 -2 -3"),
        ({"backend": "sglang:t2"}, 5, "+0 +1 -0 -1 +2 +3 -2 -3"),
        ({"strategy": {"maxUnavailable": 2}}, 0, "-0 -1 +0 +1 -2 -3 +2 +3"),
        ({"strategy": {"type": "Recreate"}}, 9, "-0 -1 -2 -3 +0 +1 +2 +3"),
        ({"strategy": {"type": "BlueGreen"}}, 4, "+0 +1 +2 +3 -0 -1 -2 -3"),
        ({"backend": "embedded:d1"}, 0, "+0 -0 +1 -1 +2 -2 +3 -3"),
        ({"backend": "embedded:d1", "strategy": {"maxSurge": 2}}, 0, "+0 +1 -0 -1 +2 +3 -2 -3"),
    ],
)
def test_rolling_update_replaces_as_many_replicas_as_surge_and_gpus_allow(
    spec: dict[str, Any], free: int, order: str
) -> None:
    assert steps(moved(4, spec, free)) == order


@pytest.mark.parametrize(
    ("count", "spec", "options", "sentences"),
    [
        (3, {}, {}, ["capacity during the rollout is 2/3: no spare GPU"]),
        (3, {"strategy": {"maxUnavailable": 2}}, {}, ["capacity during the rollout is 1/3: no spare GPU"]),
        (1, {}, {"allow_downtime": True}, ["the only replica stops before its successor starts: no spare GPU"]),
        (
            1,
            {"strategy": {"maxUnavailable": 1}},
            {},
            ["the only replica stops before its successor starts: no spare GPU"],
        ),
        (
            2,
            {"strategy": {"type": "Recreate"}},
            {},
            ["all 2 replicas stop before their successors start (strategy Recreate)"],
        ),
        (2, {}, {"free": 1}, []),
    ],
)
def test_plan_announces_lost_capacity(count: int, spec: Any, options: Any, sentences: list[str]) -> None:
    assert moved(count, spec, **options).destructive == tuple(f"{MODEL}: {sentence}" for sentence in sentences)


@pytest.mark.parametrize(("count", "tensor"), [(3, 1), (2, 3)])
def test_blue_green_needs_gpus_of_a_whole_second_set(count: int, tensor: int) -> None:
    spec, need = {"backend": f"sglang:t{tensor}", "strategy": {"type": "BlueGreen"}}, count * tensor
    moved(count, spec, need)
    with pytest.raises(NoCapacity, match=f"blue-green needs {need} spare GPUs for a second set; {need - 1} are free"):
        moved(count, spec, need - 1)


def test_replica_that_does_not_serve_is_replaced_first() -> None:
    _, item, observed = steady(2, GPU)
    broken = seen_as(observed, "qwen-data-proxy-1", Seen.NOT_READY)
    plan = planned(changed(item, {**item.spec, "path": "models/other"}), broken)
    assert steps(plan) == "-1 +1 -0 +0"
    assert plan.destructive == (f"{MODEL}: capacity during the rollout is 1/2: no spare GPU",)
    _, item, observed = steady(1, GPU)
    broken = seen_as(observed, "qwen-data-proxy-0", Seen.NOT_READY)
    assert planned(changed(item, {**item.spec, "path": "models/other"}), broken).destructive == ()


def test_new_data_proxies_alone_need_no_gpus() -> None:
    _, item, observed = steady(2, GPU)
    plan = planned(changed(item, {**item.spec, "chatTemplate": "t.jinja"}), observed)
    assert (steps(plan, "data-proxy"), steps(plan), plan.destructive) == ("+0 -0 +1 -1", "", ())


@pytest.mark.parametrize("ahead", [0, 1])
def test_replica_whose_engine_is_new_already_is_replaced_without_a_gpu(ahead: int) -> None:
    """The engine of the other one is still to be replaced, and no GPU is free."""
    item = model({**GPU, "replicas": 2, "chatTemplate": "t.jinja"})
    before = {ahead: {"path": "models/qwen"}, 1 - ahead: {"path": "models/before"}}
    pairs = [each for index in (0, 1) for each in replica(model({**GPU, "replicas": 2, **before[index]}), index)]
    proxies = [one for one in pairs if one.state.spec.component == "data-proxy"]
    plan = planned(unchanged(item), world([*front(service()), *pairs], table({"qwen": proxies})))
    assert steps(plan, "data-proxy") == f"+{ahead} -{ahead} -{1 - ahead} +{1 - ahead}"
    assert steps(plan) == f"-{1 - ahead} +{1 - ahead}"


@pytest.mark.parametrize(
    ("strategy", "seconds"),
    [
        ({"minReadySeconds": 3}, 3.0),
        ({"minReadySeconds": 3, "keepOldSeconds": 5}, 3.0),
        ({"keepOldSeconds": 5}, None),
        ({"type": "BlueGreen", "minReadySeconds": 3, "keepOldSeconds": 5}, 5.0),
        ({"type": "BlueGreen", "minReadySeconds": 6, "keepOldSeconds": 5}, 6.0),
    ],
)
def test_successors_must_stay_ready_before_old_ones_are_drained(strategy: Any, seconds: float | None) -> None:
    plan = moved(1, {"strategy": strategy}, 1)
    soaks = [op for op in plan.ops if op.verb is Verb.SOAK]
    assert [op.args.seconds for op in soaks] == ([] if seconds is None else [seconds])
    drains = [op for op in plan.ops if op.verb is Verb.DRAIN]
    assert all(soak.id in drain.needs for soak in soaks for drain in drains)


def test_rolling_update_waits_for_the_record_and_names_its_cause() -> None:
    plan = moved(1, {}, 1)
    assert {op.args.successor for op in plan.ops if op.verb is Verb.SPAWN} == {True}
    assert [op.to_text() for op in plan.ops] == [
        "[] -> #1 Model/qwen, record, spec.path changed",
        "[1] -> #2 Model/qwen engine/0, spawn, spec.path changed",
        "[2] -> #3 Model/qwen engine/0, await-ready, started",
        "[1] -> #4 Model/qwen data-proxy/0, spawn, spec.path changed",
        "[3,4] -> #5 Model/qwen data-proxy/0, await-ready, started",
        "[3,5] -> #6 Model/qwen data-proxy/0, warm-up, before it is routed",
        "[6] -> #7 Model/qwen routes, route, successors are warm: spec.path changed",
        "[7] -> #8 Model/qwen data-proxy, drain, replaced: spec.path changed",
        "[8] -> #9 Model/qwen routes, route, the old ones are drained",
        "[9] -> #10 Model/qwen data-proxy/0, stop, replaced: spec.path changed",
        "[10] -> #11 Model/qwen engine/0, stop, replaced: spec.path changed",
        "[3,5,7,9] -> #12 Model/qwen routes, visible, users ask the gateway",
    ]


def test_recreate_waits_for_the_record_and_names_its_cause() -> None:
    plan = moved(1, {"strategy": {"type": "Recreate"}})
    assert {op.args.successor for op in plan.ops if op.verb is Verb.SPAWN} == {False}
    assert [op.to_text() for op in plan.ops] == [
        "[] -> #1 Model/qwen, record, spec.path changed",
        "[1] -> #2 Model/qwen data-proxy, drain, makes room: spec.path changed",
        "[2] -> #3 Model/qwen routes, route, makes room: spec.path changed",
        "[3] -> #4 Model/qwen data-proxy/0, stop, makes room: spec.path changed",
        "[4] -> #5 Model/qwen engine/0, stop, makes room: spec.path changed",
        "[5] -> #6 Model/qwen engine/0, spawn, spec.path changed",
        "[6] -> #7 Model/qwen engine/0, await-ready, started",
        "[5] -> #8 Model/qwen data-proxy/0, spawn, spec.path changed",
        "[7,8] -> #9 Model/qwen data-proxy/0, await-ready, started",
        "[7,9] -> #10 Model/qwen data-proxy/0, warm-up, before it is routed",
        "[10] -> #11 Model/qwen routes, route, successors are warm",
        "[3,7,9,11] -> #12 Model/qwen routes, visible, users ask the gateway",
    ]


@pytest.mark.parametrize(("tensor", "count", "free", "fits"), [(4, 1, 4, True), (2, 4, 8, True), (2, 4, 7, False)])
def test_new_replicas_need_exactly_their_gpus(tensor: int, count: int, free: int, fits: bool) -> None:
    target = created("Model", "qwen", {**GPU, "service": "default", "backend": f"sglang:t{tensor}", "replicas": count})
    if fits:
        assert steps(planned(target, world(front(service())), free)) == " ".join(f"+{n}" for n in range(count))
        return
    with pytest.raises(NoCapacity, match="needs 8 GPUs for 4 new replicas; 7 are free"):
        planned(target, world(front(service())), free)


def test_missing_replica_without_a_gpu_is_refused_with_a_hint() -> None:
    _, item, observed = steady(1, GPU)
    gone = replace(observed, runs={**observed.runs, MODEL: ()}, routes={SERVICE: table({})})
    (refused,) = (part for part in planned(unchanged(item), gone).objects if part.ref == MODEL)
    assert refused.refusal is not None
    assert (refused.action, refused.refusal.hint) == ("blocked", str(FEWER_REPLICAS))


def superfluous(count: int, spec: dict[str, Any]) -> tuple[StoredObject, Observed]:
    """One replica is wanted, of which a process has died, and ``count`` run and are routed."""
    _, _, observed = steady(count, spec)
    return model({**spec, "replicas": 1}), without(observed, "qwen-engine-0", Phase.EXITED)


def test_superfluous_replicas_serve_until_the_wanted_ones_do() -> None:
    item, observed = superfluous(2, {})
    plan = planned(unchanged(item), observed)
    assert (plan.destructive, plan.objects[1].action) == ((), "heal")
    assert of_model(plan) == [
        "spawn engine/0",
        "await-ready engine/0",
        "drain data-proxy",
        "route routes",
        "stop data-proxy/1",
        "stop engine/1",
        "visible routes",
    ]


@pytest.mark.parametrize(
    ("ready", "free", "order"), [(2, 1, "+0 -1 -2"), (2, 0, "-1 -2 +0"), (1, 0, "-1 -2 +0"), (0, 0, "-1 -2 +0")]
)
def test_superfluous_replicas_stop_first_only_without_a_spare_gpu(ready: int, free: int, order: str) -> None:
    item, observed = superfluous(3, GPU)
    for index in (1, 2)[ready:]:
        observed = seen_as(observed, f"qwen-data-proxy-{index}", Seen.NOT_READY)
        observed = seen_as(observed, f"qwen-engine-{index}", Seen.NOT_READY)
    plan = planned(unchanged(item), observed, free)
    assert steps(plan) == order
    said = f"{MODEL}: superfluous replicas stop before the 1 wanted ones are ready: no spare GPU"
    assert plan.destructive == ((said,) if ready and not free else ())


def test_superfluous_replica_without_a_route_is_stopped_without_a_drain() -> None:
    _, item, observed = steady()
    served = list(observed.of(MODEL))
    seen = world([*front(service()), *served, *replica(item, 1)], table({"qwen": served[1:]}))
    plan = planned(unchanged(item), seen)
    assert of_model(plan) == ["stop data-proxy/1", "stop engine/1"]


def test_superfluous_replica_stops_last_where_no_wanted_one_serves() -> None:
    """Replicas 0 and 1 are to be replaced; 2, which is not wanted any more, serves."""
    _, item, observed = steady(3)
    target = changed(item, {**item.spec, "replicas": 2, "path": "models/other"})
    assert steps(planned(target, observed)) == "-2 +0 -0 +1 -1"
    for index in (0, 1):
        observed = seen_as(observed, f"qwen-data-proxy-{index}", Seen.NOT_READY)
        assert steps(planned(target, observed)) == "+0 -0 +1 -1 -2"


def test_superfluous_replicas_stay_while_a_data_proxy_waits_for_its_engine() -> None:
    """The engine of replica 0 has died and its data proxy is not ready: that is decided in the next pass."""
    _, _, observed = steady(3)
    observed = seen_as(without(observed, "qwen-engine-0", Phase.EXITED), "qwen-data-proxy-0", Seen.NOT_READY)
    plan = planned(unchanged(model({"replicas": 2})), observed)
    assert of_model(plan) == ["spawn engine/0", "await-ready engine/0", "visible routes"]
    unrouted = planned(unchanged(model({"replicas": 2})), routed(observed, {}))
    assert "qwen-data-proxy-0" not in next(op for op in unrouted.ops if op.verb is Verb.ROUTE).runs


def test_plan_awaits_no_visible_routes_where_nothing_is_routed() -> None:
    _, item, observed = steady(1)
    observed = seen_as(without(observed, "qwen-engine-0", Phase.EXITED), "qwen-data-proxy-0", Seen.NOT_READY)
    assert of_model(planned(unchanged(item), routed(observed, {}))) == ["spawn engine/0", "await-ready engine/0"]


def test_hidden_superfluous_replica_is_named_and_left() -> None:
    _, item, observed = steady(3)
    hidden = without(observed, "qwen-engine-2", Phase.UNKNOWN)
    plan = planned(with_layer(item, "scale", {"replicas": 2}, "scaled 3 -> 2"), hidden)
    assert of_model(plan) == ["record"]
    assert [why.partition(":")[0] for why in plan.unknown] == ["Model/qwen engine/2"]


@pytest.mark.parametrize(
    ("states", "ops", "drift"),
    [
        ({"qwen-data-proxy-0": "ready", "qwen-data-proxy-1": "ready"}, [], []),
        ({"qwen-data-proxy-0": "draining", "qwen-data-proxy-1": "ready"}, ["a drain was interrupted"], []),
        ({"qwen-data-proxy-0": "ready", "qwen-data-proxy-1": "cordoned"}, ["a drain was interrupted"], []),
        (
            {"qwen-data-proxy-0": "ready", "qwen-data-proxy-1": "dead"},
            ["route-dead: 1 of 2 replicas are ready, and the router does not hear from them"],
            ["route-dead"],
        ),
        (
            {"qwen-data-proxy-1": "ready"},
            ["route-missing: 1 of 2 replicas are not in the router's table"],
            ["route-missing"],
        ),
    ],
)
def test_routes_are_restored_by_the_state_of_each_replica(states: Any, ops: list[str], drift: list[str]) -> None:
    _, item, observed = steady(2)
    plan = planned(unchanged(item), routed(observed, states))
    assert [op.cause for op in plan.ops if op.verb is Verb.ROUTE] == ops
    assert [each.kind for each in plan.drift] == drift


def test_routed_replica_that_is_not_ready_stays_routed() -> None:
    _, item, observed = steady(2)
    for state in ("ready", "dead"):
        states = {"qwen-data-proxy-0": "ready", "qwen-data-proxy-1": state}
        busy = routed(seen_as(observed, "qwen-data-proxy-1", Seen.NOT_READY), states)
        plan = planned(unchanged(item), busy)
        assert (of_model(plan), plan.drift) == (["await-ready data-proxy/1", "visible routes"], ())


def test_interrupted_drain_of_a_superfluous_replica_goes_on() -> None:
    _, _, observed = steady(2)
    item = model({"replicas": 1})
    plan = planned(unchanged(item), routed(observed, {"qwen-data-proxy-0": "ready", "qwen-data-proxy-1": "draining"}))
    assert of_model(plan)[0] == "drain data-proxy"
    assert [op.cause for op in plan.ops if op.verb is Verb.ROUTE] == ["not one of 1 replicas"]


def test_restarted_router_gets_superfluous_replicas_that_relays_may_still_pick() -> None:
    _, _, observed = steady(2)
    item = model({"replicas": 1})
    empty = replace(observed, routes={SERVICE: table({}, synced=False)})

    def first_routes(seen: Observed) -> tuple[str, ...]:
        return next(op.runs for op in planned(unchanged(item), seen).ops if op.verb is Verb.ROUTE)

    assert first_routes(empty) == ("qwen-data-proxy-0", "qwen-data-proxy-1")
    assert first_routes(seen_as(empty, "qwen-data-proxy-1", Seen.NOT_READY)) == ("qwen-data-proxy-0",)
    whole = replace(observed, routes={SERVICE: table({"other": []})})
    assert first_routes(whole) == ("qwen-data-proxy-0",)


def neighbour(observed: Observed, item: StoredObject) -> list[str]:
    """What is done of the model where another one is applied."""
    asked, home = created("Model", "asked", {"service": "default", "backend": "embedded:d1", "path": "m"}), service()
    plan = make_plan(PlanScope((asked,), context=(unchanged(home), unchanged(item))), observed, Policy())
    return [f"{op.verb} {' '.join(op.runs)}".strip() for op in plan.ops if op.ref == MODEL]


def test_restarted_router_gets_the_ready_replicas_of_a_neighbour() -> None:
    _, item, observed = steady(3)
    empty = replace(observed, routes={SERVICE: table({}, synced=False)})
    assert neighbour(empty, item) == ["route " + " ".join(f"qwen-data-proxy-{n}" for n in range(3)), "visible"]
    half = seen_as(empty, "qwen-data-proxy-1", Seen.NOT_READY)
    assert neighbour(half, item)[0] == "route qwen-data-proxy-0 qwen-data-proxy-2"
    assert neighbour(replace(observed, routes={SERVICE: table({})}), item) == [], "a whole table is not its business"
    assert neighbour(empty, model({"replicas": 3, "suspend": True})) == []
    dead = {f"qwen-data-proxy-{n}": "dead" for n in range(3)}
    assert neighbour(routed(observed, dead), item) == []


def test_nothing_is_done_behind_a_router_that_cannot_be_seen() -> None:
    _, item, observed = steady(2)
    hidden = replace(without(observed, "default-router-0", Phase.UNKNOWN), routes={})
    assert of_model(planned(changed(item, {**item.spec, "path": "models/other"}), hidden)) == ["record"]


def test_plan_does_not_await_routes_that_it_cannot_see() -> None:
    _, item, observed = steady(1)
    died = without(observed, "qwen-engine-0")
    heals = ["restart-now engine/0", "await-ready engine/0"]
    assert of_model(planned(unchanged(item), died)) == [*heals, "visible routes"]
    assert of_model(planned(unchanged(item), without(died, "default-gateway-0", Phase.UNKNOWN))) == heals
    assert of_model(planned(unchanged(item), replace(died, routes={SERVICE: "it does not answer"}))) == heals


def test_model_without_replicas_stays_declared_at_the_router() -> None:
    _, item, observed = steady(1)
    to_zero = planned(with_layer(item, "scale", {"replicas": 0}, "scaled 1 -> 0"), observed)
    assert of_model(to_zero) == ["record", "drain data-proxy", "unroute routes", "stop data-proxy/0", "stop engine/0"]
    spec = {"service": "default", "backend": "embedded:d1", "path": "m", "replicas": 0}
    new = planned(created("Model", "qwen", spec), world(front(service()), table({})))
    assert [op.to_text() for op in new.ops] == [
        "[] -> #1 Model/qwen, record, new object",
        "[1] -> #2 Model/qwen routes, unroute, not one of 0 replicas",
    ]
    assert [op.args.declared for op in (*to_zero.ops, *new.ops) if op.verb is Verb.UNROUTE] == [True, True]
    declared = world(front(service()), table({"qwen": []}))
    assert planned(unchanged(model({"replicas": 0})), declared).is_empty
    stale = world(front(service()), snapshot({"qwen": [("gone", "http://127.0.0.1:22000", "ready")]}))
    assert of_model(planned(unchanged(model({"replicas": 0})), stale)) == ["unroute routes"]


def test_deletion_drains_the_data_proxies_that_live() -> None:
    home, item, observed = steady(2)
    scope = PlanScope((Target(item, "delete"),), (unchanged(home),))
    plan = make_plan(scope, without(observed, "qwen-data-proxy-1", Phase.EXITED), Policy())
    drains = [op for op in plan.ops if op.verb is Verb.DRAIN]
    assert [(op.run, op.args.seconds) for op in drains] == [("qwen-data-proxy-0", 600.0)]
    assert {op.cause for op in plan.ops if op.ref == MODEL and op.verb is Verb.ERASE} == {"deleted"}
    assert [op.args.declared for op in plan.ops if op.verb is Verb.UNROUTE] == [False]
    suspended = PlanScope(scope.targets, (unchanged(service({"suspend": True})),))
    without_router = make_plan(suspended, world(observed.of(MODEL)), Policy())
    assert {Verb.DRAIN, Verb.UNROUTE} & {op.verb for op in without_router.ops} == set()


def test_gpus_that_a_dead_engine_left_in_use_are_free_after_its_sweep() -> None:
    _, item, observed = steady(1, GPU)
    dead = without(observed, "qwen-engine-0", Phase.DEAD)
    held = replace(dead, capacity=Capacity(squatters={"GPU-of-qwen-engine-0-0": "pid 7"}))
    assert steps(planned(unchanged(item), held)) == "-0 +0"
    leased = planned(unchanged(item), replace(dead, capacity=Capacity(squatters={"GPU-9": "pid 7"})))
    assert [part.action for part in leased.objects] == ["unchanged", "blocked"], "its lease is free already"


def test_lost_key_replaces_processes_and_is_announced() -> None:
    _, item, observed = steady(1)
    (engine, proxy) = observed.of(MODEL)
    runs = {**observed.runs, MODEL: (replace(engine, key_fault="its key file is gone"), proxy)}
    plan = planned(unchanged(item), replace(observed, runs=runs))
    assert [each.kind for each in plan.drift] == ["key-lost"]
    sentence = "its key file is gone; requests fail until every process has a new one"
    assert plan.destructive == (f"{MODEL}: {sentence}",)
    assert steps(plan) == "+0 -0"


def test_damaged_record_of_a_process_that_stays_is_written_again() -> None:
    _, item, observed = steady(1)
    (engine, proxy) = observed.of(MODEL)
    damaged = replace(engine, state=replace(engine.state, damage="intent.json is empty"))
    seen = replace(observed, runs={**observed.runs, MODEL: (damaged, proxy)})
    plan = planned(unchanged(item), seen)
    assert [op.to_text() for op in plan.ops] == [
        "[] -> #1 Model/qwen engine/0, repair-record, record-damaged: intent.json is empty"
    ]
    assert [each.kind for each in plan.drift] == ["record-damaged"]
    rolled = planned(changed(item, {**item.spec, "path": "models/other"}), seen)
    assert Verb.REPAIR not in {op.verb for op in rolled.ops}
