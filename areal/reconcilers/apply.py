"""``diff``, ``drift`` and ``apply``: from manifests, or from what is recorded, to a plan; and its execution."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from areal.errors import ArealError, Conflict, UsageFault
from areal.reconcilers.admin_keys import require_usable_key
from areal.reconcilers.context import Context, Outcome, Progress
from areal.reconcilers.converge import NO_LIMIT, Approve, Choose, Desk, Prepared, converge, plan_targets
from areal.reconcilers.desired import Target, Wanted, check_removals, pruned, target_for
from areal.reconcilers.engine_flags import check_engine_args
from areal.reconcilers.job_service import with_services
from areal.reconcilers.manifests import check_against_state, rendered, wanted_of
from areal.reconcilers.model_work import Policy
from areal.reconcilers.observed import Observed
from areal.reconcilers.outcomes import outcome_of
from areal.reconcilers.plan import ObjectPlan, Plan, Refusal
from areal.reconcilers.planner import Scope, make_plan, without_ops
from areal.reconcilers.requests import ApplyRequest
from areal.reconcilers.saved_plan import read_plan, source_of
from areal.resources.kinds import parse_ref
from areal.resources.resource import Rendered
from areal.state.records import StoredObject

SERVED_KINDS = ("InferenceService", "Model", "TrainJob")


def diff(ctx: Context, request: ApplyRequest) -> Plan:
    """The plan that ``apply`` would run; what cannot be applied is blocked in it, with its reason. Read-only."""
    conflicts: dict[str, Conflict] = {}
    plan = _prepare(Desk.open(ctx), request, _wish(ctx, request), conflicts).plan
    return replace(plan, objects=tuple(_blocked(item, conflicts.get(item.ref)) for item in plan.objects))


def _blocked(item: ObjectPlan, conflict: Conflict | None) -> ObjectPlan:
    if conflict is None:
        return item
    refusal = Refusal("conflict", conflict.message, conflict.hint or "")
    return ObjectPlan(item.ref, "blocked", conflict.message, refusal=refusal)


def drift(ctx: Context, refs: Iterable[str] | None = None) -> Plan:
    """The plan that heals what is recorded, with every drift named. Read-only."""
    return plan_targets(Desk.open(ctx), recorded(refs), Policy()).plan


def apply(ctx: Context, request: ApplyRequest, approve: Approve) -> Outcome:
    """Converge to the manifests. Raises ArealError before the first effect; afterwards failures are in the outcome."""
    desk = Desk.open(ctx)
    saved = read_plan(request) if request.plan_file else None
    if saved is not None:
        request, wish = saved.request, _Wish(saved.wanted)
    else:
        wish = _wish(ctx, request)
    if request.dry_run:
        return outcome_of(_prepare(desk, request, wish).plan, dry_run=True)
    return converge(
        desk,
        lambda: _prepare(desk, request, wish),
        approve,
        timeout_s=request.timeout_s,
        wait=request.wait,
        check=saved.require_current if saved is not None else None,
    )


def recorded(refs: Iterable[str] | None = None) -> Choose:
    """Choose objects as they are recorded, all of them when ``refs`` is None."""
    wanted = None if refs is None else set(refs)

    def choose(stored: list[StoredObject]) -> tuple[Target, ...]:
        return tuple(Target(item, "unchanged") for item in stored if wanted is None or str(item.ref) in wanted)

    return choose


@dataclass(frozen=True)
class _Wish:
    """What is asked for, read once: a file that changes during an apply does not change the apply."""

    resources: tuple[Wanted, ...]
    rendered: Rendered | None = None


def _wish(ctx: Context, request: ApplyRequest) -> _Wish:
    """Raises ManifestError with every diagnostic of every file."""
    found = rendered(request.source)
    asked = lambda ref, stage: ctx.progress(Progress(ref, stage))  # noqa: E731
    check_engine_args(found, ctx.home.root / "cache" / "engine-flags", asked)
    return _Wish(tuple(wanted_of(resource) for resource in found.resources), found)


def _prepare(desk: Desk, request: ApplyRequest, wish: _Wish, conflicts: dict[str, Conflict] | None = None) -> Prepared:
    """``conflicts`` collects those of single objects, which then stay as they are; None: they are raised."""
    _require_some(request, wish.resources)

    def choose(stored: list[StoredObject]) -> tuple[Target, ...]:
        if wish.rendered is not None:
            check_against_state(wish.rendered, {item.ref for item in stored})
        wanted = with_services(wish.resources, stored, _anew(request, wish, stored))
        return _lay_over(desk, request, wanted, stored, conflicts)

    policy = Policy(allow_downtime=request.allow_downtime)
    if request.dry_run == "client":
        scope = Scope(choose(desk.store.list()))
        plan = without_ops(make_plan(scope, Observed(), replace(policy, free_gpus=NO_LIMIT)))
        return Prepared(scope, Observed(), plan)
    return plan_targets(desk, choose, policy, source_of(request, wish.resources))


def _anew(request: ApplyRequest, wish: _Wish, stored: Sequence[StoredObject]) -> list[str]:
    """Jobs that are deleted and created again."""
    wanted = {item.ref for item in wish.resources} if request.replace else set()
    return [str(item.ref) for item in stored if item.uid in request.anew or str(item.ref) in wanted]


def _require_some(request: ApplyRequest, wanted: Sequence[Wanted]) -> None:
    if not wanted and not request.allow_empty:
        raise UsageFault(
            "the manifests hold no resources", hint="--allow-empty applies an empty set (with --prune: deletes it)"
        )
    if request.prune and not request.set_name:
        raise UsageFault("--prune needs --set-name", hint="only members of a named set are ever pruned")


def _lay_over(
    desk: Desk,
    request: ApplyRequest,
    wanted: Sequence[Wanted],
    stored: list[StoredObject],
    collected: dict[str, Conflict] | None = None,
) -> tuple[Target, ...]:
    """The targets of all resources, and of what is pruned. Raises Conflict with every conflict of every object."""
    by_ref = {str(item.ref): item for item in stored}
    targets, conflicts = [], []
    for item in wanted:
        if item.ref not in by_ref:
            desk.store.require_readable(parse_ref(item.ref))  # a damaged file is never taken as absent
        try:
            targets.append(
                target_for(
                    item,
                    by_ref.get(item.ref),
                    set_name=request.set_name,
                    force_conflicts=request.force_conflicts,
                    replace_it=request.replace,
                    anew=request.anew,
                )
            )
        except Conflict as conflict:
            if collected is None:
                conflicts.append(conflict)
            else:
                collected[item.ref] = conflict
                targets.append(Target(by_ref[item.ref], "unchanged"))
    if conflicts:
        raise Conflict("\n".join(c.message for c in conflicts), hint=conflicts[0].hint)
    targets += pruned(stored, wanted, prune=request.prune, set_name=request.set_name)
    check_removals(stored, targets)
    _refuse_unserved(targets)
    for target in targets:
        if target.object.kind == "InferenceService" and not target.gone and not target.object.spec.get("suspend"):
            require_usable_key(desk.ctx.home, target.object)
    return tuple(targets)


def _refuse_unserved(targets: Iterable[Target]) -> None:
    """What this version cannot run is refused whole, before anything is recorded."""
    for target in targets:
        if target.gone or target.object.spec.get("suspend"):
            continue
        if target.object.kind not in SERVED_KINDS:
            raise ArealError(
                f"{target.ref}: running a {target.object.kind} is not implemented yet; nothing was changed",
                hint="`areal validate` checks the manifest; with `suspend: true` it can be recorded",
            )
        scheduler = (target.object.spec.get("scheduler") or {}).get("type", "local")
        if scheduler != "local":
            raise ArealError(
                f"{target.ref}: spec.scheduler.type {scheduler} is not implemented yet; nothing was changed",
                hint="use `type: local`; with `suspend: true` the object can be recorded",
            )
