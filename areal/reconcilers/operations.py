"""The imperative operations and ``reconcile``: targets from the recorded objects, converged as ``apply`` does."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from areal.dataclasses import dataclass, replace
from areal.errors import Conflict, NotFound, UsageFault
from areal.reconcilers.apply import apply
from areal.reconcilers.context import ApplyRequest, Context, ObjectOutcome, Outcome
from areal.reconcilers.converge import GOES_ON, Approve, converge
from areal.reconcilers.desired import (
    Target,
    check_removals,
    deletions,
    over_applied,
    restored,
    same_manifest,
    with_layer,
)
from areal.reconcilers.kinds import controller_of, host_of
from areal.reconcilers.plan import ObjectPlan, Plan
from areal.reconcilers.planning import Policy
from areal.reconcilers.prepare import Choose, CommandContext, plan_targets
from areal.reconcilers.status import completion_of, held_back
from areal.resources.kinds import Ref
from areal.resources.render import RenderRequest
from areal.runtime.backends import LOCAL, Backends
from areal.runtime.backends.base import LIVE
from areal.state.locks import lock_objects
from areal.state.objects import ObjectStore
from areal.state.records import StoredObject

SCALE = "scale"
SUSPEND = "suspend"
_SUSPENDED = "suspended"
DEFAULT_TIMEOUT_S = 600.0

Edit = Callable[[StoredObject], Target]
Check = Callable[[Plan], None]


@dataclass(frozen=True)
class ObjectChange:
    """What a verb does to one object: ``edit`` makes the target; ``done`` is the action named in the outcome."""

    ref: Ref
    edit: Edit
    done: str
    policy: Policy = Policy()


def _converge(
    ctx: Context,
    choose: Choose,
    policy: Policy,
    timeout_s: float,
    approve: Approve = lambda plan: True,
    *,
    whole: bool = False,
    check: Check = lambda plan: None,
) -> Outcome:
    command = CommandContext.open(ctx)
    return converge(
        command, lambda: plan_targets(command, choose, policy, whole=whole), approve, timeout_s=timeout_s, check=check
    )


def _only(ctx: Context, ref: Ref, edit: Edit) -> Choose:
    """Return a function that chooses the target that ``edit`` makes of one object."""

    def choose(stored: list[StoredObject]) -> tuple[Target, ...]:
        item = next((item for item in stored if item.ref == ref), None)
        if item is None:
            raise ObjectStore(ctx.home).missing(ref)
        return (edit(item),)

    return choose


def plan_change(ctx: Context, change: ObjectChange) -> Plan:
    """Return the plan that the verb would carry out. Read-only."""
    return plan_targets(CommandContext.open(ctx), _only(ctx, change.ref, change.edit), change.policy).plan


def carry_out(
    ctx: Context,
    change: ObjectChange,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    approve: Approve = lambda plan: True,
    check: Check = lambda plan: None,
) -> Outcome:
    """Carry out a verb. ``check`` may refuse the plan before the first effect by raising ArealError."""
    choose = _only(ctx, change.ref, change.edit)
    outcome = _converge(ctx, choose, change.policy, timeout_s, approve, check=check)
    if change.done == _SUSPENDED and controller_of(change.ref.kind).runs_to_completion and not outcome.exit_code:
        rest(ctx, change.ref, timeout_s)  # what more was to be done
        outcome = replace(outcome, notes=tuple(note for note in outcome.notes if note != GOES_ON))
    return with_action(outcome, "configured", change.done)


def with_action(outcome: Outcome, action: str, done: str) -> Outcome:
    """Return the outcome with ``done`` in place of ``action``, and without ``done`` in the messages."""

    def reword(item: ObjectOutcome) -> ObjectOutcome:
        if item.action != action:
            return item
        message = item.message.removesuffix(f"; {done}")
        return replace(item, action=done, message="" if message.lower() == done else message)

    return replace(outcome, objects=tuple(map(reword, outcome.objects)))


def delete(
    ctx: Context,
    refs: Sequence[Ref],
    grace_s: float | None = None,
    cascade: bool = False,
    wait: bool = True,
    approve: Approve = lambda plan: True,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    spare_running_jobs: bool = False,
) -> Outcome:
    """Stop the processes of ``refs``, then delete the objects and those that they own. ``cascade`` also deletes objects
    that depend on them. ``wait`` False does not wait for running requests. ``spare_running_jobs`` raises Conflict
    instead of deleting a job that has not ended."""
    store = ObjectStore(ctx.home)
    lost = [ref for ref in refs if store.is_lost(ref)]
    for ref in refs:
        if ref not in lost:
            store.expect(ref)
    if lost:
        refs = _forget(ctx, lost, refs, cascade, approve)
        note = "areal reconcile removes what other objects still hold of it"  # a route, for example
        forgotten = Outcome(tuple(ObjectOutcome(str(ref), "deleted", note) for ref in lost))
        if not refs:
            return forgotten
        rest = delete(ctx, refs, grace_s, cascade, wait, approve, timeout_s, spare_running_jobs)
        return replace(rest, objects=(*forgotten.objects, *rest.objects))
    deleted: set[Ref] = set()

    def choose(stored: list[StoredObject]) -> tuple[Target, ...]:
        targets = deletions(stored, [str(ref) for ref in refs], cascade=cascade)
        if spare_running_jobs:
            # Jobs that have not ended, and would go or lose the service that they created.
            touched = {target.ref for target in targets} | {str(target.object.owner) for target in targets}
            running = [
                ref for item in stored if (ref := str(item.ref)) in touched and completion_of(ctx.home, item).running
            ]
            if running:
                raise Conflict(
                    f"{', '.join(sorted(running))} would be deleted or left without its service; nothing was changed",
                    hint="areal train stop NAME ends a job and keeps it; --cascade deletes the running jobs too, "
                    "after a yes",
                )
        check_removals(stored, targets, lambda item: bool(completion_of(ctx.home, item).ended))
        deleted.update(target.object.ref for target in targets)
        return tuple(targets)

    outcome = _converge(ctx, choose, Policy(grace_s=grace_s, drain=wait), timeout_s, approve)
    for ref in deleted:
        if store.get(ref) is None:
            controller_of(ref.kind).deleted(ctx.home, ref)
    return outcome


def _forget(ctx: Context, lost: Sequence[Ref], refs: Sequence[Ref], cascade: bool, approve: Approve) -> list[Ref]:
    """End the processes of objects whose records are lost, and delete the records. No plan can be made of them. Return
    what else ``delete`` of ``refs`` deletes. Raises Conflict if an object that remains depends on them."""
    store = ObjectStore(ctx.home)
    known = [*store.list(), *(StoredObject(ref.kind, ref.name, uid="") for ref in lost)]
    targets = deletions(known, [str(ref) for ref in refs], cascade=cascade)
    check_removals(known, targets)
    plans = tuple(ObjectPlan(str(ref), "delete", "its record is lost") for ref in lost)
    losses = tuple(f"{ref} is forgotten and its processes end: its record is lost" for ref in lost)
    if not approve(Plan(plans, destructive=losses)):
        raise UsageFault("declined; nothing was changed", hint="--yes approves a destructive plan")
    backends = Backends(ctx.home.root)
    with lock_objects(ctx.home, lost, ctx.lock_timeout_s, ctx.command, interrupted=ctx.interrupted):
        for uid, state in backends.observe().items():
            if state.spec.owner in map(str, lost):
                backends.stop(uid)
                backends.forget(uid)
        for ref in lost:
            store.delete(ref)
            controller_of(ref.kind).deleted(ctx.home, ref)
    return [target.object.ref for target in targets if target.object.ref not in lost]


def scale(
    ctx: Context,
    ref: Ref,
    replicas: int,
    model: str | None = None,
    current: Sequence[int] = (),
    force: bool = False,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    approve: Approve = lambda plan: True,
) -> Outcome:
    """Scale an object. ``current``: the numbers of replicas that are expected; checked again when the lock is held.
    Raises Conflict."""
    change = scaling(ctx, ref, replicas, model)

    def require_current(plan: Plan) -> None:
        now = declared_replicas(ObjectStore(ctx.home).expect(change.ref))
        if current and now not in current and not force:
            raise Conflict(
                f"{change.ref} has {now} replicas, not {current[0]}", hint=f"areal get {change.ref}; then try again"
            )

    return carry_out(ctx, change, timeout_s, approve, require_current)


def declared_replicas(item: StoredObject) -> int:
    """Return the replicas of the object; of a suspended one, those that it has when it is resumed."""
    return controller_of(item.kind).replicas({**item.spec, "suspend": False})


def scaling(ctx: Context, ref: Ref, replicas: int, model: str | None = None) -> ObjectChange:
    """Set the replicas in the ``scale`` layer, which takes precedence over a manifest that does not set them."""
    store = ObjectStore(ctx.home)
    store.expect(ref)
    scaled = controller_of(ref.kind).scaled(store, ref, model)
    controller = controller_of(scaled.kind)

    def edit(item: StoredObject) -> Target:
        now = declared_replicas(item)
        if now == replicas:
            return Target(item, "unchanged")
        return with_layer(item, SCALE, {controller.replicas_field: replicas}, f"scaled {now} -> {replicas}")

    return ObjectChange(scaled, edit, "scaled")


def restarting(ctx: Context, ref: Ref) -> ObjectChange:
    """Replace every process of the object, following its rollout strategy. Raises Conflict if it is suspended."""
    found = ObjectStore(ctx.home).expect(ref)
    if found.awaits:
        raise Conflict(f"{ref} waits for {found.awaits}", hint=f"areal resume {ref} starts it without waiting")
    if found.spec.get("suspend"):
        raise Conflict(f"{ref} is suspended: it has no process", hint=f"areal resume {ref} starts it")
    stamp = f"{time.time():.3f}"

    def edit(item: StoredObject) -> Target:
        if item.status.get("restartedAt") == stamp:
            return Target(item, "unchanged")
        marked = replace(item, status={**item.status, "restartedAt": stamp})
        return Target(marked, "configure", cause="restart requested")

    return ObjectChange(ref, edit, "restarted")


def suspending(ctx: Context, ref: Ref, grace_s: float | None = None) -> ObjectChange:
    """Suspend an object. ``grace_s``: seconds between SIGTERM and SIGKILL of its processes; None: as each was started
    with."""
    ObjectStore(ctx.home).expect(ref)

    def edit(item: StoredObject) -> Target:
        if item.spec.get("suspend") and not item.awaits:
            return Target(item, "unchanged", cause="it is suspended already")
        if ended := completion_of(ctx.home, item).ended:
            return Target(item, "unchanged", cause=f"it has ended: {ended}")
        return with_layer(item, SUSPEND, {"suspend": True}, _SUSPENDED)

    return ObjectChange(ref, edit, _SUSPENDED, Policy(grace_s=grace_s))


def rest(ctx: Context, job: Ref, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
    """Suspend the service that an ended or suspended job owns."""
    if any(item.owner == str(job) for item in ObjectStore(ctx.home).list()):
        _converge(ctx, _only(ctx, job, lambda item: Target(item, "unchanged")), Policy(), timeout_s)


def dependents(command: CommandContext, job: Ref) -> frozenset[Ref]:
    """Return the objects that waited for a job that has ended, and those for which there was no room when theirs did.
    One that runs on this machine is not started from the node of a cluster, on which the job ran."""
    place = command.scheduler_of({}, str(job))["type"]
    waiting = [item for item in command.store.list() if item.awaits == str(job)]
    waiting += held_back(command.ctx.home, command.backend)
    places = {item.ref: command.scheduler_of({}, str(item.ref))["type"] for item in waiting}
    return frozenset(ref for ref, its in places.items() if place in (LOCAL, its))


def resuming(ctx: Context, ref: Ref) -> ObjectChange:
    """Resume an object. Raises Conflict if it would still not run: it or its owner has ended, or its host is
    suspended."""
    store = ObjectStore(ctx.home)
    item = store.expect(ref)
    known = {str(each.ref): each for each in store.list()}
    owner = known.get(item.owner or "")  # the owner, or the host, may have to be started instead
    for each in (item, owner):
        if (
            each is None
            or (each is item and item.spec.get("suspend"))
            or not (ended := completion_of(ctx.home, each).ended)
        ):
            continue
        subject = str(item.ref) if each is item else f"{item.ref} belongs to {each.ref}, which"
        raise Conflict(f"{subject} has ended ({ended})", hint=f"areal restart {each.ref} runs it again")
    host = known.get(host_of(item) or "")
    if host is not None and host.spec.get("suspend"):
        raise Conflict(f"{item.ref} is suspended with {host.ref}", hint=f"areal resume {host.ref}")

    def edit(item: StoredObject) -> Target:
        if not item.spec.get("suspend"):
            return Target(item, "unchanged", cause="it is not suspended")
        dropped = with_layer(item, SUSPEND, {}, "resumed")
        if dropped.object.spec.get("suspend"):  # the manifest says so: this layer says otherwise
            return with_layer(item, SUSPEND, {"suspend": False}, "resumed")
        return dropped

    return ObjectChange(ref, edit, "resumed")


CHANGES: Mapping[str, Callable[[Context, Ref], ObjectChange]] = {
    "restart": restarting,
    "suspend": suspending,
    "resume": resuming,
}
"""The verbs that need nothing but an object."""


def rolling_back(ctx: Context, ref: Ref, to: int | None = None) -> ObjectChange:
    """Apply the manifest of revision ``to`` again; None: the newest revision with a different manifest. Layers of other
    verbs, such as ``scale``, stay. Raises NotFound if there is no such revision."""
    store = ObjectStore(ctx.home)
    present, found = store.expect(ref), store.revisions(ref)
    if to is None:
        earlier = [each for each in found if each.number < present.revision and not same_manifest(each.object, present)]
    else:
        earlier = [each for each in found if each.number == to]
    if not earlier:
        numbers = ", ".join(str(revision.number) for revision in found)
        lacks = "no earlier revision with another manifest" if to is None else f"no revision {to}; it has {numbers}"
        raise NotFound(f"{ref} has {lacks}", hint=f"areal history {ref}")
    return ObjectChange(ref, lambda item: restored(item, earlier[-1]), "rolled back")


def adopt(
    ctx: Context, ref: Ref, pid: int | None = None, url: str | None = None, timeout_s: float = DEFAULT_TIMEOUT_S
) -> Outcome:
    """Route to a model server that already runs. areal neither restarts nor stops it."""
    store = ObjectStore(ctx.home)
    manifest, found = controller_of(ref.kind).adopted(store, ref, pid, url), store.get(ref)
    if found is not None:
        manifest = over_applied(found, manifest)
    outcome = apply(ctx, ApplyRequest(RenderRequest(manifests=(manifest,)), timeout_s=timeout_s), lambda plan: True)
    return with_action(with_action(outcome, "created", "adopted"), "configured", "adopted")


_TTL = "finished, and ttlSecondsAfterFinished has passed"


def reconcile_once(
    ctx: Context,
    refs: Iterable[Ref] | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    approve: Approve = lambda plan: True,
) -> Outcome:
    """Compare the recorded state with the running processes, and converge. Raises NotFound for an unknown ``ref``."""
    wanted = None if refs is None else set(refs)

    def choose(stored: list[StoredObject]) -> tuple[Target, ...]:
        for ref in sorted((wanted or set()) - {item.ref for item in stored}):
            raise ObjectStore(ctx.home).missing(ref)
        chosen = [item for item in stored if wanted is None or item.ref in wanted]
        # Objects that finished longer ago than they are to be kept.
        kept = [
            (item, float(ttl_s)) for item in chosen if (ttl_s := item.spec.get("ttlSecondsAfterFinished")) is not None
        ]
        states, now = Backends(ctx.home.root).observe() if kept else {}, time.time()
        ends = [(item.ref, completion_of(ctx.home, item, states), ttl_s) for item, ttl_s in kept]
        expired = [ref for ref, end, ttl_s in ends if end.ended and end.ended_at + ttl_s <= now]
        outlived = frozenset(ref for ref in expired if _is_deletable(stored, ref))
        ended = deletions(stored, map(str, outlived), cascade=False)
        deleted = {target.ref for target in ended}
        targets = [Target(item, "unchanged") for item in chosen if str(item.ref) not in deleted]
        targets += [
            replace(target, cause=_TTL, is_expired=True) if target.object.ref in outlived else target
            for target in ended
        ]
        check_removals(stored, targets)
        return tuple(targets)

    return _converge(ctx, choose, Policy(), timeout_s, approve, whole=wanted is None)


def _is_deletable(stored: list[StoredObject], ref: Ref) -> bool:
    """Return whether an object may be deleted alone: it is not protected, and nothing that stays needs it."""
    try:
        check_removals(stored, deletions(stored, [str(ref)], cascade=False))
    except Conflict:
        return False
    return True


def stop_processes(ctx: Context) -> None:
    """End every process of the home when its machine shuts down. Objects stay recorded, and the next reconcile starts
    their processes again. Raises ArealError of the first process that could not be ended, after ending the others."""
    backend = Backends(ctx.home.root)
    living = [uid for uid, state in backend.observe().items() if state.phase in LIVE]
    with ThreadPoolExecutor(max_workers=max(1, len(living))) as pool:
        ends = [pool.submit(backend.stop, uid) for uid in living]
    for end in ends:
        end.result()
