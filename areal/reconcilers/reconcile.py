"""Heal what is recorded, and let go of jobs that have finished long enough ago: no manifests are read."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import replace

from areal.errors import NotFound
from areal.reconcilers.context import Context, Outcome
from areal.reconcilers.converge import Desk, converge, plan_targets
from areal.reconcilers.desired import Target, check_removals, deletions
from areal.reconcilers.job_phase import standing
from areal.reconcilers.model_work import Policy
from areal.reconcilers.observed import ObservedRun
from areal.resources.kinds import Ref
from areal.state.records import StoredObject

_TTL = "finished, and ttlSecondsAfterFinished has passed"


def reconcile_once(ctx: Context, refs: Iterable[Ref] | None = None, timeout_s: float = 600.0) -> Outcome:
    """Compare what is recorded with what is alive and converge. Raises NotFound for an unknown ``ref``."""
    wanted = None if refs is None else set(refs)
    desk = Desk.open(ctx)

    def choose(stored: list[StoredObject]) -> tuple[Target, ...]:
        missing = sorted(str(ref) for ref in (wanted or set()) - {item.ref for item in stored})
        if missing:
            raise NotFound(f"{', '.join(missing)}: not recorded", hint="areal get all")
        chosen = [item for item in stored if wanted is None or item.ref in wanted]
        outlived = _outlived(desk, chosen)
        ended = deletions(stored, map(str, outlived), cascade=False)
        gone = {target.ref for target in ended}
        targets = [Target(item, "unchanged") for item in chosen if str(item.ref) not in gone]
        targets += [replace(target, cause=_TTL) if target.object.ref in outlived else target for target in ended]
        check_removals(stored, targets)
        return tuple(targets)

    return converge(desk, lambda: plan_targets(desk, choose, Policy()), lambda plan: True, timeout_s=timeout_s)


def _outlived(desk: Desk, stored: Iterable[StoredObject]) -> frozenset[Ref]:
    """Jobs that finished longer ago than they are to be kept."""
    timed = {str(item.ref): item for item in stored if item.spec.get("ttlSecondsAfterFinished") is not None}
    if not timed:
        return frozenset()
    runs: dict[str, list[ObservedRun]] = {}
    for state in desk.backend.observe().values():
        if state.spec.owner in timed:
            runs.setdefault(state.spec.owner, []).append(ObservedRun(state))
    found = set()
    for ref, item in timed.items():
        now = standing(runs.get(ref, []), suspended=bool(item.spec.get("suspend")))
        ttl_s = float(item.spec["ttlSecondsAfterFinished"])
        if now.finished and now.run is not None and now.run.ended_at + ttl_s <= time.time():
            found.add(item.ref)
    return frozenset(found)
