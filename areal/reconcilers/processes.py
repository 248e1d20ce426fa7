"""The ops for one process of an object, whatever its kind: start, sweep, stop, forget. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from areal.reconcilers.components import Action, Component, Decision, ended
from areal.reconcilers.desired import Target
from areal.reconcilers.observed import Observed, ObservedRun
from areal.reconcilers.plan import PlanBuilder, Verb
from areal.runtime.backends.base import Phase

SWEPT = "sweep what its session left"  # a shim that died may have left processes that hold what a successor needs


@dataclass(frozen=True)
class Started:
    """``run`` is the uid or symbol of a process that is or will be there; it is ready after the ops ``ready``."""

    run: str
    ready: tuple[int, ...] = ()


def start(
    build: PlanBuilder,
    component: Component,
    decision: Decision,
    observed: Observed,
    needs: Sequence[int],
    args: Mapping[str, Any] | None = None,
    after: Sequence[int] = (),
    trainer: str = "",
) -> Started:
    """SPAWN or KICK, then AWAIT.

    It is waited for only ``after`` what it waits for itself: an engine that fails ends the wait for its data proxy.
    Records of earlier runs of this slot are forgotten, all but the newest: `logs --previous` reads that one.
    """
    ref, target = component.ref, component.target
    if decision.action is Action.KICK:
        assert decision.run is not None
        run = decision.run.uid
        begun = build.add(Verb.KICK, ref, target, decision.cause, needs=needs, run=run)
    else:
        slot = observed.of(ref, component.name, component.replica)
        for old in superseded(slot):
            build.add(Verb.FORGET, ref, target, "an older record", needs=needs, run=old.uid)
        run = f"+{ref}/{target}"
        inputs = {"inputs": dict(component.inputs)} if component.inputs else {}
        begun = build.add(
            Verb.SPAWN, ref, target, decision.cause, needs=needs, run=run, args={**(args or {}), **inputs}
        )
    ready = build.add(Verb.AWAIT, ref, target, "started", needs=(begun, *after), run=run, args=awaiting(trainer))
    return Started(run, (ready,))


def awaiting(trainer: str) -> dict[str, str]:
    """``trainer``: the job that starts only then, and brings the weights that a data proxy may wait for."""
    return {"trainer": trainer} if trainer else {}


def keep(
    build: PlanBuilder,
    component: Component,
    decision: Decision,
    needs: Sequence[int],
    after: Sequence[int] = (),
    trainer: str = "",
) -> Started:
    """A process that stays, or is not there and not to be started now: waited for when it has not answered yet."""
    run = decision.run.uid if decision.run is not None else ""
    if decision.action is not Action.AWAIT:
        return Started(run)
    needs, args = (*needs, *after), awaiting(trainer)
    waited = build.add(Verb.AWAIT, component.ref, component.target, decision.cause, needs=needs, run=run, args=args)
    return Started(run, (waited,))


def superseded(slot: Sequence[ObservedRun], kept: int = 1) -> list[ObservedRun]:
    """Ended runs whose records nobody will read again, all but the last ``kept``; what never started has nothing to
    tell."""
    told = [run for run in ended(slot) if run.state.phase is not Phase.INTENDED]
    unstarted = [run for run in slot if run.state.phase is Phase.INTENDED]
    return [*unstarted, *sorted(told, key=lambda run: (run.ended_at, run.uid))[:-kept]]


def slot_of(run: ObservedRun) -> str:
    return f"{run.state.spec.component}/{run.state.spec.replica}"


def stop_in_order(
    build: PlanBuilder,
    ref: str,
    runs: Sequence[ObservedRun],
    components: Sequence[str],
    cause: str,
    needs: Sequence[int],
    args: Mapping[str, Any] | None = None,
) -> tuple[int, ...]:
    """Stop ``runs`` one component after the other, callers before the called; the ops of the last component."""
    last = tuple(needs)
    for name in components:
        stops = tuple(
            build.add(Verb.STOP, ref, slot_of(run), cause, needs=last, run=run.uid, args=args)
            for run in runs
            if run.state.spec.component == name
        )
        last = stops or last
    return last


def stoppable(runs: Sequence[ObservedRun]) -> list[ObservedRun]:
    """Runs of which something may be left: never those that cannot be seen."""
    return [run for run in runs if run.is_live or run.leaves_session]


def unseen(runs: Sequence[ObservedRun]) -> list[ObservedRun]:
    return [run for run in runs if run.state.phase is Phase.UNKNOWN]


def erase(
    build: PlanBuilder, target: Target, observed: Observed, needs: Sequence[int], after: Sequence[int] = ()
) -> int:
    """Forget every run's record, then the object."""
    cause = end_cause(target)
    forgotten = tuple(
        build.add(Verb.FORGET, target.ref, slot_of(run), cause, needs=needs, run=run.uid)
        for run in observed.of(target.ref)
    )
    args = {"after": list(after)} if after else {}
    return build.add(Verb.ERASE, target.ref, "", cause, needs=(*needs, *forgotten), args=args)


def end_cause(target: Target) -> str:
    return target.cause or ("pruned" if target.action == "prune" else "deleted")
