"""Write down how each object ended up, after a plan was executed; unchanged statuses are not written again."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from areal.reconcilers.context import Context
from areal.reconcilers.desired import Target
from areal.reconcilers.executor import Report
from areal.reconcilers.health import assess, conditions_of
from areal.reconcilers.observe import observe
from areal.reconcilers.plan import Plan
from areal.resources.kinds import parse_ref
from areal.runtime.backends.base import Backend
from areal.state.events import EventLog
from areal.state.objects import ObjectStore
from areal.state.records import StoredObject


def write_statuses(
    ctx: Context, store: ObjectStore, backend: Backend, targets: Sequence[Target], report: Report, plan: Plan
) -> dict[str, str]:
    """Returns the address of every service that is up."""
    touched = {op.ref for op in plan.ops}
    seen = observe(ctx.home, backend, [target.ref for target in targets])
    addresses: dict[str, str] = {}
    for target in targets:
        ref = parse_ref(target.ref)
        stored = store.get(ref) if not target.gone else None
        if stored is None:
            continue
        runs = seen.of(target.ref)
        address = next((run.url for run in runs if run.state.spec.component == "gateway" and run.is_live), None)
        if address:
            addresses[target.ref] = address
        if target.ref not in touched:
            continue
        errors = report.errors_of(plan, target.ref)
        health = assess(stored.kind, stored.spec, runs)
        error = errors[0].message if errors else None
        _write(ctx, store, stored, health, error, address)
    return addresses


def _write(
    ctx: Context, store: ObjectStore, stored: StoredObject, health: Any, error: str | None, address: str | None
) -> None:
    previous = stored.status.get("conditions", [])
    found = conditions_of(health, stored.generation, error, previous, time.time())
    status = {
        **stored.status,
        "observedGeneration": stored.generation,
        "phase": health.phase,
        "conditions": [condition.to_json() for condition in found],
        **({"address": address} if address else {}),
    }
    if status == stored.status:
        return
    was_ready = any(c.get("type") == "Ready" and c.get("status") == "True" for c in previous)
    store.put_status(stored.ref, status)
    if health.phase == "Ready" and not was_ready:
        EventLog(ctx.home).record(stored.ref, "Normal", "Ready", health.fraction, actor=ctx.actor)
    elif error:
        EventLog(ctx.home).record(stored.ref, "Warning", "Failed", error, actor=ctx.actor)
