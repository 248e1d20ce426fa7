"""What becomes of one process slot: which run is kept, when one is replaced, and the words for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from areal.reconcilers.observe import ObservedRun, Seen, Trouble
from areal.reconcilers.planning import Action, Component, Decision, Policy, decide, superseded
from areal.runtime.backends.base import Cause, LastExit, Phase
from tests.reconcilers.worlds import MODEL, model, run

FIELDS = ("path", "engineArgs", "strategy", "replicas")


def engine(phase: Phase = Phase.RUNNING, seen: Seen = Seen.READY, uid: str = "a", **fields: Any) -> ObservedRun:
    """``fields``: of its state, or of what was observed."""
    made = run(model(), "engine", 0, phase, seen, uid)
    state = {name: fields.pop(name) for name in list(fields) if hasattr(made.state, name)}
    return replace(made, state=replace(made.state, **state), seen=seen, **fields)


def decision(runs: Sequence[ObservedRun], inputs: dict[str, str] | None = None, **spec: Any) -> Decision:
    wanted = {**model().spec, **spec}
    return decide(Component(MODEL, "engine", 0, "Model", wanted, FIELDS, inputs or {}), runs)


def died(at: float, reason: str = "exited 1") -> LastExit:
    return LastExit(1, None, at, reason)


@pytest.mark.parametrize(
    ("found", "action", "cause"),
    [
        (engine(), "keep", ""),
        (engine(Phase.UNKNOWN, reason="the node is away"), "leave", "cannot be seen: the node is away"),
        (engine(Phase.BACKOFF, last_exit=died(1.0)), "kick", "process-died: exited 1"),
        (engine(Phase.BACKOFF, last_exit=None), "kick", "process-died: gone without an exit record"),
        (engine(Phase.QUEUED, Seen.UNSEEN), "await", "queued"),
        (engine(Phase.QUEUED, Seen.UNSEEN, reason="Priority"), "await", "queued: Priority"),
        (engine(Phase.STARTING, Seen.UNSEEN), "await", "starting"),
        (engine(seen=Seen.REFUSING, age_s=59.9), "await", "starting"),
        (engine(seen=Seen.REFUSING, age_s=60.0), "await", "unhealthy: does not answer its probe"),
        (engine(seen=Seen.SILENT, age_s=1.0), "await", "starting"),
        (engine(seen=Seen.SILENT, why="timed out"), "await", "unhealthy: timed out"),
        (engine(seen=Seen.SILENT, age_s=1.0, halted=True), "await", "unhealthy: does not answer its probe"),
        (engine(seen=Seen.NOT_READY), "await", "not ready yet"),
        (engine(seen=Seen.NOT_READY, why="loads weights"), "await", "not ready: loads weights"),
        (engine(trouble=Trouble("Failing", "all calls fail", "")), "await", "unhealthy: all calls fail"),
        (engine(key_fault="its file is gone"), "replace", "key-lost: its file is gone"),
        (engine(Phase.EXITED, last_exit=died(1.0)), "spawn", "process-died: exited 1"),
        (engine(Phase.CRASHLOOP, last_exit=died(1.0)), "spawn", "crash-loop: exited 1"),
        (engine(Phase.EXITED, last_exit=died(1.0), cause=Cause.PREEMPTED), "spawn", "preempted: exited 1"),
        (engine(Phase.INTENDED, Seen.UNSEEN), "spawn", "process-died: gone without an exit record"),
    ],
)
def test_single_process_is_decided_by_its_state(found: ObservedRun, action: str, cause: str) -> None:
    got = decision([found])
    assert (got.action, got.cause, got.run) == (action, cause, found)
    is_drift = not cause.startswith(("cannot", "not ready", "starting", "queued")) and bool(cause)
    assert (got.drift is not None) == is_drift
    if got.drift is not None:
        assert cause == ": ".join(got.drift)


def test_empty_slot_is_started() -> None:
    assert decision([]) == Decision(Action.SPAWN, "no process")


BEST_FIRST = [
    engine(Phase.RUNNING, Seen.READY, "a"),
    engine(Phase.RUNNING, Seen.UNSEEN, "b"),
    engine(Phase.RUNNING, Seen.NOT_READY, "c"),
    engine(Phase.RUNNING, Seen.SILENT, "d"),
    engine(Phase.STARTING, Seen.UNSEEN, "e"),
]


@pytest.mark.parametrize("at", range(len(BEST_FIRST)))
def test_best_of_several_processes_is_kept(at: int) -> None:
    for slot in (BEST_FIRST[at:], BEST_FIRST[at:][::-1]):
        assert decision(slot).run is BEST_FIRST[at]
        replaced = decision(slot, path="models/other")
        assert (replaced.action, replaced.run) == (Action.REPLACE, BEST_FIRST[at])


def test_process_that_fits_is_kept_before_better_ones_that_do_not() -> None:
    other = replace(
        engine(uid="z"), state=replace(engine(uid="z").state, spec=run(model({"path": "b"}), "engine").state.spec)
    )
    assert decision([other, engine(Phase.STARTING, Seen.UNSEEN)]) == Decision(
        Action.AWAIT, "starting", engine(Phase.STARTING, Seen.UNSEEN)
    )


def test_latest_end_is_the_cause_of_a_start() -> None:
    runs = [
        engine(Phase.EXITED, uid=uid, last_exit=died(at, f"exited {uid}"))
        for uid, at in (("b", 2.0), ("c", 3.0), ("a", 1.0))
    ]
    assert decision(runs).cause == "process-died: exited c"


@pytest.mark.parametrize(
    ("spec", "inputs", "changed", "cause"),
    [
        ({"path": "b"}, {}, "spec.path", "spec.path changed"),
        ({"engineArgs": {"x": 1}}, {}, "spec.engineArgs.x", "spec.engineArgs.x changed"),
        ({"strategy": {"maxSurge": 2}, "path": "b"}, {}, "spec.path", "spec.path changed"),
        ({"replicas": 2, "path": "b"}, {}, "spec.path", "spec.path changed"),
        ({}, {"restartedAt": "2"}, "its restartedAt", "restart requested"),
        ({}, {"keyFrom": "env K"}, "its keyFrom", "its keyFrom changed"),
        ({}, {"engineUrl": "http://h:1"}, "its engineUrl", "its engineUrl changed"),
    ],
)
def test_outdated_process_is_replaced_for_the_costliest_change(
    spec: dict[str, Any], inputs: dict[str, str], changed: str, cause: str
) -> None:
    got = decision([engine()], inputs, **spec)
    assert (got.action, got.changed, got.cause, got.drift) == ("replace", changed, cause, None)


@pytest.mark.parametrize("spec", [{"replicas": 2}, {"strategy": {"maxSurge": 2}}, {"engineArgs": {}}])
def test_process_is_kept_where_only_cheaper_fields_change(spec: dict[str, Any]) -> None:
    assert decision([engine()], **spec).action is Action.KEEP


def test_records_of_all_but_the_latest_end_are_superseded() -> None:
    ends = [
        engine(phase, uid=uid, last_exit=died(at))
        for phase, uid, at in ((Phase.EXITED, "b", 2.0), (Phase.CRASHLOOP, "c", 3.0), (Phase.DEAD, "a", 1.0))
    ]
    slot = [*ends, engine(Phase.INTENDED, uid="i"), engine(uid="r"), engine(Phase.UNKNOWN, uid="u")]
    assert [each.uid for each in superseded(slot)] == ["i", "a", "b"]
    assert [each.uid for each in superseded(slot, 2)] == ["i", "a"]


@pytest.mark.parametrize(
    ("policy", "seconds"),
    [
        (Policy(), 600.0),
        (Policy(grace_s=5.0), 5.0),
        (Policy(grace_s=0.0), 0.0),
        (Policy(drain=False, grace_s=5.0), 0.0),
    ],
)
def test_deletion_drains_as_long_as_asked_or_usual(policy: Policy, seconds: float) -> None:
    assert policy.drain_s(600.0) == seconds
