"""``diff``, ``drift`` and ``apply``: from manifests, saved plans or recorded objects to a plan, and its execution."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from areal.dataclasses import dataclass, field, replace
from areal.errors import ArealError, Conflict, InvalidManifest, UsageFault, did_you_mean
from areal.files import parse_json
from areal.reconcilers.context import ApplyRequest, Context, Outcome
from areal.reconcilers.desired import (
    HeldFields,
    Target,
    Wanted,
    check_removals,
    is_derived,
    needs_of,
    pruned,
    target_for,
    with_derived,
)
from areal.reconcilers.kinds import StageReporter, controller_of, controllers
from areal.reconcilers.plan import PLAN_FORMAT, DoesNotFit, ObjectPlan, Plan, Verb, refusal_of, refused_error
from areal.reconcilers.planning import Policy
from areal.reconcilers.prepare import CommandContext, Prepared, plan_targets
from areal.resources.kinds import Ref, parse_ref
from areal.resources.nodes import Diagnostic, ManifestError
from areal.resources.paths import find_path, same_content, with_absolute_paths
from areal.resources.render import ValidPart, render_valid
from areal.resources.resource import Rendered, Resource
from areal.resources.tree import leaves
from areal.resources.validation import spec_model
from areal.state.records import StoredObject

if TYPE_CHECKING:
    from areal.reconcilers.converge import Approve


def wanted_of(resources: Iterable[Resource]) -> tuple[Wanted, ...]:
    def absolute(file: str) -> str:
        return os.path.abspath(file) if Path(file).exists() else file  # noqa: PTH100 - links stay links

    here, files, find = str(Path.cwd()), cache(absolute), cache(find_path)  # many objects name the same
    return tuple(
        Wanted(
            ref=str(resource.ref),
            kind=resource.kind,
            name=resource.name,
            spec=with_absolute_paths(resource.kind, resource.spec, source.file, find),
            labels=resource.labels,
            annotations=resource.annotations,
            depends_on=resource.depends_on,
            owner=str(resource.owned_by) if resource.owned_by else None,
            source={"file": files(source.file), "line": source.line, "sha256": source.sha256},
            where=str(resource.pos),
            applied_in=here,
        )
        for resource in resources
        for source in [resource.source]
    )


_OPTIONS = ("prune", "set_name", "allow_empty", "replace", "force_conflicts", "allow_downtime")


@dataclass(frozen=True)
class SavedPlan:
    """A saved plan. ``request`` and ``wanted`` are the inputs for planning again; ``serial`` and ``ops`` the expected
    result."""

    path: str
    request: ApplyRequest
    wanted: tuple[Wanted, ...]
    serial: int
    ops: Sequence[Any]

    @classmethod
    def read(cls, path: str, request: ApplyRequest) -> SavedPlan:
        """Read a saved plan. Raises ArealError if the file is not a plan of this version."""
        if path.endswith((".yaml", ".yml")) or Path(path).is_dir():
            raise UsageFault(f"{path} is not a saved plan; use -f for manifests", hint=f"areal apply -f {path}")
        try:
            saved = parse_json(Path(path).read_bytes())
            if (found := saved.get("format", PLAN_FORMAT)) != PLAN_FORMAT:
                raise ArealError(
                    f"{path} was saved by another version of areal (format {found}, this one reads {PLAN_FORMAT})",
                    hint="make a new one: areal diff -f ... --out FILE",
                )
            source = saved["source"]
            wanted = tuple(Wanted(**{**item, "depends_on": tuple(item["depends_on"])}) for item in source["resources"])
            options = {name: source["options"][name] for name in _OPTIONS}
            return cls(path, replace(request, plan_file=None, **options), wanted, saved["serial"], saved["ops"])
        except OSError as error:
            raise UsageFault(f"the plan {path} cannot be read: {error.strerror}") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ArealError(f"{path} is not a plan saved by `areal diff --out`: {error!r}") from error

    def require_current(self, plan: Plan) -> None:
        """Raise Conflict if state or processes have changed since the plan was made."""
        now = json.loads(json.dumps(plan.to_json()))
        if now["serial"] == self.serial and now["ops"] == self.ops:
            return
        moved = "recorded objects have changed" if now["serial"] != self.serial else "processes or routes have changed"
        raise Conflict(
            f"{self.path} is stale: {moved} since it was made; nothing was done",
            hint=f"make a new one: areal diff -f ... --out {self.path}",
        )


def diff(ctx: Context, request: ApplyRequest) -> Plan:
    """Return the plan that ``apply`` would run. Objects that cannot be applied are blocked, with the reason. Read-only.
    Raises ManifestError for faults in flags, values and overlays, which all manifests share."""
    command = CommandContext.open(ctx)
    if request.source.manifests:  # a verb built them from its flags: all or nothing
        return _Manifests.load(command, request).prepare().plan
    loaded = _Manifests.load_valid(command, request)
    refused: dict[str, ArealError] = {}
    too_large: dict[str, ArealError] = {}
    while True:
        try:
            prepared = loaded.prepare(refused, too_large)
            if not request.assume_capacity:
                _require_ports(command, prepared, too_large)
            plan = prepared.plan
            break
        except DoesNotFit as error:  # each turn plans for one object less
            too_large[error.ref] = error
    blocked = {ref: ObjectPlan(ref, "blocked", why.message, refusal=refusal_of(why)) for ref, why in refused.items()}
    objects = {item.ref: item for item in plan.objects} | blocked
    faults = [fault for error in refused.values() if isinstance(error, ManifestError) for fault in error.diagnostics]
    every = dict.fromkeys((*loaded.faults, *faults))
    return replace(plan, objects=tuple(objects.values()), faults=tuple(every))


def _require_ports(command: CommandContext, prepared: Prepared, without: Collection[str]) -> None:
    """Raise DoesNotFit if a process that the plan starts would not get its port."""
    if not any(op.verb is Verb.SPAWN for op in prepared.plan.ops):
        return
    from areal.reconcilers.execute import require_ports  # which an unchanged `diff` does not need

    items = {target.ref: target.object for target in prepared.scope.all}
    specs = {ref: item.spec for ref, item in items.items()}
    schedulers = partial(command.scheduler_of, items)
    require_ports(prepared.plan, prepared.observed, specs, command.backend.named, schedulers, without=without)


def apply(ctx: Context, request: ApplyRequest, approve: Approve) -> Outcome:
    """Converge to the manifests. Raises ArealError before the first effect; afterwards failures are in the outcome."""
    from areal.reconcilers.converge import converge  # which `diff` does not need
    from areal.reconcilers.outcomes import with_failed_dependencies

    command = CommandContext.open(ctx)
    saved = SavedPlan.read(request.plan_file, request) if request.plan_file else None
    if saved is not None:
        request, loaded = saved.request, _Manifests(command, saved.request, saved.wanted)
    else:
        loaded = _Manifests.load(command, request)
    check = saved.require_current if saved is not None else lambda plan: None
    made: list[Prepared] = []

    def prepare() -> Prepared:
        made.append(loaded.prepare())
        return made[-1]

    outcome = converge(command, prepare, approve, timeout_s=request.timeout_s, wait=request.wait, check=check)
    return with_failed_dependencies(ctx, command.backend, made[-1].scope, outcome)


Faults = dict[Ref, list[Diagnostic]]


def _raise_errors(errors: Sequence[ArealError]) -> None:
    """Raise ManifestError with every fault of every object; without faults, the first error that is not a conflict;
    otherwise Conflict with every conflict."""
    faults = [fault for error in errors if isinstance(error, ManifestError) for fault in error.diagnostics]
    if faults:
        raise ManifestError(faults)
    for error in errors:
        if not isinstance(error, Conflict):
            raise error
    held = [part for error in errors if isinstance(error, HeldFields) for part in error.parts]
    if held and len(held) == len(errors):
        raise HeldFields(*held)
    if errors:
        raise Conflict("\n".join(error.message for error in errors), hint=errors[0].hint)


@dataclass(frozen=True)
class _Manifests:
    """The requested objects, read once: a file that changes during an apply does not change the apply.

    ``invalid``: objects left out of the resources because their manifests have ``faults``. ``checked``: the faults of
    objects that start; each object is checked once.
    """

    command: CommandContext
    request: ApplyRequest
    resources: tuple[Wanted, ...]
    rendered: Rendered | None = None
    invalid: Mapping[str, ArealError] = field(default_factory=dict)
    faults: tuple[Diagnostic, ...] = ()
    checked: Faults = field(default_factory=dict)

    @classmethod
    def load(cls, command: CommandContext, request: ApplyRequest) -> _Manifests:
        """Load the manifests. Raises ManifestError with every diagnostic of every file."""
        valid = render_valid(request.source)
        if valid.faults:
            raise ManifestError((*valid.faults, *(fault for more in _file_faults(valid).values() for fault in more)))
        found = valid.rendered
        _raise_errors([ManifestError(faults) for faults in _faults(command.ctx, found.resources).values()])
        wanted = wanted_of(found.resources)
        if request.source.manifests:  # a verb built them from its flags: there is no file, and no place in it
            wanted = tuple(replace(item, where="") for item in wanted)
        return cls(command, request, wanted, found)

    @classmethod
    def load_valid(cls, command: CommandContext, request: ApplyRequest) -> _Manifests:
        """Load the valid resources, and the faults of the others."""
        valid = render_valid(request.source)
        invalid = {**valid.invalid, **_faults(command.ctx, valid.rendered.resources)}
        resources = wanted_of(item for item in valid.rendered.resources if item.ref not in invalid)
        more = _file_faults(valid)
        errors = {str(ref): ManifestError((*faults, *more.get(ref, ()))) for ref, faults in invalid.items()}
        return cls(command, request, resources, valid.rendered, errors, valid.faults)

    def prepare(
        self, refused: dict[str, ArealError] | None = None, too_large: Mapping[str, ArealError] | None = None
    ) -> Prepared:
        """Return the plan and its inputs. ``refused`` collects the errors of objects that cannot be applied, which then
        stay as they are; if it is None, errors are raised. ``too_large``: objects for which an earlier plan had no
        room."""
        request = self.request
        if not self.faults and not self.resources and not request.allow_empty:
            raise UsageFault(
                "the manifests contain no resources",
                hint="--allow-empty applies an empty set (with --prune: deletes it)",
            )

        def choose(stored: list[StoredObject]) -> tuple[Target, ...]:
            errors = {} if refused is None else refused
            errors.clear()
            wanted, targets = self._requested(stored, errors, too_large or {})
            if refused is not None:
                return self._possible_targets(stored, wanted, targets, refused)
            _raise_errors(list(errors.values()))
            targets += self._pruned(stored, wanted)
            check_removals(stored, targets, self._needs_nothing)
            return tuple(targets)

        options = {name: getattr(request, name) for name in _OPTIONS}
        source = {"resources": [{**vars(item)} for item in self.resources], "options": options}
        policy = Policy(allow_downtime=request.allow_downtime, assume_capacity=request.assume_capacity)
        return plan_targets(self.command, choose, policy, source)

    def _requested(
        self, stored: Sequence[StoredObject], refused: dict[str, ArealError], too_large: Mapping[str, ArealError]
    ) -> tuple[Sequence[Wanted], list[Target]]:
        """Return the requested objects with the objects that they bring along, and the targets of those that can be
        applied. ``refused`` collects the errors of the others."""
        by_ref = {str(item.ref): item for item in stored}
        refused |= self.invalid
        known = {item.ref for item in stored} | {parse_ref(ref) for ref in self.invalid}
        refused |= {str(ref): ManifestError(it) for ref, it in self._faults_against_state(stored, known).items()}
        replaced = {item.ref for item in self.resources} if self.request.replace else set()
        recreate = [str(it.ref) for it in stored if it.uid in self.request.recreate or str(it.ref) in replaced]
        placed = _with_working_dirs(self.resources, stored, recreate)
        settled = _with_files_in_use(placed, stored, recreate, self.command.ctx.report)
        settled = _with_absent_secrets(settled, stored, recreate)
        read = [item for item in settled if item.ref not in refused]
        refused |= {str(ref): ManifestError(it) for ref, it in self._start_faults(read, stored, recreate).items()}
        wanted: Sequence[Wanted] = [item for item in read if item.ref not in refused]
        for controller in controllers({item.kind for item in stored} | {item.kind for item in wanted}):
            wanted = controller.expand(wanted, stored, recreate, refused)
        refused |= too_large
        targets = []
        for item in wanted:
            if item.ref in too_large:
                continue
            try:
                target = self._target(item, by_ref.get(item.ref))
                if not target.is_deleted and not target.object.spec.get("suspend"):
                    controller_of(target.object.kind).require_runnable(self.command.ctx.home, target.object)
                targets.append(target)
            except ArealError as error:
                refused[item.ref] = error
        return wanted, targets

    def _possible_targets(
        self,
        stored: Sequence[StoredObject],
        wanted: Sequence[Wanted],
        targets: Sequence[Target],
        refused: dict[str, ArealError],
    ) -> tuple[Target, ...]:
        """Return ``targets`` and the objects to prune. Targets that depend on a refused object are refused, too;
        refused objects stay as recorded."""
        by_ref = {str(item.ref): item for item in stored}
        _refuse_dependents(targets, set(refused) - set(by_ref), refused)
        kept = [by_ref[ref] for ref in refused if ref in by_ref]
        going = self._pruned(stored, [*wanted, *(Wanted(str(it.ref), it.kind, it.name, {}, {}, {}) for it in kept)])
        try:
            if going and self.faults:
                raise InvalidManifest("the objects to prune are not known while manifests have faults")
            check_removals(stored, [*targets, *going], self._needs_nothing)
        except ArealError as error:
            refused |= {target.ref: error for target in going}
        targets = [target for target in (*targets, *going) if target.ref not in refused]
        return (*targets, *(Target(by_ref[ref], "unchanged") for ref in refused if ref in by_ref))

    def _faults_against_state(self, stored: Sequence[StoredObject], known: Collection[Ref]) -> Faults:
        """Return unresolved references and the faults that each kind finds, with positions, by object. ``known``:
        objects that may be referred to."""
        faults: Faults = {}
        if self.rendered is None:  # a saved plan was checked when it was made
            return faults
        for reference in self.rendered.unresolved:
            missing = reference.target
            if missing not in known:
                names = sorted(ref.name for ref in known if ref.kind == missing.kind)
                where = "" if self.request.source.manifests else ": neither in these manifests nor recorded"
                message = f"{missing} does not exist{where}"
                fault = Diagnostic(reference.pos, reference.path, message + did_you_mean(missing.name, names))
                faults.setdefault(reference.source, []).append(fault)
        declared = {resource.ref for resource in self.rendered.resources}
        others = [item for item in stored if item.ref not in declared]
        for kind, resources in _by_kind(self.rendered.resources).items():
            for ref, more in controller_of(kind).faults_against_state(resources, others).items():
                faults.setdefault(ref, []).extend(more)
        return faults

    def _start_faults(
        self, wanted: Iterable[Wanted], stored: Sequence[StoredObject], recreate: Sequence[str]
    ) -> Faults:
        """Return the faults that would keep objects about to start from running."""
        if self.rendered is None:
            return {}
        running = {str(item.ref) for item in stored if str(item.ref) not in recreate and not item.spec.get("suspend")}
        resources = {str(item.ref): item for item in self.rendered.resources}
        beginning = [
            (item, resources[item.ref])
            for item in wanted
            if item.ref in resources and item.ref not in running and not item.spec.get("suspend")
        ]
        new = [(item, resource) for item, resource in beginning if resource.ref not in self.checked]
        for kind in dict.fromkeys(resource.kind for _, resource in new):
            mine = [(item, resource) for item, resource in new if resource.kind == kind]
            found = controller_of(kind).faults_before_start(mine, self.command.ctx.report)
            self.checked.update({resource.ref: found.get(resource.ref, []) for _, resource in mine})
        return {it.ref: faults for _, it in beginning if (faults := self.checked[it.ref])}

    def _needs_nothing(self, item: StoredObject) -> bool:
        """Return whether an object has ended, and these manifests do not declare it again."""
        from areal.reconcilers.status import completion_of

        declared = any(each.ref == str(item.ref) for each in self.resources)
        return not declared and bool(completion_of(self.command.ctx.home, item).ended)

    def _pruned(self, stored: Sequence[StoredObject], wanted: Sequence[Wanted]) -> list[Target]:
        return pruned(stored, wanted, prune=self.request.prune, set_name=self.request.set_name)

    def _target(self, item: Wanted, stored: StoredObject | None) -> Target:
        if stored is None:
            self.command.store.is_lost(parse_ref(item.ref))  # a lost record is replaced; another one is not absent
        elif self.request.source.manifests:  # flags name no owner
            item = replace(item, owner=item.owner or stored.owner)
        return target_for(
            item,
            stored,
            set_name=self.request.set_name,
            force_conflicts=self.request.force_conflicts,
            replace_it=self.request.replace,
            recreate=self.request.recreate,
        )


def _with_working_dirs(
    wanted: Iterable[Wanted], stored: Iterable[StoredObject], recreate: Sequence[str]
) -> list[Wanted]:
    """Return ``wanted``, each with the folder in which its processes start: the manifest's, or the one where it was
    first applied."""
    known = {str(item.ref): item for item in stored if str(item.ref) not in recreate}

    def placed(item: Wanted) -> Wanted:
        if ("workingDir",) not in spec_model(item.kind).FILES:
            return item
        folder, earlier = item.applied_in, known.get(item.ref)
        if earlier is not None and "workingDir" not in earlier.spec:
            folder = ""  # an earlier version recorded it: as it is
        elif earlier is not None and is_derived(earlier, ("workingDir",), unnoted=False):
            folder = earlier.spec["workingDir"]
        return with_derived(
            item, {**({"workingDir": folder} if folder else {}), **item.spec}, [("workingDir",)], earlier
        )

    return [placed(item) for item in wanted]


def _with_files_in_use(
    wanted: Iterable[Wanted], stored: Iterable[StoredObject], recreate: Sequence[str], report: StageReporter
) -> list[Wanted]:
    """Return ``wanted``. An object whose manifest is now in another folder keeps the recorded files and folders if
    those beside the manifest hold the same, so that a copy of a folder replaces no process."""
    known = {str(item.ref): item.applied for item in stored if str(item.ref) not in recreate}

    def settled(item: Wanted) -> Wanted:
        layer = known.get(item.ref)
        before = ((layer.source or {}) if layer is not None else {}).get("file", "")
        now = (item.source or {}).get("file", "")
        if layer is None or before == now or layer.spec == item.spec or not (before[:1] == now[:1] == "/"):
            return item
        recorded = [value for value in leaves(layer.spec).values() if isinstance(value, str)]

        def in_use(value: str, *_: object) -> Path | None:
            place = os.path.normpath(Path(before).parent / os.path.relpath(value, Path(now).parent))
            if value[:1] != "/" or value == item.spec.get("workingDir") or place == value or place not in recorded:
                return None
            if not same_content(place, value):
                return None
            report(item.ref, f"its files are the same as before, and {place} stays in use")
            return Path(place)

        return replace(item, spec=with_absolute_paths(item.kind, item.spec, find=in_use))

    return [settled(item) for item in wanted]


def _with_absent_secrets(
    wanted: Iterable[Wanted], stored: Iterable[StoredObject], recreate: Sequence[str]
) -> list[Wanted]:
    """Return ``wanted``. A secret's file that is gone stays as it is recorded: the manifest still names it, and the
    processes that run have read it."""
    known = {str(item.ref): item.applied for item in stored if str(item.ref) not in recreate}

    def settled(item: Wanted) -> Wanted:
        layer = known.get(item.ref)
        if layer is None or layer.spec == item.spec:
            return item
        recorded = {value for path, value in leaves(layer.spec).items() if path[-1:] == ("file",)}
        folders = [item.applied_in, *map(str, Path((item.source or {}).get("file", "")).parents[:2])]

        def as_before(value: str, *_: object) -> Path | None:
            places = (os.path.normpath(Path(folder, value).expanduser()) for folder in folders)
            return next((Path(place) for place in places if place in recorded), None)

        return replace(item, spec=with_absolute_paths(item.kind, item.spec, find=as_before)) if recorded else item

    return [settled(item) for item in wanted]


def _by_kind(resources: Iterable[Resource]) -> dict[str, list[Resource]]:
    found: dict[str, list[Resource]] = {}
    for resource in resources:
        found.setdefault(resource.kind, []).append(resource)
    return found


def _faults(ctx: Context, resources: Iterable[Resource]) -> Faults:
    """Return the faults that each kind finds in its resources."""
    cache = ctx.home.root / "cache" / "engine-flags"
    found: Faults = {}
    for kind, mine in _by_kind(resources).items():
        found |= controller_of(kind).faults(mine, cache, ctx.report)
    return found


def _file_faults(valid: ValidPart) -> Faults:
    """Return the faults in what resources refer to, for resources with other faults, so that all are reported at
    once."""
    found: Faults = {}
    for kind, mine in _by_kind(valid.faulty).items():
        found |= controller_of(kind).faults_against_state(mine, ())
    return found


def _refuse_dependents(targets: Sequence[Target], absent: set[str], refused: dict[str, ArealError]) -> None:
    """Refuse targets that need an object that does not exist and cannot be created (``absent``)."""
    growing = True
    while growing:
        growing = False
        for target in targets:
            lost = next((need for need in (*needs_of(target.object), target.object.owner) if need in absent), None)
            if lost is not None and target.ref not in refused:
                why = refusal_of(refused[lost])
                message = f"{target.ref} needs {lost}, which cannot be applied"
                refused[target.ref] = refused_error(replace(why, message=message, hint="", has_faults=False))
                absent |= {target.ref} if target.action == "create" else set()
                growing = True
