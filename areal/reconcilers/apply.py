"""``diff``, ``drift`` and ``apply``: from manifests, or from what is recorded, to a plan; and its execution."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from areal.errors import ArealError, Conflict, InvalidManifest, UsageFault
from areal.reconcilers.admin_keys import require_usable_key
from areal.reconcilers.context import Context, Outcome, Progress
from areal.reconcilers.converge import NO_LIMIT, Approve, Choose, Desk, Prepared, converge, plan_targets
from areal.reconcilers.desired import Target, Wanted, check_removals, pruned, target_for
from areal.reconcilers.engine_flags import Asking, check_engine_args, engine_args_faults
from areal.reconcilers.job_configs import job_faults
from areal.reconcilers.job_service import with_services
from areal.reconcilers.manifests import (
    check_against_state,
    faults_against_state,
    render_request,
    rendered,
    wanted_of,
)
from areal.reconcilers.model_work import Policy
from areal.reconcilers.observed import Observed
from areal.reconcilers.outcomes import outcome_of, refusal_of, refused_error
from areal.reconcilers.plan import ObjectPlan, Plan
from areal.reconcilers.planner import Scope, make_plan, without_ops
from areal.reconcilers.requests import ApplyRequest
from areal.reconcilers.saved_plan import read_plan, source_of
from areal.resources.diagnostics import Diagnostic, ManifestError
from areal.resources.kinds import Ref, parse_ref
from areal.resources.registry import references
from areal.resources.render import render_valid
from areal.resources.resource import Rendered
from areal.state.records import StoredObject

SERVED_KINDS = ("InferenceService", "Model", "TrainJob")


def diff(ctx: Context, request: ApplyRequest) -> Plan:
    """The plan that ``apply`` would run; what cannot be applied is blocked in it, with its reason. Read-only. Raises
    ManifestError for faults of what all manifests share: flags, values, overlays."""
    if request.source.manifests:  # built by a verb from its flags: there is no rest to show
        return _prepare(Desk.open(ctx), request, _wish(ctx, request)).plan
    wish = _valid_wish(ctx, request)
    refused: dict[str, ArealError] = {}
    plan = _prepare(Desk.open(ctx), request, wish, refused).plan
    planned = {item.ref for item in plan.objects}
    objects = [_blocked(item.ref, refused[item.ref]) if item.ref in refused else item for item in plan.objects]
    objects += [_blocked(ref, error) for ref, error in refused.items() if ref not in planned]
    faults = [fault for error in refused.values() if isinstance(error, ManifestError) for fault in error.diagnostics]
    every = dict.fromkeys((*wish.faults, *faults))
    return replace(plan, objects=tuple(objects), faults=tuple(fault.to_json() for fault in every))


def _blocked(ref: str, error: ArealError) -> ObjectPlan:
    return ObjectPlan(ref, "blocked", error.message, refusal=refusal_of(error))


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
    """What is asked for, read once: a file that changes during an apply does not change the apply. ``spoiled``: objects
    whose manifests have ``faults``, and which are not among the resources."""

    resources: tuple[Wanted, ...]
    rendered: Rendered | None = None
    spoiled: Mapping[str, ArealError] = field(default_factory=dict)
    faults: tuple[Diagnostic, ...] = ()
    checked: dict[Ref, list[Diagnostic]] = field(default_factory=dict)  # jobs, when they were to begin


def _wish(ctx: Context, request: ApplyRequest) -> _Wish:
    """Raises ManifestError with every diagnostic of every file."""
    found = rendered(request.source)
    check_engine_args(found, ctx.home.root / "cache" / "engine-flags", _asking(ctx))
    wanted = tuple(wanted_of(resource) for resource in found.resources)
    if request.source.manifests:  # a verb built them from its flags: there is no file, and no place in it
        wanted = tuple(replace(item, where="") for item in wanted)
    return _Wish(wanted, found)


def _valid_wish(ctx: Context, request: ApplyRequest) -> _Wish:
    """What of the manifests can be read, and what is wrong with the rest."""
    valid = render_valid(render_request(request.source))
    spoiled = dict(valid.spoiled)
    for ref, faults in engine_args_faults(
        valid.rendered, ctx.home.root / "cache" / "engine-flags", _asking(ctx)
    ).items():
        spoiled[ref] = tuple(faults)
    resources = tuple(wanted_of(item) for item in valid.rendered.resources if item.ref not in spoiled)
    errors = {str(ref): ManifestError(faults) for ref, faults in spoiled.items()}
    return _Wish(resources, valid.rendered, errors, valid.faults)


def _asking(ctx: Context) -> Asking:
    return lambda ref, stage: ctx.progress(Progress(ref, stage))


def _prepare(desk: Desk, request: ApplyRequest, wish: _Wish, refused: dict[str, ArealError] | None = None) -> Prepared:
    """``refused`` collects why single objects cannot be applied; they then stay as they are. None: it is raised."""
    if not wish.faults:
        _require_some(request, wish.resources)

    def choose(stored: list[StoredObject]) -> tuple[Target, ...]:
        if refused is not None:
            return _possible(desk, request, wish, stored, refused)
        if wish.rendered is not None:
            check_against_state(wish.rendered, stored)
        anew = _anew(request, wish, stored)
        if faults := _job_faults(desk.ctx, wish, wish.resources, stored, anew):
            raise ManifestError(fault for found in faults.values() for fault in found)
        return _lay_over(desk, request, with_services(wish.resources, stored, anew), stored)

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


def _job_faults(
    ctx: Context, wish: _Wish, wanted: Iterable[Wanted], stored: Sequence[StoredObject], anew: Sequence[str]
) -> dict[Ref, list[Diagnostic]]:
    """What is wrong with jobs that are to begin; each is looked at once."""
    if wish.rendered is None:  # a saved plan's were, when it was made
        return {}
    running = {str(item.ref) for item in stored if str(item.ref) not in anew and not item.spec.get("suspend")}
    resources = {str(item.ref): item for item in wish.rendered.resources if item.kind == "TrainJob"}
    beginning = [
        (job, resources[job.ref])
        for job in wanted
        if job.ref in resources and job.ref not in running and not job.spec.get("suspend")
    ]
    new = [(job, resource) for job, resource in beginning if resource.ref not in wish.checked]
    found = job_faults(new, lambda ref: _asking(ctx)(ref, "checking its configuration"))
    wish.checked.update({resource.ref: found.get(resource.ref, []) for _, resource in new})
    return {it.ref: faults for _, it in beginning if (faults := wish.checked[it.ref])}


def _require_some(request: ApplyRequest, wanted: Sequence[Wanted]) -> None:
    if not wanted and not request.allow_empty:
        raise UsageFault(
            "the manifests hold no resources", hint="--allow-empty applies an empty set (with --prune: deletes it)"
        )
    if request.prune and not request.set_name:
        raise UsageFault("--prune needs --set-name", hint="only members of a named set are ever pruned")


def _lay_over(
    desk: Desk, request: ApplyRequest, wanted: Sequence[Wanted], stored: list[StoredObject]
) -> tuple[Target, ...]:
    """The targets of all resources, and of what is pruned. Raises Conflict with every conflict of every object."""
    by_ref = {str(item.ref): item for item in stored}
    targets, conflicts = [], []
    for item in wanted:
        try:
            targets.append(_target(desk, request, item, by_ref.get(item.ref)))
        except Conflict as conflict:
            conflicts.append(conflict)
    if conflicts:
        raise Conflict("\n".join(c.message for c in conflicts), hint=conflicts[0].hint)
    targets += pruned(stored, wanted, prune=request.prune, set_name=request.set_name)
    check_removals(stored, targets)
    for target in targets:
        _require_runnable(desk, target)
    return tuple(targets)


def _possible(
    desk: Desk, request: ApplyRequest, wish: _Wish, stored: list[StoredObject], refused: dict[str, ArealError]
) -> tuple[Target, ...]:
    """The targets of what can be applied; ``refused`` says why the rest cannot, which stays as it is recorded."""
    by_ref = {str(item.ref): item for item in stored}
    refused.clear()
    refused |= wish.spoiled
    if wish.rendered is not None:
        named = {parse_ref(ref) for ref in wish.spoiled}
        for ref, faults in faults_against_state(wish.rendered, stored, {item.ref for item in stored} | named).items():
            refused[str(ref)] = ManifestError(faults)
    read = [item for item in wish.resources if item.ref not in refused]
    anew = _anew(request, wish, stored)
    for ref, faults in _job_faults(desk.ctx, wish, read, stored, anew).items():
        refused[str(ref)] = ManifestError(faults)
    read = [item for item in read if item.ref not in refused]
    wanted = with_services(read, stored, anew, refused)
    targets = []
    for item in wanted:
        try:
            target = _target(desk, request, item, by_ref.get(item.ref))
            _require_runnable(desk, target)
            targets.append(target)
        except ArealError as error:
            refused[item.ref] = error
    _refuse_hanging(targets, set(refused) - set(by_ref), refused)
    kept = [*wanted, *(Wanted(ref, by_ref[ref].kind, by_ref[ref].name, {}, {}, {}) for ref in refused if ref in by_ref)]
    going = pruned(stored, kept, prune=request.prune, set_name=request.set_name)
    try:
        if going and wish.faults:
            raise InvalidManifest("what is to be deleted is not known while manifests have faults")
        check_removals(stored, [*targets, *going])
    except ArealError as error:
        refused |= {target.ref: error for target in going}
    targets = [target for target in (*targets, *going) if target.ref not in refused]
    return (*targets, *(Target(by_ref[ref], "unchanged") for ref in refused if ref in by_ref))


def _refuse_hanging(targets: Sequence[Target], absent: set[str], refused: dict[str, ArealError]) -> None:
    """What needs an object that is not there and cannot be made (``absent``) cannot be made either."""
    growing = True
    while growing:
        growing = False
        for target in targets:
            item = target.object
            needs = [*(str(found.ref) for found in references(item.kind, item.spec)), *item.depends_on]
            lost = next((need for need in (*needs, item.owner) if need in absent), None)
            if lost is not None and target.ref not in refused:
                why = refusal_of(refused[lost])
                message = f"{target.ref} needs {lost}, which cannot be applied"
                refused[target.ref] = refused_error(replace(why, message=message, hint=""))
                absent |= {target.ref} if target.action == "create" else set()
                growing = True


def _target(desk: Desk, request: ApplyRequest, item: Wanted, stored: StoredObject | None) -> Target:
    if stored is None:
        desk.store.require_readable(parse_ref(item.ref))  # a damaged file is never taken as absent
    return target_for(
        item,
        stored,
        set_name=request.set_name,
        force_conflicts=request.force_conflicts,
        replace_it=request.replace,
        anew=request.anew,
    )


def _require_runnable(desk: Desk, target: Target) -> None:
    """Raises InvalidManifest for what this version cannot run, and for a key that its processes would refuse: before
    anything is recorded."""
    kind, spec = target.object.kind, target.object.spec
    if target.gone or spec.get("suspend"):
        return
    if kind not in SERVED_KINDS:
        raise InvalidManifest(
            f"{target.ref}: running a {kind} is not implemented yet; nothing was changed",
            hint="`areal validate` checks the manifest; with `suspend: true` it can be recorded",
        )
    scheduler = (spec.get("scheduler") or {}).get("type", "local")
    if scheduler != "local":
        raise InvalidManifest(
            f"{target.ref}: spec.scheduler.type {scheduler} is not implemented yet; nothing was changed",
            hint="use `type: local`; with `suspend: true` the object can be recorded",
        )
    if kind == "InferenceService":
        require_usable_key(desk.ctx.home, target.object)
