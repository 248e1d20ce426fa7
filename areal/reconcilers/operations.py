"""The imperative operations: each builds targets from what is recorded, and converges like ``apply``."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from areal.errors import Conflict, NotFound, UsageFault
from areal.reconcilers.adoption import find_server
from areal.reconcilers.apply import apply
from areal.reconcilers.context import Context, ObjectOutcome, Outcome
from areal.reconcilers.converge import Desk, Prepared, converge, plan_targets
from areal.reconcilers.desired import Target, check_removals, deletions, restored, with_layer
from areal.reconcilers.health import desired_replicas
from areal.reconcilers.job_phase import JobPhase, JobStanding, standing
from areal.reconcilers.job_service import services_of
from areal.reconcilers.model_work import Policy
from areal.reconcilers.observed import ObservedRun
from areal.reconcilers.outcomes import outcome_of
from areal.reconcilers.plan import Plan
from areal.reconcilers.requests import ApplyRequest, Source
from areal.resources.kinds import API_VERSION, Ref
from areal.resources.suggest import did_you_mean
from areal.runtime.backends.local import LocalBackend
from areal.state.credentials import forget_admin_key
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
    desk = Desk.open(ctx)

    def prepare() -> Prepared:
        return plan_targets(desk, edit, policy or Policy())

    return converge(desk, prepare, approve, timeout_s=timeout_s)


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

    services: set[Ref] = set()

    def edit(stored: list[StoredObject]) -> tuple[Target, ...]:
        targets = deletions(stored, [str(ref) for ref in refs], cascade=cascade)
        if spare_running_jobs:
            _refuse_running_jobs(ctx, stored, targets)
        check_removals(stored, targets)
        services.update(target.object.ref for target in targets if target.object.kind == "InferenceService")
        return tuple(targets)

    policy = Policy(grace_s=grace_s, drain=wait)
    outcome = _converge(ctx, edit, policy=policy, timeout_s=timeout_s, approve=approve)
    for ref in services:
        if store.get(ref) is None:
            forget_admin_key(ctx.home, ref.name)
    return outcome


def _refuse_running_jobs(ctx: Context, stored: Sequence[StoredObject], targets: Sequence[Target]) -> None:
    """Raises Conflict naming jobs that have not ended, and would go or lose the service that they brought."""
    gone = {target.ref: target for target in targets}
    touched = {ref for ref in gone if ref.startswith("TrainJob/")}
    touched |= {str(target.object.owner) for target in targets if str(target.object.owner).startswith("TrainJob/")}
    running = []
    for item in stored:
        if (ref := str(item.ref)) in touched:
            now = _standing(ctx, item)
            if not now.finished and now.phase is not JobPhase.STOPPED:
                running.append(ref)
    if running:
        raise Conflict(
            f"{', '.join(sorted(running))} would be deleted or left without its service; nothing was changed",
            hint="areal train stop NAME ends a job and keeps it; --cascade deletes the running jobs too, after a yes",
        )


def _standing(ctx: Context, job: StoredObject) -> JobStanding:
    states = LocalBackend(ctx.home.root).observe().values()
    runs = [ObservedRun(state) for state in states if state.spec.owner == str(job.ref)]
    return standing(runs, suspended=bool(job.spec.get("suspend")))


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
    target_ref = _model_of(ObjectStore(ctx.home), ref, model)

    def edit(stored: list[StoredObject]) -> tuple[Target, ...]:
        item = _pick(stored, target_ref)
        now = desired_replicas(item.spec)
        if now == replicas and not item.spec.get("suspend"):
            return (Target(item, "unchanged"),)
        if current is not None and current != now and not force:
            raise Conflict(f"{target_ref} has {now} replicas, not {current}", hint=f"areal get {target_ref}")
        return (with_layer(item, SCALE, {"replicas": replicas}, f"scaled {now} -> {replicas}"),)

    return _reworded(_converge(ctx, edit, timeout_s=timeout_s), {"configured": "scaled"})


def _model_of(store: ObjectStore, ref: Ref, model: str | None) -> Ref:
    if ref.kind == "Model":
        require(store, ref)
        return ref
    if ref.kind != "InferenceService":
        raise UsageFault(f"{ref} has no replicas to scale")
    require(store, ref)
    mine = [item.name for item in store.list("Model") if item.spec.get("service", "default") == ref.name]
    if model is None and len(mine) == 1:
        return Ref("Model", mine[0])
    if model is None:
        raise UsageFault(f"{ref} has {len(mine)} models; say which", hint="--model NAME")
    if model not in mine:
        raise NotFound(f"{ref} has no model {model!r}{did_you_mean(model, mine)}")
    return Ref("Model", model)


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
        if item.kind == "TrainJob" and (now := _standing(ctx, item)).finished:
            return (Target(item, "unchanged", cause=f"it has ended: {now.phase}"),)
        return (with_layer(item, SUSPEND, {"suspend": True}, "suspended"),)

    outcome = _converge(ctx, edit, policy=Policy(grace_s=grace_s), timeout_s=timeout_s)
    if ref.kind == "TrainJob" and not outcome.exit_code:
        rest(ctx, ref, timeout_s)
    return _reworded(outcome, {"configured": "suspended"})


def rest(ctx: Context, job: Ref, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
    """A job that is at rest needs the service that it brought no longer."""
    store = ObjectStore(ctx.home)
    if any(services_of(store.list("InferenceService"), str(job))):
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
    job = item if item.kind == "TrainJob" else known.get(item.owner or "")
    stays = item.kind == "TrainJob" and item.spec.get("suspend")
    if job is not None and job.kind == "TrainJob" and not stays and (now := _standing(ctx, job)).finished:
        subject = str(item.ref) if job is item else f"{item.ref} belongs to {job.ref}, which"
        raise Conflict(f"{subject} has ended ({now.phase})", hint=f"areal restart {job.ref} runs it again")
    service = known.get(f"InferenceService/{item.spec.get('service', 'default')}") if item.kind == "Model" else None
    if service is not None and service.spec.get("suspend"):
        raise Conflict(f"{item.ref} rests with {service.ref}, which is suspended", hint=f"areal resume {service.ref}")


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
        plan = plan_targets(Desk.open(ctx), edit, Policy()).plan
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
    """Route to what already runs, without restarting it: it becomes an external Model. Its life stays its owner's."""
    if ref.kind != "Model":
        raise UsageFault(f"{ref}: only a model server can be adopted", hint="--as model/NAME")
    require(ObjectStore(ctx.home), Ref("InferenceService", service))
    found = find_server(pid, url, ref.name)
    manifest: dict[str, Any] = {
        "apiVersion": API_VERSION,
        "kind": "Model",
        "metadata": {"name": ref.name, "annotations": {"areal.dev/adopted": f"pid {pid}" if pid else found.url}},
        "spec": {"service": service, "external": {"url": found.url, "model": found.model}},
    }
    outcome = apply(ctx, ApplyRequest(Source(manifests=(manifest,)), timeout_s=timeout_s), _yes)
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
