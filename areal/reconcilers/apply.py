"""``diff``, ``drift`` and ``apply``: from manifests, saved plans or recorded objects to a plan, and its execution."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from areal.errors import ArealError, Conflict, InvalidManifest, UsageFault, did_you_mean
from areal.reconcilers.context import ApplyRequest, Context, ManifestSource, Outcome, Progress
from areal.reconcilers.converge import NO_LIMIT, Approve, Choose, CommandContext, Prepared, converge, plan_targets
from areal.reconcilers.desired import Target, Wanted, check_removals, pruned, target_for
from areal.reconcilers.kinds import Told, controller_of, controllers
from areal.reconcilers.observe import Observed
from areal.reconcilers.outcomes import outcome_of, refusal_of, refused_error
from areal.reconcilers.plan import PLAN_FORMAT, ObjectPlan, Plan
from areal.reconcilers.planner import make_plan
from areal.reconcilers.planning import PlanScope, Policy
from areal.resources.kinds import BACKENDS, Ref, parse_ref
from areal.resources.nodes import Diagnostic, ManifestError
from areal.resources.paths import with_absolute_paths
from areal.resources.render import RenderRequest, render, render_valid
from areal.resources.resource import Rendered, Resource
from areal.resources.validation import references
from areal.state.records import StoredObject


def rendered(source: ManifestSource) -> Rendered:
    """Raises ManifestError with every diagnostic of every file."""
    return render(render_request(source))


def render_request(source: ManifestSource) -> RenderRequest:
    # JSON is YAML: what an imperative verb built goes through the same loader as a file
    built = "\n---\n".join(json.dumps(manifest, indent=1) for manifest in source.manifests)
    return RenderRequest(
        files=source.files or (("-",) if source.manifests else ()),
        recursive=source.recursive,
        overlay=source.overlay,
        sets=source.sets,
        values_files=source.values_files,
        profile=source.profile,
        stdin=built or source.stdin,
    )


def wanted_of(resource: Resource) -> Wanted:
    source = resource.source.to_json()
    file = Path(resource.source.file)
    if file.exists():
        source["file"] = str(file.absolute())
    return Wanted(
        ref=str(resource.ref),
        kind=resource.kind,
        name=resource.name,
        spec=with_absolute_paths(resource.kind, resource.spec, resource.source.file),
        labels=resource.labels,
        annotations=resource.annotations,
        depends_on=tuple(resource.depends_on),
        owner=str(resource.owned_by) if resource.owned_by else None,
        source=source,
        where=str(resource.pos),
    )


def check_against_state(found: Rendered, stored: Sequence[StoredObject]) -> None:
    """Raises ManifestError with every fault of every object."""
    known = {item.ref for item in stored}
    faults = [fault for each in faults_against_state(found, stored, known).values() for fault in each]
    if faults:
        raise ManifestError(faults)


def faults_against_state(
    found: Rendered, stored: Sequence[StoredObject], known: Collection[Ref]
) -> dict[Ref, list[Diagnostic]]:
    """References to nothing, and what each kind finds, with positions, by the object that has them. ``known``: what may
    be referred to."""
    faults: dict[Ref, list[Diagnostic]] = {}
    for reference in found.unresolved:
        if reference.target not in known:
            message = (
                f"{reference.target} does not exist: neither in these manifests nor recorded"
                f"{did_you_mean(reference.target.name, names_of(known, reference.target.kind))}"
            )
            faults.setdefault(reference.source, []).append(Diagnostic(reference.pos, reference.path, message))
    declared = {resource.ref for resource in found.resources}
    others = [item for item in stored if item.ref not in declared]
    for kind, resources in by_kind(found.resources).items():
        for ref, more in controller_of(kind).faults_against_state(resources, others).items():
            faults.setdefault(ref, []).extend(more)
    return faults


def by_kind(resources: Iterable[Resource]) -> dict[str, list[Resource]]:
    found: dict[str, list[Resource]] = {}
    for resource in resources:
        found.setdefault(resource.kind, []).append(resource)
    return found


def names_of(known: Iterable[Ref], kind: str) -> list[str]:
    return sorted(ref.name for ref in known if ref.kind == kind)


# -- saved plans: they carry their resources, and run only while they are true

_OPTIONS = ("prune", "set_name", "allow_empty", "replace", "force_conflicts", "allow_downtime")


@dataclass(frozen=True)
class SavedPlan:
    """``request`` and ``wanted`` are what planning again needs; ``serial`` and ``ops`` what it must give."""

    path: str
    request: ApplyRequest
    wanted: tuple[Wanted, ...]
    serial: int
    ops: Sequence[Any]

    def require_current(self, plan: Plan) -> None:
        """Raises Conflict when state or processes have moved since the plan was made."""
        now = json.loads(json.dumps(plan.to_json()))
        if now["serial"] == self.serial and now["ops"] == self.ops:
            return
        moved = "what is recorded has changed" if now["serial"] != self.serial else "processes or routes have changed"
        raise Conflict(
            f"{self.path} is stale: {moved} since it was made; nothing was done",
            hint=f"make a new one: areal diff -f ... --out {self.path}",
        )


def source_of(request: ApplyRequest, wanted: Sequence[Wanted]) -> dict[str, Any]:
    """What a plan must carry to be made again."""
    options = {name: getattr(request, name) for name in _OPTIONS}
    return {"resources": [asdict(item) for item in wanted], "options": options}


def read_plan(request: ApplyRequest) -> SavedPlan:
    """Read ``request.plan_file``. Raises ArealError when it is no plan of this version."""
    path = request.plan_file
    assert path is not None
    if path.endswith((".yaml", ".yml")):
        raise UsageFault(f"{path} is no saved plan; manifests are named by -f", hint=f"areal apply -f {path}")
    try:
        saved = json.loads(Path(path).read_bytes())
        _check_format(path, saved)
        source = saved["source"]
        wanted = tuple(Wanted(**{**item, "depends_on": tuple(item["depends_on"])}) for item in source["resources"])
        options = {name: source["options"][name] for name in _OPTIONS}
        return SavedPlan(path, replace(request, plan_file=None, **options), wanted, saved["serial"], saved["ops"])
    except OSError as error:
        raise ArealError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ArealError(f"{path} is not a plan saved by `areal diff --out`: {error!r}") from error


def _check_format(path: str, saved: Mapping[str, Any]) -> None:
    found = saved.get("format")
    if found is not None and found != PLAN_FORMAT:
        raise ArealError(
            f"{path} was saved by another version of areal (format {found}, this one reads {PLAN_FORMAT})",
            hint="make a new one: areal diff -f ... --out FILE",
        )


# -- diff, drift, apply


def diff(ctx: Context, request: ApplyRequest) -> Plan:
    """The plan that ``apply`` would run; what cannot be applied is blocked in it, with its reason. Read-only. Raises
    ManifestError for faults of what all manifests share: flags, values, overlays."""
    if request.source.manifests:  # built by a verb from its flags: there is no rest to show
        return _prepare(CommandContext.open(ctx), request, _load(ctx, request)).plan
    loaded = _load_valid(ctx, request)
    refused: dict[str, ArealError] = {}
    plan = _prepare(CommandContext.open(ctx), request, loaded, refused).plan
    planned = {item.ref for item in plan.objects}
    objects = [_blocked(item.ref, refused[item.ref]) if item.ref in refused else item for item in plan.objects]
    objects += [_blocked(ref, error) for ref, error in refused.items() if ref not in planned]
    faults = [fault for error in refused.values() if isinstance(error, ManifestError) for fault in error.diagnostics]
    every = dict.fromkeys((*loaded.faults, *faults))
    return replace(plan, objects=tuple(objects), faults=tuple(fault.to_json() for fault in every))


def _blocked(ref: str, error: ArealError) -> ObjectPlan:
    return ObjectPlan(ref, "blocked", error.message, refusal=refusal_of(error))


def drift(ctx: Context, refs: Iterable[str] | None = None) -> Plan:
    """The plan that heals what is recorded, with every drift named. Read-only."""
    return plan_targets(CommandContext.open(ctx), recorded(refs), Policy()).plan


def apply(ctx: Context, request: ApplyRequest, approve: Approve) -> Outcome:
    """Converge to the manifests. Raises ArealError before the first effect; afterwards failures are in the outcome."""
    command = CommandContext.open(ctx)
    saved = read_plan(request) if request.plan_file else None
    if saved is not None:
        request, loaded = saved.request, _LoadedManifest(saved.wanted)
    else:
        loaded = _load(ctx, request)
    if request.dry_run:
        return outcome_of(_prepare(command, request, loaded).plan, dry_run=True)
    return converge(
        command,
        lambda: _prepare(command, request, loaded),
        approve,
        timeout_s=request.timeout_s,
        wait=request.wait,
        check=saved.require_current if saved is not None else lambda plan: None,
    )


def recorded(refs: Iterable[str] | None = None) -> Choose:
    """Choose objects as they are recorded, all of them when ``refs`` is None."""
    wanted = None if refs is None else set(refs)

    def choose(stored: list[StoredObject]) -> tuple[Target, ...]:
        return tuple(Target(item, "unchanged") for item in stored if wanted is None or str(item.ref) in wanted)

    return choose


@dataclass(frozen=True)
class _LoadedManifest:
    """What is asked for, read once: a file that changes during an apply does not change the apply. ``spoiled``: objects
    whose manifests have ``faults``, and which are not among the resources."""

    resources: tuple[Wanted, ...]
    rendered: Rendered | None = None
    spoiled: Mapping[str, ArealError] = field(default_factory=dict)
    faults: tuple[Diagnostic, ...] = ()
    checked: dict[Ref, list[Diagnostic]] = field(default_factory=dict)  # jobs, when they were to begin


def _load(ctx: Context, request: ApplyRequest) -> _LoadedManifest:
    """Raises ManifestError with every diagnostic of every file."""
    found = rendered(request.source)
    if faults := _faults(ctx, found.resources):
        raise ManifestError(fault for each in faults.values() for fault in each)
    wanted = tuple(wanted_of(resource) for resource in found.resources)
    if request.source.manifests:  # a verb built them from its flags: there is no file, and no place in it
        wanted = tuple(replace(item, where="") for item in wanted)
    return _LoadedManifest(wanted, found)


def _load_valid(ctx: Context, request: ApplyRequest) -> _LoadedManifest:
    """What of the manifests can be read, and what is wrong with the rest."""
    valid = render_valid(render_request(request.source))
    spoiled = dict(valid.spoiled)
    for ref, faults in _faults(ctx, valid.rendered.resources).items():
        spoiled[ref] = tuple(faults)
    resources = tuple(wanted_of(item) for item in valid.rendered.resources if item.ref not in spoiled)
    errors = {str(ref): ManifestError(faults) for ref, faults in spoiled.items()}
    return _LoadedManifest(resources, valid.rendered, errors, valid.faults)


def _faults(ctx: Context, resources: Iterable[Resource]) -> dict[Ref, list[Diagnostic]]:
    """What each kind finds wrong with its resources."""
    cache = ctx.home.root / "cache" / "engine-flags"
    found: dict[Ref, list[Diagnostic]] = {}
    for kind, mine in by_kind(resources).items():
        found |= controller_of(kind).faults(mine, cache, _told(ctx))
    return found


def _told(ctx: Context) -> Told:
    return lambda ref, stage: ctx.progress(Progress(ref, stage))


def _prepare(
    command: CommandContext,
    request: ApplyRequest,
    loaded: _LoadedManifest,
    refused: dict[str, ArealError] | None = None,
) -> Prepared:
    """``refused`` collects why single objects cannot be applied; they then stay as they are. None: it is raised."""
    if not loaded.faults:
        _require_some(request, loaded.resources)

    def choose(stored: list[StoredObject]) -> tuple[Target, ...]:
        if refused is not None:
            return _possible(command, request, loaded, stored, refused)
        if loaded.rendered is not None:
            check_against_state(loaded.rendered, stored)
        recreate = _recreated(request, loaded, stored)
        if faults := _start_faults(command.ctx, loaded, loaded.resources, stored, recreate):
            raise ManifestError(fault for found in faults.values() for fault in found)
        return _lay_over(command, request, _expanded(loaded.resources, stored, recreate), stored)

    policy = Policy(allow_downtime=request.allow_downtime)
    if request.dry_run == "client":
        scope = PlanScope(choose(command.store.list()))
        plan = make_plan(scope, Observed(), replace(policy, free_gpus=NO_LIMIT))
        return Prepared(scope, Observed(), replace(plan, ops=(), drift=(), destructive=()))  # fields only
    return plan_targets(command, choose, policy, source_of(request, loaded.resources))


def _recreated(request: ApplyRequest, loaded: _LoadedManifest, stored: Sequence[StoredObject]) -> list[str]:
    """Jobs that are deleted and created again."""
    wanted = {item.ref for item in loaded.resources} if request.replace else set()
    return [str(item.ref) for item in stored if item.uid in request.recreate or str(item.ref) in wanted]


def _expanded(
    wanted: Sequence[Wanted],
    stored: Sequence[StoredObject],
    recreate: Sequence[str],
    refused: MutableMapping[str, ArealError] | None = None,
) -> Sequence[Wanted]:
    """``wanted``, with what their kinds make of them."""
    for controller in controllers():
        wanted = controller.expand(wanted, stored, recreate, refused)
    return wanted


def _start_faults(
    ctx: Context,
    loaded: _LoadedManifest,
    wanted: Iterable[Wanted],
    stored: Sequence[StoredObject],
    recreate: Sequence[str],
) -> dict[Ref, list[Diagnostic]]:
    """What is wrong with objects that are to begin; each is looked at once."""
    if loaded.rendered is None:  # a saved plan's were, when it was made
        return {}
    running = {str(item.ref) for item in stored if str(item.ref) not in recreate and not item.spec.get("suspend")}
    resources = {str(item.ref): item for item in loaded.rendered.resources}
    beginning = [
        (item, resources[item.ref])
        for item in wanted
        if item.ref in resources and item.ref not in running and not item.spec.get("suspend")
    ]
    new = [(item, resource) for item, resource in beginning if resource.ref not in loaded.checked]
    found: dict[Ref, list[Diagnostic]] = {}
    for kind in dict.fromkeys(resource.kind for _, resource in new):
        mine = [(item, resource) for item, resource in new if resource.kind == kind]
        found |= controller_of(kind).faults_before_start(mine, _told(ctx))
    loaded.checked.update({resource.ref: found.get(resource.ref, []) for _, resource in new})
    return {it.ref: faults for _, it in beginning if (faults := loaded.checked[it.ref])}


def _require_some(request: ApplyRequest, wanted: Sequence[Wanted]) -> None:
    if not wanted and not request.allow_empty:
        raise UsageFault(
            "the manifests hold no resources", hint="--allow-empty applies an empty set (with --prune: deletes it)"
        )
    if request.prune and not request.set_name:
        raise UsageFault("--prune needs --set-name", hint="only members of a named set are ever pruned")


def _lay_over(
    command: CommandContext, request: ApplyRequest, wanted: Sequence[Wanted], stored: list[StoredObject]
) -> tuple[Target, ...]:
    """The targets of all resources, and of what is pruned. Raises Conflict with every conflict of every object."""
    by_ref = {str(item.ref): item for item in stored}
    targets, conflicts = [], []
    for item in wanted:
        try:
            targets.append(_target(command, request, item, by_ref.get(item.ref)))
        except Conflict as conflict:
            conflicts.append(conflict)
    if conflicts:
        raise Conflict("\n".join(c.message for c in conflicts), hint=conflicts[0].hint)
    targets += pruned(stored, wanted, prune=request.prune, set_name=request.set_name)
    check_removals(stored, targets)
    for target in targets:
        _require_runnable(command, target)
    return tuple(targets)


def _possible(
    command: CommandContext,
    request: ApplyRequest,
    loaded: _LoadedManifest,
    stored: list[StoredObject],
    refused: dict[str, ArealError],
) -> tuple[Target, ...]:
    """The targets of what can be applied; ``refused`` says why the rest cannot, which stays as it is recorded."""
    by_ref = {str(item.ref): item for item in stored}
    refused.clear()
    refused |= loaded.spoiled
    if loaded.rendered is not None:
        named = {parse_ref(ref) for ref in loaded.spoiled}
        for ref, faults in faults_against_state(loaded.rendered, stored, {item.ref for item in stored} | named).items():
            refused[str(ref)] = ManifestError(faults)
    read = [item for item in loaded.resources if item.ref not in refused]
    recreate = _recreated(request, loaded, stored)
    for ref, faults in _start_faults(command.ctx, loaded, read, stored, recreate).items():
        refused[str(ref)] = ManifestError(faults)
    read = [item for item in read if item.ref not in refused]
    wanted = _expanded(read, stored, recreate, refused)
    targets = []
    for item in wanted:
        try:
            target = _target(command, request, item, by_ref.get(item.ref))
            _require_runnable(command, target)
            targets.append(target)
        except ArealError as error:
            refused[item.ref] = error
    _refuse_hanging(targets, set(refused) - set(by_ref), refused)
    kept = [*wanted, *(Wanted(ref, by_ref[ref].kind, by_ref[ref].name, {}, {}, {}) for ref in refused if ref in by_ref)]
    going = pruned(stored, kept, prune=request.prune, set_name=request.set_name)
    try:
        if going and loaded.faults:
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


def _target(command: CommandContext, request: ApplyRequest, item: Wanted, stored: StoredObject | None) -> Target:
    if stored is None:
        command.store.require_readable(parse_ref(item.ref))  # a damaged file is never taken as absent
    return target_for(
        item,
        stored,
        set_name=request.set_name,
        force_conflicts=request.force_conflicts,
        replace_it=request.replace,
        recreate=request.recreate,
    )


def _require_runnable(command: CommandContext, target: Target) -> None:
    """Raises InvalidManifest for what this version cannot run, and for a key that its processes would refuse: before
    anything is recorded."""
    spec = target.object.spec
    if target.gone or spec.get("suspend"):
        return
    controller_of(target.object.kind).require_runnable(command.ctx.home, target.object)
    scheduler = (spec.get("scheduler") or {}).get("type", "local")
    if scheduler not in BACKENDS:
        raise InvalidManifest(
            f"{target.ref}: spec.scheduler.type {scheduler} is not implemented yet; nothing was changed",
            hint="use `type: local`; with `suspend: true` the object can be recorded",
        )
