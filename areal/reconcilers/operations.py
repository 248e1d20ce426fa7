"""The imperative operations and ``reconcile``: targets from the recorded objects, converged as ``apply`` does."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from areal.errors import Conflict, NotFound, did_you_mean
from areal.reconcilers.apply import apply
from areal.reconcilers.context import ApplyRequest, Context, ManifestSource, ObjectOutcome, Outcome
from areal.reconcilers.converge import CommandContext, Prepared, converge, plan_targets
from areal.reconcilers.desired import Target, check_removals, deletions, restored, with_layer
from areal.reconcilers.kinds import controller_of, host_of
from areal.reconcilers.observe import ObservedRun
from areal.reconcilers.outcomes import outcome_of
from areal.reconcilers.plan import Plan
from areal.reconcilers.planning import Policy
from areal.resources.kinds import Ref
from areal.runtime.backends import Backends
from areal.state.objects import ObjectStore
from areal.state.records import Revision, StoredObject

SCALE = "scale"
SUSPEND = "suspend"
DEFAULT_TIMEOUT_S = 600.0

Edit = Callable[[list[StoredObject]], tuple[Target, ...]]


def _yes(plan: Plan) -> bool:
    return True


def require(store: ObjectStore, ref: Ref) -> StoredObject:
    """The stored object. Raises NotFound with a suggestion, Unreadable."""
    found = store.get(ref)
    if found is not None:
        return found
    names = [item.name for item in store.list(ref.kind)]
    raise NotFound(f"{ref} does not exist{did_you_mean(ref.name, names)}", hint=f"areal get {ref.kind.lower()}")


def _converge(
    ctx: Context, edit: Edit, *, policy: Policy | None = None, timeout_s: float, approve: Callable[[Plan], bool] = _yes
) -> Outcome:
    command = CommandContext.open(ctx)

    def prepare() -> Prepared:
        return plan_targets(command, edit, policy or Policy())

    return converge(command, prepare, approve, timeout_s=timeout_s)


def delete(
    ctx: Context,
    refs: Sequence[Ref],
    grace_s: float | None = None,
    cascade: bool = False,
    wait: bool = True,
    approve: Callable[[Plan], bool] = _yes,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    ignore_not_found: bool = False,
    spare_running_jobs: bool = False,
) -> Outcome:
    """Stop and forget. Owned objects go with their owner; others that depend on one need ``cascade``. Not to ``wait``
    is not to wait for running requests. ``spare_running_jobs``: raises Conflict where a job that has not ended would go
    along."""
    store = ObjectStore(ctx.home)
    if not ignore_not_found:
        for ref in refs:
            require(store, ref)

    gone: set[Ref] = set()

    def edit(stored: list[StoredObject]) -> tuple[Target, ...]:
        targets = deletions(stored, [str(ref) for ref in refs], cascade=cascade)
        if spare_running_jobs:
            _refuse_running_jobs(ctx, stored, targets)
        check_removals(stored, targets)
        gone.update(target.object.ref for target in targets)
        return tuple(targets)

    policy = Policy(grace_s=grace_s, drain=wait)
    outcome = _converge(ctx, edit, policy=policy, timeout_s=timeout_s, approve=approve)
    for ref in gone:
        if store.get(ref) is None:
            controller_of(ref.kind).deleted(ctx.home, ref)
    return outcome


def _refuse_running_jobs(ctx: Context, stored: Sequence[StoredObject], targets: Sequence[Target]) -> None:
    """Raises Conflict naming jobs that have not ended, and would go or lose the service that they brought."""
    touched = {target.ref for target in targets} | {str(target.object.owner) for target in targets}
    running = [ref for item in stored if (ref := str(item.ref)) in touched and _is_running(ctx, item)]
    if running:
        raise Conflict(
            f"{', '.join(sorted(running))} would be deleted or left without its service; nothing was changed",
            hint="areal train stop NAME ends a job and keeps it; --cascade deletes the running jobs too, after a yes",
        )


def _is_running(ctx: Context, item: StoredObject) -> bool:
    controller = controller_of(item.kind)
    return controller.runs_to_completion and controller.running(item.spec, _runs_of(ctx, item))


def _finished(ctx: Context, item: StoredObject) -> str:
    """The phase in which an object has ended for good; "" where it has not."""
    controller = controller_of(item.kind)
    return controller.finished(item.spec, _runs_of(ctx, item)) if controller.runs_to_completion else ""


def _runs_of(ctx: Context, item: StoredObject) -> list[ObservedRun]:
    states = Backends(ctx.home.root).observe().values()
    return [ObservedRun(state) for state in states if state.spec.owner == str(item.ref)]


def scale(
    ctx: Context,
    ref: Ref,
    replicas: int,
    model: str | None = None,
    current: int | None = None,
    force: bool = False,
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> Outcome:
    """Set the ``scale`` layer's replicas; it wins over a manifest that does not mention them."""
    store = ObjectStore(ctx.home)
    require(store, ref)
    target_ref = controller_of(ref.kind).scaled(store, ref, model)
    controller = controller_of(target_ref.kind)

    def edit(stored: list[StoredObject]) -> tuple[Target, ...]:
        item = _pick(stored, target_ref)
        now = controller.replicas(item.spec)
        if now == replicas and not item.spec.get("suspend"):
            return (Target(item, "unchanged"),)
        if current is not None and current != now and not force:
            raise Conflict(f"{target_ref} has {now} replicas, not {current}", hint=f"areal get {target_ref}")
        return (with_layer(item, SCALE, {controller.replicas_field: replicas}, f"scaled {now} -> {replicas}"),)

    return _reworded(_converge(ctx, edit, timeout_s=timeout_s), {"configured": "scaled"})


def restart(ctx: Context, ref: Ref, timeout_s: float = DEFAULT_TIMEOUT_S) -> Outcome:
    """Replace every process of the object, the way its strategy says. Raises Conflict where it is suspended."""
    if require(ObjectStore(ctx.home), ref).spec.get("suspend"):
        raise Conflict(f"{ref} is suspended: it has no process", hint=f"areal resume {ref} starts it")
    stamp = f"{time.time():.3f}"

    def edit(stored: list[StoredObject]) -> tuple[Target, ...]:
        item = _pick(stored, ref)
        if item.status.get("restartedAt") == stamp:
            return (Target(item, "unchanged"),)
        marked = replace(item, status={**item.status, "restartedAt": stamp})
        return (Target(marked, "configure", cause="restart requested"),)

    return _reworded(_converge(ctx, edit, timeout_s=timeout_s), {"configured": "restarted"})


def suspend(ctx: Context, ref: Ref, timeout_s: float = DEFAULT_TIMEOUT_S, grace_s: float | None = None) -> Outcome:
    """``grace_s`` between SIGTERM and SIGKILL of a job's driver; None: as it was started with."""
    require(ObjectStore(ctx.home), ref)

    def edit(stored: list[StoredObject]) -> tuple[Target, ...]:
        item = _pick(stored, ref)
        if item.spec.get("suspend"):
            return (Target(item, "unchanged", cause="it is suspended already"),)
        if phase := _finished(ctx, item):
            return (Target(item, "unchanged", cause=f"it has ended: {phase}"),)
        return (with_layer(item, SUSPEND, {"suspend": True}, "suspended"),)

    outcome = _converge(ctx, edit, policy=Policy(grace_s=grace_s), timeout_s=timeout_s)
    if controller_of(ref.kind).runs_to_completion and not outcome.exit_code:
        rest(ctx, ref, timeout_s)
    return _reworded(outcome, {"configured": "suspended"})


def rest(ctx: Context, job: Ref, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
    """A job that is at rest needs the service that it brought no longer."""
    store = ObjectStore(ctx.home)
    if any(item.owner == str(job) for item in store.list()):
        _converge(ctx, lambda stored: (Target(_pick(stored, job), "unchanged"),), timeout_s=timeout_s)


def resume(ctx: Context, ref: Ref, timeout_s: float = DEFAULT_TIMEOUT_S) -> Outcome:
    """Raises Conflict where it would not run all the same: it has ended, or what it belongs to does not run."""
    store = ObjectStore(ctx.home)
    _refuse_resting(ctx, require(store, ref), {str(each.ref): each for each in store.list()})

    def edit(stored: list[StoredObject]) -> tuple[Target, ...]:
        item = _pick(stored, ref)
        if not item.spec.get("suspend"):
            return (Target(item, "unchanged", cause="it is not suspended"),)
        dropped = with_layer(item, SUSPEND, {}, "resumed")
        if dropped.object.spec.get("suspend"):  # the manifest says so: this layer says otherwise
            return (with_layer(item, SUSPEND, {"suspend": False}, "resumed"),)
        return (dropped,)

    return _reworded(_converge(ctx, edit, timeout_s=timeout_s), {"configured": "resumed"})


def _refuse_resting(ctx: Context, item: StoredObject, known: Mapping[str, StoredObject]) -> None:
    """Raises Conflict naming what has to be started instead."""
    owner = known.get(item.owner or "")
    for each in (item, owner):
        if each is None or (each is item and item.spec.get("suspend")) or not (phase := _finished(ctx, each)):
            continue
        subject = str(item.ref) if each is item else f"{item.ref} belongs to {each.ref}, which"
        raise Conflict(f"{subject} has ended ({phase})", hint=f"areal restart {each.ref} runs it again")
    host = known.get(host_of(item) or "")
    if host is not None and host.spec.get("suspend"):
        raise Conflict(f"{item.ref} rests with {host.ref}, which is suspended", hint=f"areal resume {host.ref}")


def rollback(
    ctx: Context, ref: Ref, to: int | None = None, dry_run: bool = False, timeout_s: float = DEFAULT_TIMEOUT_S
) -> Outcome:
    """Apply an earlier revision's spec as a new one; the ``scale`` layer goes with what it belonged to."""
    store = ObjectStore(ctx.home)
    present = require(store, ref)
    chosen = _revision(store.revisions(ref), present, to)

    def edit(stored: list[StoredObject]) -> tuple[Target, ...]:
        return (restored(_pick(stored, ref), chosen),)

    if dry_run:
        plan = plan_targets(CommandContext.open(ctx), edit, Policy()).plan
        return outcome_of(plan, dry_run=True)
    return _reworded(_converge(ctx, edit, timeout_s=timeout_s), {"configured": "rolled back"})


def _revision(found: Sequence[Revision], present: StoredObject, to: int | None) -> Revision:
    if to is not None:
        match = next((revision for revision in found if revision.number == to), None)
        if match is None:
            numbers = ", ".join(str(revision.number) for revision in found)
            raise NotFound(f"{present.ref} has no revision {to}; it has {numbers}", hint=f"areal history {present.ref}")
        return match
    earlier = [revision for revision in found if revision.number < present.revision]
    if not earlier:
        raise NotFound(f"{present.ref} has no earlier revision", hint=f"areal history {present.ref}")
    return earlier[-1]


def adopt(
    ctx: Context,
    ref: Ref,
    pid: int | None = None,
    url: str | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    service: str = "default",
) -> Outcome:
    """Route to what already runs, without restarting it. Its life stays its owner's."""
    manifest = controller_of(ref.kind).adopted(ObjectStore(ctx.home), ref, pid, url, service)
    outcome = apply(ctx, ApplyRequest(ManifestSource(manifests=(manifest,)), timeout_s=timeout_s), _yes)
    return _reworded(outcome, {"created": "adopted", "configured": "adopted"})


def _pick(stored: Iterable[StoredObject], ref: Ref) -> StoredObject:
    for item in stored:
        if item.ref == ref:
            return item
    raise NotFound(f"{ref} does not exist", hint="areal get all")


def _reworded(outcome: Outcome, words: dict[str, str]) -> Outcome:
    objects = tuple(
        ObjectOutcome(item.ref, words.get(item.action, item.action), item.message, item.exit_code, item.error)
        for item in outcome.objects
    )
    return replace(outcome, objects=objects)


# -- reconcile

_TTL = "finished, and ttlSecondsAfterFinished has passed"


def reconcile_once(ctx: Context, refs: Iterable[Ref] | None = None, timeout_s: float = 600.0) -> Outcome:
    """Compare what is recorded with what is alive and converge. Raises NotFound for an unknown ``ref``."""
    wanted = None if refs is None else set(refs)
    command = CommandContext.open(ctx)

    def choose(stored: list[StoredObject]) -> tuple[Target, ...]:
        missing = sorted(str(ref) for ref in (wanted or set()) - {item.ref for item in stored})
        if missing:
            raise NotFound(f"{', '.join(missing)}: not recorded", hint="areal get all")
        chosen = [item for item in stored if wanted is None or item.ref in wanted]
        outlived = _outlived(command, chosen)
        ended = deletions(stored, map(str, outlived), cascade=False)
        gone = {target.ref for target in ended}
        targets = [Target(item, "unchanged") for item in chosen if str(item.ref) not in gone]
        targets += [replace(target, cause=_TTL) if target.object.ref in outlived else target for target in ended]
        check_removals(stored, targets)
        return tuple(targets)

    return converge(command, lambda: plan_targets(command, choose, Policy()), lambda plan: True, timeout_s=timeout_s)


def _outlived(command: CommandContext, stored: Iterable[StoredObject]) -> frozenset[Ref]:
    """Objects that finished longer ago than they are to be kept."""
    ends = {str(item.ref): item for item in stored if controller_of(item.kind).runs_to_completion}
    if not ends:
        return frozenset()
    runs: dict[str, list[ObservedRun]] = {}
    for state in command.backend.observe().values():
        if state.spec.owner in ends:
            runs.setdefault(state.spec.owner, []).append(ObservedRun(state))
    now = time.time()
    return frozenset(
        item.ref for ref, item in ends.items() if controller_of(item.kind).outlived(item.spec, runs.get(ref, []), now)
    )
