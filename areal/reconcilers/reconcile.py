"""Heal what is recorded: no manifests are read."""

from __future__ import annotations

from collections.abc import Iterable

from areal.errors import NotFound
from areal.reconcilers.context import Context, Outcome
from areal.reconcilers.converge import Desk, converge, plan_targets
from areal.reconcilers.desired import Target
from areal.reconcilers.model_work import Policy
from areal.resources.kinds import Ref
from areal.state.records import StoredObject


def reconcile_once(ctx: Context, refs: Iterable[Ref] | None = None, timeout_s: float = 600.0) -> Outcome:
    """Compare what is recorded with what is alive and converge. Raises NotFound for an unknown ``ref``."""
    wanted = None if refs is None else set(refs)
    desk = Desk.open(ctx)

    def choose(stored: list[StoredObject]) -> tuple[Target, ...]:
        missing = sorted(str(ref) for ref in (wanted or set()) - {item.ref for item in stored})
        if missing:
            raise NotFound(f"{', '.join(missing)}: not recorded", hint="areal get all")
        return tuple(Target(item, "unchanged") for item in stored if wanted is None or item.ref in wanted)

    return converge(desk, lambda: plan_targets(desk, choose, Policy()), lambda plan: True, timeout_s=timeout_s)
