"""The state of objects after a plan was executed: recorded as their status, and returned as a command's outcome."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence

from areal import interrupt
from areal.dataclasses import dataclass, replace
from areal.errors import ArealError, TargetFailed, worst_exit
from areal.reconcilers.context import Context, ObjectOutcome, Outcome
from areal.reconcilers.desired import Target
from areal.reconcilers.kinds import controller_of
from areal.reconcilers.observe import DEPENDENCY_FAILED, Health, Observed, conditions_of, observe, rollout_failure
from areal.reconcilers.plan import ObjectPlan, Plan, Report, Verb, refused_error
from areal.reconcilers.planning import PlanScope
from areal.reconcilers.status import converged_status, health_of, hosts_of, is_converged, rollout_health
from areal.resources.kinds import Ref, parse_ref
from areal.runtime.backends.base import RunControl
from areal.state.events import EventLog
from areal.state.objects import ObjectStore
from areal.state.records import StoredObject


@dataclass(frozen=True)
class Ending:
    """The state of one object after a plan was executed. ``address``: of a service with a running gateway, otherwise
    ""."""

    phase: str
    message: str
    address: str


def _observed(
    ctx: Context, backend: RunControl, objects: Sequence[StoredObject]
) -> tuple[Observed, Mapping[str, StoredObject]]:
    """Return what is observed of objects and of their hosts, and the hosts."""
    hosts = hosts_of(ctx.home, objects)
    return observe(backend, [*objects, *hosts.values()]), hosts


def write_statuses(
    ctx: Context,
    store: ObjectStore,
    backend: RunControl,
    scope: PlanScope,
    reports: Sequence[Report],
    left: Collection[str] = (),
) -> dict[str, Ending]:
    """Record the status of objects that the plans touched, and of requested objects that have converged. Return the
    state of every target. ``left``: objects with operations still to do."""
    targets, undone = scope.all, {*left, *_unfinished_refs(reports[-1])}
    touched = {op.ref for report in reports for op in report.plan.ops}
    seen, hosts = _observed(ctx, backend, [target.object for target in targets])
    endings: dict[str, Ending] = {}
    statuses: dict[Ref, dict[str, object]] = {}
    events: list[tuple[Ref, str, str, str]] = []
    for target in targets:
        recorded = store.get(parse_ref(target.ref)) if not target.is_deleted else None
        if recorded is None:
            continue
        converged = target.ref in scope.requested and target.ref not in undone
        stored = replace(recorded, status=converged_status(recorded)) if converged else recorded
        health = health_of(stored, seen, hosts)
        errors = [error for report in reports for error in report.faults_of(target.ref)]
        error = errors[0].message if errors else None
        not_whole = not (error or is_converged(stored))
        health = rollout_health(stored, health, "the command has not finished it" if not_whole else None)
        address = controller_of(stored.kind).address(seen.of(target.ref))
        is_pending = target.ref in left and health.phase == "Failed" and not error  # what failed is to be started again
        endings[target.ref] = Ending("Pending" if is_pending else health.phase, health.message, address)
        if target.ref not in touched and stored is recorded:
            continue
        status = {**_status_of(stored, health, error), **({"address": address} if address else {})}
        if status == recorded.status:
            continue
        statuses[stored.ref] = status
        previous = stored.status.get("conditions", [])
        was_ready = any(c.get("type") == "Ready" and c.get("status") == "True" for c in previous)
        if health.phase == "Ready" and not was_ready:
            events.append((stored.ref, "Normal", "Ready", health.fraction))
        elif error:
            events.append((stored.ref, "Warning", "Failed", error))
    store.put_statuses(statuses)
    for event in events:
        EventLog(ctx.home).record(*event, actor=ctx.actor)
    return endings


def settle_statuses(ctx: Context, store: ObjectStore, backend: RunControl, plan: Plan, scope: PlanScope) -> None:
    """Mark objects with nothing left to do as converged, and clear the failure of those that serve."""
    staying = [target.object for target in scope.targets if not target.is_deleted]
    unsettled = [item for item in staying if rollout_failure(item) or not is_converged(item)]
    if not unsettled:
        return
    left = _unfinished_refs(Report(plan))
    unsettled = [item for item in unsettled if str(item.ref) not in left]
    seen, hosts = _observed(ctx, backend, unsettled)
    statuses: dict[Ref, dict[str, object]] = {}
    for item in unsettled:
        stored, health = store.get(item.ref), health_of(item, seen, hosts)
        if stored is None or stored.generation != item.generation or stored.status != item.status:
            continue  # another command has changed it
        statuses[stored.ref] = converged_status(stored)
        if health.phase == "Ready":
            statuses[stored.ref] = _status_of(replace(stored, status=statuses[stored.ref]), health)
    store.put_statuses(statuses)


def recorded_targets(ctx: Context, scope: PlanScope, observed: Observed) -> tuple[Target, ...]:
    """Return the targets of a plan that only records. Those that have no process, and should have none, get their
    status, which is then written with the object and not after it."""
    hosts = hosts_of(ctx.home, [target.object for target in scope.all])

    def with_status(target: Target) -> Target:
        item = replace(target.object, status=converged_status(target.object))
        health = health_of(item, observed, hosts)
        if target.ref not in scope.requested or target.is_deleted or health.phase not in ("Suspended", "Recorded"):
            return target
        return replace(target, object=replace(item, status=_status_of(item, health)))

    return tuple(target if observed.of(target.ref) else with_status(target) for target in scope.all)


def _status_of(item: StoredObject, health: Health, error: str | None = None) -> dict[str, object]:
    """Return the status of an object with its phase and conditions. ``error``: why its last rollout failed."""
    found = conditions_of(health, item.generation, error, item.status.get("conditions", []), time.time())
    return {**item.status, "phase": health.phase, "conditions": [condition.to_json() for condition in found]}


def _unfinished_refs(report: Report) -> set[str]:
    """Return the objects with an unfinished operation, or with a process that cannot be observed."""
    undone = {op.ref for op in report.plan.ops if op.id in report.failed or op.id in report.skipped}
    return undone | {item.ref for item in report.plan.objects if item.unseen or item.refusal}


_DONE = {
    "create": "created",
    "configure": "configured",
    "heal": "healed",
    "replace": "replaced",
    "prune": "pruned",
    "delete": "deleted",
}
_GONE = ("prune", "delete")
_PARTIAL = 9


def outcome_of(plan: Plan, reports: Sequence[Report] = ()) -> Outcome:
    """Return the outcome of ``plan`` for each of its objects. ``reports``: those of its passes; only the last can have
    failures, since a failed pass is the last."""
    last = reports[-1] if reports else Report()
    found = {item.ref: item for item in plan.objects}
    for report in reports:  # objects that only a later pass touched
        for item in report.plan.objects:
            if item.action != "unchanged":
                found.setdefault(item.ref, item)
    unseen = {item.ref: item.unseen for item in (reports[-1].plan if reports else plan).objects if item.unseen}
    objects = tuple(_object_outcome(item, last, unseen.get(item.ref, "")) for item in found.values())
    notes = tuple(f"left alone: {sentence}" for sentence in plan.unknown)
    notes += tuple(note for report in reports for note in report.notes)
    if last.interrupted:
        return Outcome(objects, (*notes, "interrupted; the same command again goes on from here"), interrupt.STATUS)
    return Outcome(objects, notes, worst_exit([item.exit_code for item in objects]))


def _object_outcome(item: ObjectPlan, last: Report, unseen: str) -> ObjectOutcome:
    errors = last.errors_of(item.ref)
    if any(op.verb is Verb.ERASE and op.id in last.done for op in last.plan.ops_of(item.ref)) and item.action in _GONE:
        # the object is deleted: an error of its router is only a note
        done = _DONE[item.action]
        notes = [*([item.cause] if item.cause != done else []), *(error.message for error in errors[:1])]
        return ObjectOutcome(item.ref, done, "; ".join(notes))
    if errors:
        code = worst_exit([error.exit_code for error in errors])
        worst = next(error for error in errors if error.exit_code == code)
        return ObjectOutcome(item.ref, "failed", worst.message, code, worst)
    if item.refusal is not None:
        error = refused_error(item.refusal)
        return ObjectOutcome(item.ref, item.action, error.message, error.exit_code, error)
    action = done = _DONE.get(item.action, item.action)
    if last.is_unfinished(item.ref):
        unseen = "interrupted" if last.interrupted else "an earlier step failed"
    if unseen:
        action, what = ("failed", done) if item.action in (*_GONE, "heal") else (done, "converged")
        return ObjectOutcome(item.ref, action, f"not {what}: {unseen}", _PARTIAL)
    return ObjectOutcome(item.ref, action, item.cause)


def with_stuck(outcome: Outcome, stuck: Mapping[str, str]) -> Outcome:
    """Mark objects as not converged. ``stuck``: by object, the operation that is still needed although it was
    performed."""
    return _marked(outcome, {ref: (f"not converged: {left}", _PARTIAL, None) for ref, left in stuck.items()})


def with_failed_dependencies(ctx: Context, backend: RunControl, scope: PlanScope, outcome: Outcome) -> Outcome:
    """Mark objects that wait for a failed job as failed, even if nothing was to be done."""
    waiting = [target.object for target in scope.targets if target.object.awaits and not target.is_deleted]
    if not waiting:
        return outcome
    seen, hosts = _observed(ctx, backend, waiting)
    marks: dict[str, tuple[str, int, ArealError | None]] = {}
    for item in waiting:
        health = health_of(item, seen, hosts)
        if health.reason == DEPENDENCY_FAILED:
            error = TargetFailed(f"{item.ref} {health.message}", hint=f"areal describe {item.ref}")
            marks[str(item.ref)] = health.message, error.exit_code, error
    return _marked(outcome, marks)


def _marked(outcome: Outcome, marks: Mapping[str, tuple[str, int, ArealError | None]]) -> Outcome:
    """Give objects that have not failed another message, exit status and error."""
    if not marks:
        return outcome  # its exit status may be that of an interrupt, which belongs to no object
    objects = tuple(
        ObjectOutcome(item.ref, item.action, *marks[item.ref]) if item.ref in marks and not item.exit_code else item
        for item in outcome.objects
    )
    return replace(outcome, objects=objects, exit_code=worst_exit([outcome.exit_code, *(o.exit_code for o in objects)]))


def with_endings(outcome: Outcome, endings: Mapping[str, Ending]) -> Outcome:
    """Add each object's phase, and the address of a ready service, to its message."""
    objects = []
    for item in outcome.objects:
        ending = endings.get(item.ref)
        if ending is None or item.exit_code or item.action == "unchanged":
            objects.append(item)
            continue
        where = f" at {ending.address}" if ending.address and ending.phase == "Ready" else ""
        cause = f"; {item.message}" if item.message else ""
        objects.append(replace(item, message=f"{ending.phase}{where}{cause}"))
    addresses = {ref: ending.address for ref, ending in endings.items() if ending.address}
    return replace(outcome, objects=tuple(objects), addresses=addresses)
