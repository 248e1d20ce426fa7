"""Plans of a kind of plain processes: as many as its replicas, each with a successor before it stops."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from areal.reconcilers.desired import Target
from areal.reconcilers.observe import Observed
from areal.reconcilers.plan import Plan, Verb
from areal.reconcilers.planner import make_plan
from areal.reconcilers.planning import PlanScope, Policy
from areal.resources.kinds import register, unregister
from areal.runtime.backends.base import Phase
from areal.state.records import StoredObject
from tests.reconcilers.toy import TOY
from tests.reconcilers.worlds import changed, created, run, stored, unchanged, without, world

SPEC = {"words": "hello"}


@pytest.fixture(autouse=True)
def toy() -> Iterator[None]:
    register(TOY)
    yield
    unregister("Toy")


def parrot(**spec: Any) -> StoredObject:
    return stored("Toy", "parrot", {**SPEC, **spec})


def steady(count: int, **spec: Any) -> tuple[StoredObject, Observed]:
    item = parrot(replicas=count, **spec)
    return item, world([run(item, "speaker", index) for index in range(count)])


def planned(target: Target, observed: Observed, policy: Policy | None = None) -> Plan:
    return make_plan(PlanScope((target,)), observed, policy or Policy())


def texts(plan: Plan) -> list[str]:
    return [op.to_text().replace("Toy/parrot", "it") for op in plan.ops]


def test_new_object_starts_its_processes_side_by_side() -> None:
    assert texts(planned(created("Toy", "parrot", {**SPEC, "replicas": 2}), Observed())) == [
        "[] -> #1 it, record, new object",
        "[1] -> #2 it speaker/0, spawn, no process",
        "[2] -> #3 it speaker/0, await-ready, started",
        "[1] -> #4 it speaker/1, spawn, no process",
        "[4] -> #5 it speaker/1, await-ready, started",
    ]


def test_steady_object_has_an_empty_plan() -> None:
    item, observed = steady(2)
    assert planned(unchanged(item), observed).is_empty


def test_successor_is_ready_before_the_old_process_stops() -> None:
    item, observed = steady(1)
    plan = planned(changed(item, {**item.spec, "words": "bye"}), observed)
    assert texts(plan) == [
        "[] -> #1 it, record, spec.words changed",
        "[1] -> #2 it speaker/0, spawn, spec.words changed",
        "[2] -> #3 it speaker/0, await-ready, started",
        "[3] -> #4 it speaker/0, stop, replaced: spec.words changed",
    ]
    assert [op.args.successor for op in plan.ops if op.verb is Verb.SPAWN] == [True]


@pytest.mark.parametrize(
    ("spec", "stops"),
    [
        ({"replicas": 1}, ["[1] -> #2 it speaker/1, stop, not one of 1 replicas"]),
        ({"suspend": True}, [f"[1] -> #{2 + n} it speaker/{n}, stop, suspended" for n in (0, 1)]),
    ],
)
def test_superfluous_processes_stop(spec: dict[str, Any], stops: list[str]) -> None:
    item, observed = steady(2)
    assert texts(planned(changed(item, {**item.spec, **spec}), observed))[1:] == stops
    hidden = planned(changed(item, {**item.spec, **spec}), without(observed, "parrot-speaker-1", Phase.UNKNOWN))
    assert [why.partition(":")[0] for why in hidden.unknown] == ["Toy/parrot speaker/1"]
    assert not any(op.verb is Verb.STOP and op.run == "parrot-speaker-1" for op in hidden.ops)


def test_dead_process_is_swept_before_it_starts_again() -> None:
    item, observed = steady(2)
    plan = planned(unchanged(item), without(observed, "parrot-speaker-1", Phase.DEAD))
    assert texts(plan) == [
        "[] -> #1 it speaker/1, stop, sweep what its session left",
        "[1] -> #2 it speaker/1, spawn, process-died: killed by SIGKILL",
        "[2] -> #3 it speaker/1, await-ready, started",
    ]


@pytest.mark.parametrize(("action", "cause"), [("delete", "deleted"), ("prune", "pruned")])
def test_ending_object_is_stopped_and_erased(action: Any, cause: str) -> None:
    item, observed = steady(1)
    assert texts(planned(Target(item, action), observed)) == [
        f"[] -> #1 it speaker/0, stop, {cause}",
        f"[1] -> #2 it speaker/0, forget, {cause}",
        f"[1,2] -> #3 it, erase, {cause}",
    ]


def test_object_that_is_replaced_is_recorded_again() -> None:
    item, observed = steady(1)
    plan = planned(changed(item, {**item.spec, "maker": "zeta"}, replace_it=True), observed)
    assert texts(plan) == [
        "[] -> #1 it speaker/0, stop, replaced: spec.maker is immutable",
        "[1] -> #2 it speaker/0, forget, replaced: spec.maker is immutable",
        "[1,2] -> #3 it, erase, replaced: spec.maker is immutable",
        "[3] -> #4 it, record, created again: spec.maker is immutable",
        "[4] -> #5 it speaker/0, spawn, no process",
        "[5] -> #6 it speaker/0, await-ready, started",
    ]


def test_neighbour_that_was_not_asked_for_is_left_alone() -> None:
    item, observed = steady(1)
    scope = PlanScope((created("Toy", "other", SPEC),), context=(unchanged(item),))
    plan = make_plan(scope, without(observed, "parrot-speaker-0"), Policy())
    assert {op.ref for op in plan.ops} == {"Toy/other"}
