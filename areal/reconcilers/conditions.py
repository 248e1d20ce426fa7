"""Write down how each object ended up, after a plan was executed; unchanged statuses are not written again."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from areal.reconcilers.context import Context
from areal.reconcilers.desired import Target
from areal.reconcilers.executor import Report
from areal.reconcilers.health import Health, conditions_of
from areal.reconcilers.observe import observe
from areal.reconcilers.status import gateway_address, health_of
from areal.resources.kinds import parse_ref
from areal.runtime.backends.base import Backend
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
    ctx: Context, store: ObjectStore, backend: Backend, targets: Sequence[Target], reports: Sequence[Report]
) -> dict[str, Ending]:
    """Record the status of what the plans touched; how every target is now."""
    touched = {op.ref for report in reports for op in report.plan.ops}
    seen = observe(backend, [target.object for target in targets])
    services = {str(item.ref): item for item in store.list("InferenceService")}
    endings: dict[str, Ending] = {}
    found: list[_Found] = []
    for target in targets:
        stored = store.get(parse_ref(target.ref)) if not target.gone else None
        if stored is None:
            continue
        health = health_of(stored, seen, services)
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
