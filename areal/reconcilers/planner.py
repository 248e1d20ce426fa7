"""The whole plan: the ops of every target in dependency order. Pure: no I/O, no clock, no randomness.

Records come first: an object is recorded before its processes exist. Then every kind plans its own objects
(``KindPlan``), phase by phase: drain what ends, open what stays, complete routing tables, end what ends, then start,
replace and remove processes. Kinds to which others refer are planned first, except in ``drain``, which runs in reverse.

Two kinds of objects are *refused* while the rest of the plan proceeds: objects to delete with a run that cannot be
observed, and objects that only need healing but do not fit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from areal.reconcilers.desired import Target, needs_of
from areal.reconcilers.kinds import called_by, controller_of, host_of
from areal.reconcilers.observe import DIED, Observed, rollout_failure
from areal.reconcilers.plan import Drift, GpuPool, ObjectPlan, Op, Plan, Refusal, Verb
from areal.reconcilers.planning import STARTED, KindPlan, Planning, PlanNotes, PlanScope, Policy, unseen
from areal.resources.tree import UpdateClass
from areal.runtime.backends import LOCAL
from areal.runtime.backends.base import RunSpec

_HOW = {
    UpdateClass.META: "recorded only",
    UpdateClass.HOT: "in place, no process restarts",
    UpdateClass.ROLL: "rolling update",
    UpdateClass.RECREATE: "processes are replaced",
    UpdateClass.IMMUTABLE: "deleted and created again",
}
_OWNERS = "the manifest sets other fields than before, none to another value"
_STARTS = "its processes start with it"
_MORE, _FEWER = "processes start, none restarts", "processes stop, none restarts"
_HINT = "delete it where it runs"


def make_plan(
    scope: PlanScope, observed: Observed, policy: Policy, *, serial: int = 0, source: Mapping[str, object] | None = None
) -> Plan:
    """Plan the operations that bring the actual state to ``scope.targets``. Raises NoCapacity."""
    planning = Planning(scope, observed, policy, GpuPool(policy.free_gpus), host_of, called_by)
    _refuse_unseen(planning)
    for target in scope.all:
        if target.action in ("create", "configure"):
            changed = f"{target.decisive.path} changed" if target.decisive else _OWNERS
            cause = "new object" if target.action == "create" else target.cause or changed
            planning.recorded[target.ref] = (planning.build.add(Verb.RECORD, target.ref, "", cause),)
    parts = [controller_of(kind).plan(planning) for kind in dict.fromkeys(target.object.kind for target in scope.all)]
    for part in reversed(parts):
        part.drain()
    for phase in (KindPlan.open, KindPlan.sync, KindPlan.end, KindPlan.close, KindPlan.finish):
        for part in parts:
            getattr(part, phase.__name__)()
    notes, ops_of = planning.notes, planning.build.ops_of
    _note_unready(planning)
    drifted: dict[str, list[Drift]] = {}
    for drift in notes.drift:
        drifted.setdefault(drift.ref, []).append(drift)
    shown = [t for t in scope.all if t.ref in scope.requested or ops_of(t.ref) or t.ref in notes.refused]
    ended = [t for t in scope.all if t.is_deleted and not t.is_expired and t.ref not in notes.refused]
    ended += [t for t in scope.all if t.replaces is not None]
    past = {"prune": "pruned", "delete": "deleted", "replace": "deleted and created again"}
    return Plan(
        objects=tuple(_object_plan(t, ops_of(t.ref), drifted.get(t.ref, ()), notes) for t in shown),
        ops=planning.build.ops(),
        drift=tuple(notes.drift),
        destructive=(*notes.destructive, *(f"{t.ref} is {past[t.action]}" for t in ended)),
        unknown=tuple(dict.fromkeys((*scope.left_alone, *notes.unknown))),
        serial=serial,
        source=source or {},
    )


_WELL = ("Ready", "Suspended", "Recorded")


def _note_unready(planning: Planning) -> None:
    """Note as drift why an object is not ready if the plan does not say so otherwise, so that its status and its plan
    do not contradict each other."""
    notes, scope, ops_of = planning.notes, planning.scope, planning.build.ops_of
    named = {drift.ref for drift in notes.drift} | notes.unseen.keys() | notes.refused.keys()
    for target in scope.targets:
        item, controller = target.object, controller_of(target.object.kind)
        if target.is_deleted or target.ref in named or ops_of(target.ref) or host_of(item) in scope.unreadable:
            continue
        host = scope.by_ref.get(host_of(item) or "")
        health = controller.health(target.ref, item.spec, planning.observed, host.object.spec if host else None)
        if controller.runs_to_completion:  # its end is a result; a driver that does not run now, or was lost, is none
            if health.ready < health.desired and (health.phase == "Running" or health.reason == DIED):
                notes.drift.append(Drift(target.ref, "not-ready", health.phase, health.message or health.reason))
        elif health.phase not in _WELL:
            message = health.message or health.reason
            notes.drift.append(Drift(target.ref, "not-ready", health.phase, message))
            if host is None or not ops_of(host.ref):  # otherwise the plan repairs its host
                notes.unseen.setdefault(target.ref, message)
        elif (failure := rollout_failure(item)) is not None:  # the next apply clears it
            notes.drift.append(Drift(target.ref, "rollout-failed", "status", failure))


def _refuse_unseen(planning: Planning) -> None:
    """Refuse to delete an object with a run that cannot be observed, and objects that it needs, that are attached to
    it, or that would be deleted because of it."""
    refused = planning.notes.refused

    def refuse(ref: str, why: str, hint: str = _HINT) -> None:
        refused.setdefault(ref, Refusal("unseen", f"{ref} is not deleted: {why}", hint))

    deleted = {target.ref: ending for target in planning.scope.all if (ending := target.ending) is not None}
    for ref, target in deleted.items():
        for run in unseen(controller_of(target.object.kind).needed_to_end(target.object, planning.observed))[:1]:
            hint = f"{_HINT}; if that place is gone for good, remove {_folder(run.state.spec)} from the areal home"
            refuse(ref, f"{run.state.spec.owner} {run.slot} cannot be seen: {run.state.reason}", hint)
    needs = [
        (ref, need)
        for ref, target in deleted.items()
        for need in dict.fromkeys((*needs_of(target.object), target.object.owner, host_of(target.object)))
        if need in deleted
    ]
    before = -1
    while before < len(refused):
        before = len(refused)
        for ref, need in needs:
            if ref in refused:
                refuse(need, f"{ref} still needs it")
            elif need in refused and (deleted[ref].follows or need == host_of(deleted[ref].object)):
                refuse(ref, f"{need} cannot be deleted")


def _folder(spec: RunSpec) -> str:
    """Return the run's folder in the home."""
    return f"runs/{spec.uid}" if spec.backend == LOCAL else f"clusters/{spec.backend}/runs/{spec.uid}"


def _object_plan(target: Target, ops: Sequence[Op[Any]], drifts: Sequence[Drift], notes: PlanNotes) -> ObjectPlan:
    action, cause, decided, unseen = target.action, target.cause, "", notes.unseen.get(target.ref, "")
    if (refusal := notes.refused.get(target.ref)) is not None:
        return ObjectPlan(target.ref, "blocked", refusal.message, refusal=refusal, unseen=unseen)
    replaced = notes.replaced.get(target.ref)
    if action == "configure" and target.decisive is not None:
        update, decided = target.decisive.update, target.decisive.path
        verbs = {op.verb for op in ops} & {Verb.SPAWN, Verb.STOP}
        if replaced is not None and update < UpdateClass.ROLL:  # replaced because of work that an earlier command left
            update, decided = UpdateClass.ROLL, replaced
        elif replaced is None and update >= UpdateClass.ROLL:  # there is no process that depends on the field
            cause = cause or (_STARTS if Verb.SPAWN in verbs else _HOW[UpdateClass.META])
        elif update is UpdateClass.HOT and len(verbs) == 1:  # scaled, suspended or resumed
            cause = cause or (_MORE if Verb.SPAWN in verbs else _FEWER)
        cause = cause or _HOW[update]
    elif action == "configure":
        cause = cause or _OWNERS
    if action == "unchanged" and ops:
        action = "heal"
        cause = "; ".join(f"{drift.target} {drift.kind}" for drift in drifts)
        found = [op.cause for op in ops if op.verb is Verb.STOP]
        found += [f"was {op.cause}" for op in ops if op.verb is Verb.AWAIT and op.cause != STARTED]
        cause = cause or next(iter(found), ops[0].cause)
    return ObjectPlan(target.ref, action, cause, decided, target.changes, target.taken, unseen=unseen)
