"""What must hold for any past and any wish: nothing is hurt on the way, and in the end the wish has come true."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from hypothesis import HealthCheck, assume, event, given, note, settings
from hypothesis import strategies as st

from areal.errors import NoCapacity
from areal.reconcilers.converge import MAX_PASSES
from areal.reconcilers.desired import Target
from areal.reconcilers.kinds import controller_of, host_of
from areal.reconcilers.kinds.agent_plan import session_settings
from areal.reconcilers.kinds.model_plan import gpus_per_replica, replica_count
from areal.reconcilers.observe import ObservedRun
from areal.reconcilers.plan import Op, Plan, Verb
from areal.reconcilers.planning import unseen
from areal.resources.validation import effective
from tests.reconcilers.histories import AGENTS, MODELS, Chances, Wish, rollouts, wishes, worlds
from tests.reconcilers.simulator import Pick, Simulation, answers
from tests.reconcilers.worlds import SERVICE

SERVED = (*(f"Model/{name}" for name in MODELS), AGENTS)
DESTRUCTIVE = (Verb.STOP, Verb.FORGET, Verb.DRAIN)
many = settings(
    max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)


def orders() -> st.SearchStrategy[Pick]:
    """The order in which ops that may run do run: as planned, backwards, greedy for processes, or any other."""
    fixed: list[Pick] = [lambda ops: ops[0], lambda ops: ops[-1], starts_first, stops_first]
    shuffled = st.integers(0, 2**32).map(lambda seed: random.Random(seed).choice)
    return st.sampled_from(fixed) | shuffled


def starts_first(ops: Sequence[Op[Any]]) -> Op[Any]:
    return min(ops, key=lambda op: (op.verb is Verb.STOP, op.verb is not Verb.SPAWN, op.id))


def stops_first(ops: Sequence[Op[Any]]) -> Op[Any]:
    return min(ops, key=lambda op: (op.verb is not Verb.STOP, op.id))


def planned(world: Simulation, wish: Wish) -> tuple[Plan, dict[str, Target]]:
    """The plan, for worlds and wishes that fit on the machine."""
    try:
        return wish.plan(world)
    except NoCapacity:
        assume(False)
        raise


def converge(world: Simulation, wish: Wish, pick: Pick) -> tuple[int, Plan]:
    """Plan and do until nothing is left; how many passes that took, and the empty plan in the end."""
    for passes in range(MAX_PASSES + 1):
        plan, targets = planned(world, wish)
        note(plan.to_text())
        if plan.is_empty:
            return passes, plan
        assert passes < MAX_PASSES, f"still not done after {MAX_PASSES} passes:\n{plan.to_text()}"
        report = world.run(plan, targets, pick)
        stuck = [op.to_text() for op in plan.ops if op.id not in report.done]
        assert not stuck, f"ops that never become possible: {stuck}"
    raise AssertionError


@many
@given(worlds(), wishes(), orders())
def test_any_target_state_is_reached_within_passes(world: Simulation, wish: Wish, pick: Pick) -> None:
    assume(not world.unreadable)
    passes, last = converge(world, wish, pick)
    event(f"{passes} passes")
    assert_true_to(world, wish, last)


def assert_true_to(world: Simulation, wish: Wish, last: Plan) -> None:
    refused = {item.ref for item in last.objects if item.refusal is not None}
    for ref, spec in wish.specs.items():
        assert (ref in world.stored) == (spec is not None)
    for run in world.runs.values():
        assert run.state.spec.owner in world.stored, f"{run.uid} is left over"
    home = world.stored.get(SERVICE)
    if home is None:
        assert not any(run.is_live for run in world.runs.values())
        return
    assert_front(world, SERVICE)
    for ref, item in world.stored.items():
        if item.kind == "Model" and ref not in refused and (ref in wish.specs or SERVICE in wish.specs):
            assert_whole(world, ref)
    if AGENTS in world.stored and AGENTS in wish.specs:
        assert_front(world, AGENTS)
        assert_pairs(world)


def assert_front(world: Simulation, ref: str) -> None:
    parts = ("router", "gateway")
    live = [run for run in world.runs.values() if run.is_live and run.state.spec.owner == ref]
    front = sorted(slot(run) for run in live if run.state.spec.component in parts)
    assert front == ([] if world.stored[ref].spec.get("suspend") else ["gateway/0", "router/0"])


def assert_whole(world: Simulation, ref: str) -> None:
    item, home = world.stored[ref], world.stored[SERVICE]
    spec = effective("Model", item.spec)
    idle = spec.suspend or home.spec.get("suspend")
    count = 0 if idle else replica_count(spec)
    parts = ("data-proxy",) if spec.external else ("data-proxy", "engine")
    live = assert_replicas(world, ref, SERVICE, parts, count)
    for run in live:
        wanted, had = effective("Model", item.spec), effective("Model", run.state.spec.spec)
        assert wanted.path == had.path
        if run.state.spec.component == "engine":
            assert len(run.state.spec.gpus) == gpus_per_replica(spec)
        else:
            assert wanted.chat_template == had.chat_template


def assert_pairs(world: Simulation) -> None:
    item, home = world.stored[AGENTS], world.stored[SERVICE]
    spec = effective("AgentService", item.spec)
    place = effective("InferenceService", home.spec).gateway
    told = f"http://{place.host}:{place.port}" if spec.inference is not None else None
    live = assert_replicas(world, AGENTS, AGENTS, ("data-proxy", "worker"), 0 if spec.suspend else spec.pairs)
    for run in live:
        had = effective("AgentService", run.state.spec.spec)
        if run.state.spec.component == "worker":
            assert (had.agent, had.env, had.log_level) == (spec.agent, spec.env, spec.log_level)
        else:
            assert (had.inference, run.settings) == (spec.inference, session_settings(spec))
            assert run.state.spec.inputs.get("inferenceUrl") == told
    for gate in filter(answers, world.of(AGENTS, "gateway")):
        assert gate.state.spec.inputs.get("inferenceUrl") == told
        assert effective("AgentService", gate.state.spec.spec).gateway == spec.gateway


def assert_replicas(world: Simulation, ref: str, home: str, parts: Sequence[str], count: int) -> list[ObservedRun]:
    """The live processes, which are those of ``count`` replicas, whole and routed."""
    owned = [run for run in world.runs.values() if run.is_live and run.state.spec.owner == ref]
    live = [run for run in owned if run.state.spec.component in parts or ref != home]
    live = [run for run in live if run.state.spec.component not in ("router", "gateway")]
    assert sorted(map(slot, live)) == sorted(f"{part}/{index}" for part in parts for index in range(count))
    assert all(answers(run) and world.engine_answers(run) for run in live)
    if home in world.tables:
        entry = world.tables[home].models.get(ref.partition("/")[2])
        routed = {each.id for each in entry.workers if each.state == "ready"} if entry is not None else set()
        assert routed == {run.uid for run in live if run.state.spec.component == "data-proxy"}
    return live


def slot(run: Any) -> str:
    return f"{run.state.spec.component}/{run.state.spec.replica}"


@many
@given(worlds(), wishes())
def test_unready_object_is_in_drift_with_cause(world: Simulation, wish: Wish) -> None:
    plan, targets = planned(world, wish)
    named = {drift.ref for drift in plan.drift if drift.message} | {op.ref for op in plan.ops if op.cause}
    named |= {item.ref for item in plan.objects if item.unseen or item.refusal}
    for ref in wish.specs.keys() & targets.keys():
        item = targets[ref].object
        host = targets.get(host_of(item) or "")
        health = controller_of(item.kind).health(ref, item.spec, world.observed(), host.object.spec if host else None)
        if not targets[ref].is_deleted and health.phase not in ("Ready", "Suspended"):
            assert ref in named, f"{ref} is {health.phase}: {health.message}\n{plan.to_text()}"


@many
@given(worlds(), wishes())
def test_planning_is_deterministic(world: Simulation, wish: Wish) -> None:
    first, _ = planned(world, wish)
    again, _ = planned(world.copy(), wish)
    assert first == again
    assert first.to_text() == again.to_text()


@many
@given(worlds(), wishes())
def test_ops_need_only_earlier_ops_and_have_causes(world: Simulation, wish: Wish) -> None:
    plan, _ = planned(world, wish)
    assert [op.id for op in plan.ops] == list(range(1, len(plan.ops) + 1))
    for op in plan.ops:
        assert all(need < op.id for need in (*op.needs, *op.after))
        assert op.cause


@many
@given(worlds(), wishes(), orders(), st.integers(0, 40))
def test_interrupted_plan_is_finished_by_replanning(world: Simulation, wish: Wish, pick: Pick, moment: int) -> None:
    assume(not world.unreadable)
    plan, targets = planned(world, wish)
    world.run(plan, targets, pick, stop_after=moment)
    event("interrupted" if moment < len(plan.ops) else "whole")
    _, last = converge(world, wish, pick)
    assert_true_to(world, wish, last)


@many
@given(worlds(Chances(unknown=True)), wishes(), orders())
def test_unobservable_runs_are_never_touched(world: Simulation, wish: Wish, pick: Pick) -> None:
    hidden = {run.uid for run in unseen(list(world.runs.values()))}
    event("something is out of sight" if hidden else "everything can be seen")
    plan, targets = planned(world, wish)
    for op in plan.ops:
        assert not (op.verb in DESTRUCTIVE and op.run in hidden), op.to_text()
        owners = {world.runs[uid].state.spec.owner for uid in hidden}
        assert not (op.verb is Verb.ERASE and op.ref in owners), op.to_text()
    world.run(plan, targets, pick)  # the simulation refuses to unroute or touch them
    assert hidden <= world.runs.keys()


@many
@given(worlds(Chances(unknown=True, serving=True)), rollouts(), orders())
def test_serving_objects_keep_serving_during_change(world: Simulation, wish: Wish, pick: Pick) -> None:
    plan, targets = planned(world, wish)
    served = {ref: count for ref in SERVED if (count := must_go_on(world, plan, targets, ref))}
    event(f"{len(served)} objects serve")
    floors = dict.fromkeys(served, 1)

    def watching(ops: Sequence[Op[Any]]) -> Op[Any]:
        check()
        return pick(ops)

    def check() -> None:
        for name, floor in floors.items():
            now = world.serving(name)
            assert now is not None and now >= floor, f"{name}: {now} of {served[name]} replicas serve"

    world.run(plan, targets, watching)
    check()


def must_go_on(world: Simulation, plan: Plan, targets: dict[str, Target], ref: str) -> int:
    """How many replicas serve an object today whose service must not be interrupted; 0 where it may be."""
    target, home = targets.get(ref), targets.get(AGENTS if ref == AGENTS else SERVICE)
    if target is None or home is None or target.is_deleted or home.is_deleted:
        return 0
    stops = home.object.spec.get("suspend") or target.object.spec.get("suspend") or wanted_count(target) == 0
    allowed = any(sentence.startswith((f"{ref}: ", f"{SERVICE}: the key")) for sentence in plan.destructive)
    return 0 if stops or allowed else world.serving(ref) or 0


def wanted_count(target: Target) -> int:
    spec = effective(target.object.kind, target.object.spec)
    return spec.pairs if target.ref == AGENTS else replica_count(spec)


@many
@given(worlds(Chances(serving=True)), rollouts(), orders())
def test_rollout_loses_no_unannounced_capacity(world: Simulation, wish: Wish, pick: Pick) -> None:
    """Without a word about it in the plan, as many replicas serve as before, or as are wanted."""
    plan, targets = planned(world, wish)
    floors = {}
    for ref in SERVED:
        serving = must_go_on(world, plan, targets, ref)
        if serving:
            floors[ref] = min(serving, wanted_count(targets[ref]))

    def watching(ops: Sequence[Op[Any]]) -> Op[Any]:
        for name, floor in floors.items():
            now = world.serving(name)
            assert now is not None and now >= floor, f"{name}: {now} serve, {floor} did or are wanted"
        return pick(ops)

    world.run(plan, targets, watching)


@many
@given(worlds(Chances(serving=True)), rollouts(), orders(), st.data())
def test_old_processes_serve_when_new_ones_die(world: Simulation, wish: Wish, pick: Pick, data: st.DataObject) -> None:
    assume(not world.unreadable)
    plan, targets = planned(world, wish)
    started = sorted(
        {op.run for op in plan.ops if op.verb is Verb.SPAWN and "/router/" not in op.run and "/gateway/" not in op.run}
    )
    assume(started)
    dead = data.draw(st.sets(st.sampled_from(started), min_size=1, max_size=2))
    floors = [ref for ref in SERVED if must_go_on(world, plan, targets, ref)]
    world.run(plan, targets, pick, dies=lambda op: op.run in dead)
    for name in floors:
        assert (world.serving(name) or 0) >= 1, f"{name} does not serve any more"
    _, last = converge(world, wish, pick)
    assert_true_to(world, wish, last)


@many
@given(worlds(), wishes())
def test_capacity_is_refused_only_on_small_machine(world: Simulation, wish: Wish) -> None:
    world.free_gpus = 100
    wish.plan(world)
