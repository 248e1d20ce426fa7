"""How objects are after a plan was executed: recorded as their status, and told as a command's outcome."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from areal.errors import ArealError, Conflict, InvalidManifest, NoCapacity, worst_exit
from areal.reconcilers.context import Context, ObjectOutcome, Outcome
from areal.reconcilers.desired import Target
from areal.reconcilers.execute import Report
from areal.reconcilers.observe import Health, conditions_of, observe
from areal.reconcilers.plan import ObjectPlan, Plan, Refusal, Verb
from areal.reconcilers.status import gateway_address, health_of, hosts_of
from areal.resources.kinds import parse_ref
from areal.runtime.backends.base import RunControl
from areal.state.events import EventLog
from areal.state.objects import ObjectStore
from areal.state.records import StoredObject


@dataclass(frozen=True)
class Ending:
    """How one object is after a plan was executed; ``address`` of a service whose gateway runs, else ""."""

    phase: str
    message: str
    address: str


def write_statuses(
    ctx: Context, store: ObjectStore, backend: RunControl, targets: Sequence[Target], reports: Sequence[Report]
) -> dict[str, Ending]:
    """Record the status of what the plans touched; how every target is now."""
    touched = {op.ref for report in reports for op in report.plan.ops}
    seen = observe(backend, [target.object for target in targets])
    hosts = hosts_of(ctx.home, [target.object for target in targets])
    endings: dict[str, Ending] = {}
    found: list[_Found] = []
    for target in targets:
        stored = store.get(parse_ref(target.ref)) if not target.gone else None
        if stored is None:
            continue
        health = health_of(stored, seen, hosts)
        address = gateway_address(target.ref, [run.state for run in seen.of(target.ref)])
        ending = Ending(health.phase, health.message, address)
        endings[target.ref] = ending
        if target.ref in touched:
            errors = [error for report in reports for error in report.errors_of(target.ref)]
            found.append(_find(stored, health, errors[0].message if errors else None, ending.address or None))
    changed = [item for item in found if item.status != item.stored.status]
    store.put_statuses({item.stored.ref: item.status for item in changed})
    for item in changed:
        _tell(ctx, item)
    return endings


@dataclass(frozen=True)
class _Found:
    """The status that an object is to have."""

    stored: StoredObject
    health: Health
    error: str | None
    status: dict[str, Any]


def _find(stored: StoredObject, health: Health, error: str | None, address: str | None) -> _Found:
    previous = stored.status.get("conditions", [])
    found = conditions_of(health, stored.generation, error, previous, time.time())
    status = {
        **stored.status,
        "observedGeneration": stored.generation,
        "phase": health.phase,
        "conditions": [condition.to_json() for condition in found],
        **({"address": address} if address else {}),
    }
    return _Found(stored, health, error, status)


def _tell(ctx: Context, found: _Found) -> None:
    previous = found.stored.status.get("conditions", [])
    was_ready = any(c.get("type") == "Ready" and c.get("status") == "True" for c in previous)
    if found.health.phase == "Ready" and not was_ready:
        EventLog(ctx.home).record(found.stored.ref, "Normal", "Ready", found.health.fraction, actor=ctx.actor)
    elif found.error:
        EventLog(ctx.home).record(found.stored.ref, "Warning", "Failed", found.error, actor=ctx.actor)


# -- outcomes

_DONE = {
    "create": "created",
    "configure": "configured",
    "heal": "healed",
    "replace": "replaced",
    "prune": "pruned",
    "delete": "deleted",
}
_REFUSED: Mapping[str, type[ArealError]] = {"capacity": NoCapacity, "invalid": InvalidManifest}
_PARTIAL = 9
_INTERRUPTED = 130


def outcome_of(plan: Plan, reports: Sequence[Report] = (), *, dry_run: bool = False) -> Outcome:
    """What ``plan`` did to each of its objects. ``reports`` are those of its passes; only the last one can hold
    failures, since a pass that fails is the last."""
    last = reports[-1] if reports else None
    objects = [_object_outcome(item, last, dry_run) for item in _objects(plan, reports)]
    notes = tuple(f"left alone: {sentence}" for sentence in plan.unknown)
    notes += tuple(note for report in reports for note in report.notes)
    if last is not None and last.interrupted:
        hint = "interrupted; the same command again goes on from here"
        return Outcome(tuple(objects), (*notes, hint), _INTERRUPTED)
    return Outcome(tuple(objects), notes, worst_exit([item.exit_code for item in objects]))


def _objects(plan: Plan, reports: Sequence[Report]) -> list[ObjectPlan]:
    """The plan's objects, and those that only a later pass had to touch."""
    found = {item.ref: item for item in plan.objects}
    for report in reports:
        for item in report.plan.objects:
            if item.action != "unchanged":
                found.setdefault(item.ref, item)
    return list(found.values())


def _object_outcome(item: ObjectPlan, last: Report | None, dry_run: bool) -> ObjectOutcome:
    errors = last.errors_of(item.ref) if last is not None else []
    if last is not None and item.action in ("prune", "delete") and _is_gone(item.ref, last):
        note = f"{item.cause}; {errors[0].message}" if errors else item.cause
        return ObjectOutcome(item.ref, _DONE[item.action], note)
    if errors:
        worst = _worst(errors)
        return ObjectOutcome(item.ref, "failed", worst.message, worst.exit_code, worst)
    if item.refusal is not None:
        error = refused_error(item.refusal)
        return ObjectOutcome(item.ref, item.action, error.message, error.exit_code, error)
    action = _DONE.get(item.action, item.action)
    if dry_run:
        return ObjectOutcome(item.ref, action, "(dry run)")
    if last is not None and last.is_unfinished(item.ref):
        why = "interrupted" if last.interrupted else "an earlier step failed"
        return ObjectOutcome(item.ref, action, f"not converged: {why}", _PARTIAL)
    return ObjectOutcome(item.ref, action, item.cause)


def _is_gone(ref: str, report: Report) -> bool:
    """Whether the object was erased: a router that could not be told is then no failure any more."""
    return any(op.verb is Verb.ERASE and op.id in report.done for op in report.plan.ops_of(ref))


def refused_error(refusal: Refusal) -> ArealError:
    """The error that a refusal is."""
    return _REFUSED.get(refusal.reason, Conflict)(refusal.message, hint=refusal.hint)


def refusal_of(error: ArealError) -> Refusal:
    """An object's error as the reason why the rest of a plan goes on without it: 10, 5, and 3 for all others."""
    reason: Literal["capacity", "conflict", "invalid"] = "invalid"
    if isinstance(error, NoCapacity | Conflict):
        reason = "capacity" if isinstance(error, NoCapacity) else "conflict"
    return Refusal(reason, error.message, error.hint or "")


def _worst(errors: Sequence[ArealError]) -> ArealError:
    """The error that decides the exit status, by the table of exit codes."""
    code = worst_exit([error.exit_code for error in errors])
    return next(error for error in errors if error.exit_code == code)


def with_endings(outcome: Outcome, endings: Mapping[str, Ending]) -> Outcome:
    """Say how each object is now, and where a service answers."""
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
