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
from areal.reconcilers.kinds.model_plan import gpus_per_replica, replica_count
from areal.reconcilers.plan import Op, Plan, Verb
from areal.reconcilers.planning import unseen
from areal.resources.validation import effective
from tests.reconcilers.histories import Chances, Wish, rollouts, wishes, worlds
from tests.reconcilers.simulator import Pick, Simulation, answers
from tests.reconcilers.worlds import SERVICE

DESTRUCTIVE = (Verb.STOP, Verb.FORGET, Verb.DRAIN)
many = settings(
    max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)


def orders() -> st.SearchStrategy[Pick]:
    """The order in which ops that may run do run: as planned, backwards, greedy for processes, or any other."""
    fixed: list[Pick] = [lambda ops: ops[0], lambda ops: ops[-1], starts_first, stops_first]
    shuffled = st.integers(0, 2**32).map(lambda seed: random.Random(seed).choice)
    return st.sampled_from(fixed) | shuffled


def starts_first(ops: Sequence[Op]) -> Op:
    return min(ops, key=lambda op: (op.verb is Verb.STOP, op.verb is not Verb.SPAWN, op.id))


def stops_first(ops: Sequence[Op]) -> Op:
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
def test_any_wish_over_any_past_comes_true_within_the_passes_and_leaves_no_run_over(
    world: Simulation, wish: Wish, pick: Pick
) -> None:
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
    front = [slot(run) for run in world.runs.values() if run.is_live and run.state.spec.owner == SERVICE]
    assert sorted(front) == ([] if home.spec.get("suspend") else ["gateway/0", "router/0"])
    for ref, item in world.stored.items():
        if item.kind == "Model" and ref not in refused and (ref in wish.specs or SERVICE in wish.specs):
            assert_whole(world, ref)


def assert_whole(world: Simulation, ref: str) -> None:
    item, home = world.stored[ref], world.stored[SERVICE]
    spec = effective("Model", item.spec)
    idle = spec.suspend or home.spec.get("suspend")
    count = 0 if idle else replica_count(spec)
    live = [run for run in world.runs.values() if run.is_live and run.state.spec.owner == ref]
    parts = ("data-proxy",) if spec.external else ("data-proxy", "engine")
    assert sorted(map(slot, live)) == sorted(f"{part}/{index}" for part in parts for index in range(count))
    for run in live:
        assert answers(run)
        assert world.engine_answers(run)
        wanted, had = effective("Model", item.spec), effective("Model", run.state.spec.spec)
        assert wanted.path == had.path
        if run.state.spec.component == "engine":
            assert len(run.state.spec.gpus) == gpus_per_replica(spec)
        else:
            assert wanted.chat_template == had.chat_template
    if SERVICE in world.tables:
        routed = {uid for uid, _, state in world.tables[SERVICE].models.get(item.name, ()) if state == "ready"}
        assert routed == {run.uid for run in live if run.state.spec.component == "data-proxy"}


def slot(run: Any) -> str:
    return f"{run.state.spec.component}/{run.state.spec.replica}"


@many
@given(worlds(), wishes())
def test_planning_twice_gives_the_same_plan(world: Simulation, wish: Wish) -> None:
    first, _ = planned(world, wish)
    again, _ = planned(world.copy(), wish)
    assert first == again
    assert first.to_text() == again.to_text()


@many
@given(worlds(), wishes())
def test_needs_of_ops_only_name_earlier_ops_and_every_op_has_a_cause(world: Simulation, wish: Wish) -> None:
    plan, _ = planned(world, wish)
    assert [op.id for op in plan.ops] == list(range(1, len(plan.ops) + 1))
    for op in plan.ops:
        assert all(need < op.id for need in (*op.needs, *op.args.get("after", ())))
        assert op.cause


@many
@given(worlds(), wishes(), orders(), st.integers(0, 40))
def test_a_plan_interrupted_anywhere_is_finished_by_planning_again(
    world: Simulation, wish: Wish, pick: Pick, moment: int
) -> None:
    assume(not world.unreadable)
    plan, targets = planned(world, wish)
    world.run(plan, targets, pick, stop_after=moment)
    event("interrupted" if moment < len(plan.ops) else "whole")
    _, last = converge(world, wish, pick)
    assert_true_to(world, wish, last)


@many
@given(worlds(Chances(unknown=True)), wishes(), orders())
def test_nothing_is_ever_done_to_what_cannot_be_seen(world: Simulation, wish: Wish, pick: Pick) -> None:
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
def test_what_serves_goes_on_serving_while_it_is_changed(world: Simulation, wish: Wish, pick: Pick) -> None:
    plan, targets = planned(world, wish)
    served = {name: count for name in ("alpha", "beta") if (count := must_go_on(world, plan, targets, name))}
    event(f"{len(served)} models serve")
    floors = dict.fromkeys(served, 1)

    def watching(ops: Sequence[Op]) -> Op:
        check()
        return pick(ops)

    def check() -> None:
        for name, floor in floors.items():
            now = world.serving(name)
            assert now is not None and now >= floor, f"{name}: {now} of {served[name]} replicas serve"

    world.run(plan, targets, watching)
    check()


def must_go_on(world: Simulation, plan: Plan, targets: dict[str, Target], name: str) -> int:
    """How many replicas serve a model today whose service must not be interrupted; 0 where it may be."""
    ref = f"Model/{name}"
    target, home = targets.get(ref), targets.get(SERVICE)
    if target is None or home is None or target.gone or home.gone:
        return 0
    spec, front = effective("Model", target.object.spec), effective("InferenceService", home.object.spec)
    stops = spec.suspend or front.suspend or replica_count(spec) == 0
    allowed = any(sentence.startswith((f"{ref}:", f"{SERVICE}: the key")) for sentence in plan.destructive)
    return 0 if stops or allowed else world.serving(name) or 0


@many
@given(worlds(Chances(serving=True)), rollouts(), orders())
def test_a_rollout_loses_no_more_capacity_than_it_says(world: Simulation, wish: Wish, pick: Pick) -> None:
    """Without a word about it in the plan, as many replicas serve as before, or as are wanted."""
    plan, targets = planned(world, wish)
    floors = {}
    for name in ("alpha", "beta"):
        serving = must_go_on(world, plan, targets, name)
        if serving:
            floors[name] = min(serving, replica_count(effective("Model", targets[f"Model/{name}"].object.spec)))

    def watching(ops: Sequence[Op]) -> Op:
        for name, floor in floors.items():
            now = world.serving(name)
            assert now is not None and now >= floor, f"{name}: {now} serve, {floor} did or are wanted"
        return pick(ops)

    world.run(plan, targets, watching)


@many
@given(worlds(Chances(serving=True)), rollouts(), orders(), st.data())
def test_when_new_processes_die_the_old_ones_serve_on_and_a_later_plan_comes_true(
    world: Simulation, wish: Wish, pick: Pick, data: st.DataObject
) -> None:
    assume(not world.unreadable)
    plan, targets = planned(world, wish)
    started = sorted({op.run for op in plan.ops if op.verb is Verb.SPAWN and op.ref != SERVICE})
    assume(started)
    dead = data.draw(st.sets(st.sampled_from(started), min_size=1, max_size=2))
    floors = [name for name in ("alpha", "beta") if must_go_on(world, plan, targets, name)]
    world.run(plan, targets, pick, dies=lambda op: op.run in dead)
    for name in floors:
        assert (world.serving(name) or 0) >= 1, f"{name} does not serve any more"
    _, last = converge(world, wish, pick)
    assert_true_to(world, wish, last)


@many
@given(worlds(), wishes())
def test_capacity_is_only_refused_when_the_machine_is_too_small(world: Simulation, wish: Wish) -> None:
    world.free_gpus = 100
    wish.plan(world)
