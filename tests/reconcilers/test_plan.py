"""The parts of a plan: its GPUs, the order of its ops, its words, and what a report says of it."""

from __future__ import annotations

from typing import Any

import pytest

from areal.errors import ArealError, Conflict, InvalidManifest, NoCapacity, TargetFailed, TimedOut
from areal.reconcilers.plan import (
    Drift,
    FieldChange,
    GpuPool,
    ObjectPlan,
    Op,
    Plan,
    PlanBuilder,
    Refusal,
    Report,
    StartRun,
    Verb,
    refusal_of,
    refused_error,
)
from areal.resources.tree import ABSENT, UpdateClass


def test_gpus_are_taken_from_the_free_ones_then_as_ops_free_them() -> None:
    pool = GpuPool(2)
    pool.give(3, 7)
    pool.give(0, 8)
    pool.give(1, 9)
    assert pool.available == 6
    assert (pool.take(1, "a"), pool.available) == ((), 5)
    assert (pool.take(2, "b"), pool.available) == ((7,), 3)
    assert (pool.take(2, "c"), pool.available) == ((7,), 1), "the rest of those that op 7 frees"
    with pytest.raises(NoCapacity, match="d needs 2 GPUs; 1 are free"):
        pool.take(2, "d")
    assert (pool.take(1, "e"), pool.available, pool.take(0, "f")) == ((9,), 0, ())


def test_gpus_of_several_ops_need_all_of_them() -> None:
    pool = GpuPool(1)
    for op in (4, 5, 6):
        pool.give(2, op)
    assert pool.take(6, "a") == (4, 5, 6)
    assert pool.available == 1 and pool.take(1, "b") == (6,)


def test_refused_take_gives_its_block_back() -> None:
    pool = GpuPool(1)
    pool.give(1, 4)
    with pytest.raises(NoCapacity), pool.all_or_nothing():
        pool.take(2, "a")
        pool.take(1, "b")
    assert (pool.available, pool.take(2, "a")) == (2, (4,))


def test_refused_block_leaves_no_ops() -> None:
    build = PlanBuilder()
    first = build.add(Verb.SPAWN, "Model/a", "engine/0", "", run="+a")
    with pytest.raises(NoCapacity), build.all_or_nothing():
        build.add(Verb.SPAWN, "Model/a", "engine/1", "", run="+b")
        build.add(Verb.AWAIT, "Model/b", "engine/0", "")
        raise NoCapacity("none left")
    assert [op.id for op in build.ops()] == [op.id for op in build.ops_of("Model/a")] == [first] == [1]
    assert (build.ops_of("Model/b"), build.spawn_ops(["+b", "+a", "+c"])) == ((), (1,))
    assert build.add(Verb.AWAIT, "Model/a", "engine/0", "", needs=[1, 1]) == 2
    assert build.ready_ops(["Model/a", "Model/none"]) == (2,)


def test_op_that_needs_itself_is_a_mistake() -> None:
    build = PlanBuilder()
    build.add(Verb.RECORD, "Model/a", "", "")
    for later in (2, 3):
        with pytest.raises(AssertionError, match="op 2 needs a later op"):
            build.add(Verb.SPAWN, "Model/a", "", "", needs=[1, later])


@pytest.mark.parametrize(("count", "barrier"), [(16, False), (17, True)])
def test_many_needs_are_joined_by_one_barrier(count: int, barrier: bool) -> None:
    build = PlanBuilder()
    needs = tuple(build.add(Verb.STOP, "Model/a", f"engine/{n}", "") for n in range(count))
    joined = build.barrier("Model/a", "all have ended", needs)
    assert joined == ((count + 1,) if barrier else needs)
    assert build.ops()[-1].needs == (needs if barrier else ())


def test_plan_text_says_what_happens_to_each_object() -> None:
    roll = FieldChange("spec.path", "a", "b", UpdateClass.ROLL)
    added = FieldChange("spec.revision", ABSENT, "main", UpdateClass.META)
    changed = ObjectPlan(
        "Model/a", "configure", "rolling update", "spec.path", (added, roll), ("spec.path from scale",)
    )
    plan = Plan(
        (changed, ObjectPlan("Model/b", "unchanged")),
        (Op(1, Verb.RECORD, "Model/a", "", "spec.path changed"), Op(2, Verb.SPAWN, "Model/a", "engine/0", "x", (1,))),
        (Drift("Model/b", "process-died", "engine/0", "exited 1"),),
        ("Model/a: capacity during the rollout is 1/2",),
        ("Model/b engine/1: cannot be seen",),
    )
    assert plan.to_text().splitlines() == [
        "~ Model/a configure (rolling update), decided by spec.path",
        "    spec.revision: (not set) -> 'main'  (META)",
        "    spec.path: 'a' -> 'b'  (ROLL)",
        "    took spec.path from scale",
        "  Model/b unchanged",
        "! drift Model/b engine/0: process-died: exited 1",
        "? unknown Model/b engine/1: cannot be seen",
        "! Model/a: capacity during the rollout is 1/2",
        "",
        "plan:",
        "  1. record Model/a: spec.path changed",
        "  2. start Model/a engine/0: x (after 1)",
    ]
    assert Plan((ObjectPlan("Model/b", "unchanged"),)).to_text() == "  Model/b unchanged"
    assert plan.summary == "1 to roll, 1 unchanged"
    assert added.to_json() == {"path": "spec.revision", "old": None, "new": "main", "update": "META"}


@pytest.mark.parametrize(
    ("objects", "summary"),
    [
        ((), "no object"),
        ((ObjectPlan("Model/a", "create"),) * 2, "2 to create"),
        ((ObjectPlan("Model/a", "configure", changes=(FieldChange("x", 1, 2, UpdateClass.HOT),)),), "1 to change"),
        (
            (
                ObjectPlan(
                    "Model/a",
                    "configure",
                    changes=(
                        FieldChange("x", 1, 2, UpdateClass.RECREATE),
                        FieldChange("y", 1, 2, UpdateClass.ROLL),
                    ),
                ),
            ),
            "1 to recreate",
        ),
        ((ObjectPlan("Model/a", "delete"), ObjectPlan("Model/b", "prune")), "2 to delete"),
        ((ObjectPlan("Model/a", "replace", changes=(FieldChange("x", 1, 2, UpdateClass.ROLL),)),), "1 to replace"),
        ((ObjectPlan("Model/b", "blocked"), ObjectPlan("Model/a", "heal")), "1 to heal, 1 blocked"),
    ],
)
def test_summary_counts_objects_by_what_happens_to_them(objects: tuple[ObjectPlan, ...], summary: str) -> None:
    assert Plan(objects).summary == summary


def test_digest_changes_with_what_is_done_and_not_with_the_moment() -> None:
    def digest(serial: int = 0, asked: str = "1", **args: Any) -> str:
        given = StartRun(inputs={"restartedAt": asked}, **args)
        return Plan(ops=(Op(1, Verb.SPAWN, "Model/a", "engine/0", "x", args=given),), serial=serial).digest

    assert digest() == digest(serial=5) == digest(asked="2")
    assert len({digest(), digest(gpus=2), digest(engine="e"), Plan().digest}) == 4
    assert len(digest()) == 32


def test_report_finds_the_errors_of_an_object() -> None:
    ops: tuple[Op[Any], ...] = (
        Op(1, Verb.STOP, "Model/a", "engine/0", ""),
        Op(2, Verb.AWAIT, "Model/a", "engine/1", ""),
        Op(3, Verb.AWAIT, "Model/b", "engine/0", ""),
    )
    late, dead = TimedOut("late"), TargetFailed("exited 1")
    report = Report(Plan(ops=ops), done={3}, failed={1: late, 2: late})
    assert (report.errors_of("Model/a"), report.errors_of("Model/b")) == ([late, late], [])
    assert report.faults_of("Model/a") == [late], "a process that did not stop; the other one is still starting"
    assert Report(report.plan, failed={2: dead}).faults_of("Model/a") == [dead]
    assert not report.is_unfinished("Model/a")
    assert Report(report.plan, done={1}, skipped={2}).is_unfinished("Model/a")


@pytest.mark.parametrize(
    ("error", "reason"),
    [(NoCapacity("no GPU", hint="fewer"), "capacity"), (Conflict("taken"), "conflict"), (TimedOut("late"), "invalid")],
)
def test_refusal_keeps_reason_message_and_hint(error: ArealError, reason: Any) -> None:
    refusal = refusal_of(error)
    assert refusal == Refusal(reason, error.message, error.hint or "")
    again = refused_error(refusal)
    assert (again.message, again.hint or "") == (error.message, error.hint or "")
    assert type(again) is {"capacity": NoCapacity, "conflict": Conflict, "invalid": InvalidManifest}[reason]
