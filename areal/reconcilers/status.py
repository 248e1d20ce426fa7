"""The status of objects, computed from running processes, never only from the record. Standard library only.

Every verb that prints a status observes all processes that it needs once, here.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from areal import interrupt
from areal.dataclasses import dataclass, field, replace
from areal.errors import ArealError, TargetFailed, TimedOut
from areal.numbers import iso
from areal.reconcilers.kinds import Completion, controller_of, host_of, started_again_by
from areal.reconcilers.observe import (
    DEPENDENCY_FAILED,
    OF_A_PROCESS,
    Condition,
    Health,
    Observed,
    ObservedRun,
    conditions_of,
    look,
    rollout_failure,
)
from areal.resources.kinds import API_VERSION, Ref
from areal.runtime.backends import Backends
from areal.runtime.backends.base import ENDED, RunControl, RunState
from areal.state.files import UnreadableFile
from areal.state.home import Home
from areal.state.locks import holder
from areal.state.objects import ObjectStore, newest_revision
from areal.state.records import StoredObject

if TYPE_CHECKING:
    from areal.reconcilers.context import Context, Outcome, Progress


def object_document(
    found: StoredObject, status: ObjectStatus, *, spec: Mapping[str, object] | None = None
) -> dict[str, object]:
    """Return ``apiVersion, kind, metadata, spec, status``. ``spec``: as the user set it, unless another is given."""
    metadata: dict[str, object] = {
        "name": found.name,
        "uid": found.uid,
        "generation": found.generation,
        "revision": found.revision,
        "createdAt": iso(found.created_at),
        "labels": dict(found.labels),
        "annotations": dict(found.annotations),
        "dependsOn": list(found.depends_on),
    }
    shown: dict[str, object] = {
        **found.status,
        **status.details,
        "phase": status.phase,
        "ready": status.ready,
        "desiredReplicas": status.desired,
        "readyReplicas": status.ready_replicas,
        "address": status.address or None,
        "message": status.message,
        "conditions": [condition.to_json() for condition in status.conditions],
    }
    optional = {"owner": found.owner, "set": found.set_name, "protected": found.protected or None}
    metadata.update({key: value for key, value in optional.items() if value is not None})
    return {
        "apiVersion": API_VERSION,
        "kind": found.kind,
        "metadata": metadata,
        "spec": dict(found.spec if spec is None else spec),
        "status": {key: value for key, value in shown.items() if value is not None},
    }


_TIMEOUT_S = 1.5  # of all probes together, for which `areal get` waits

Runs = Mapping[str, "RunState"]

BACKGROUND = "reconcile"  # the component name of a background command


@dataclass(frozen=True)
class ObjectStatus:
    ref: str
    phase: str
    ready: str  # "1/2"
    desired: int
    ready_replicas: int
    conditions: tuple[Condition, ...]
    address: str
    message: str
    age_s: float
    details: Mapping[str, Any] = field(default_factory=dict)  # of the kind


def statuses(home: Home, objects: Iterable[StoredObject], runs: Runs) -> dict[str, ObjectStatus]:
    """Return the status of each object, by its reference. ``runs`` must contain those of the objects and of their
    hosts."""
    items = list(objects)
    hosts = hosts_of(home, items)
    owners = {str(item.ref) for item in items} | set(hosts)
    seen = look([state for state in runs.values() if state.spec.owner in owners], _TIMEOUT_S)
    health = {str(item.ref): health_of(item, seen, hosts) for item in items}
    ready = [item for item in items if health[str(item.ref)].phase == "Ready"]
    # After a failed rollout the previous version stays in service, and no operation is left.
    left = _pending_operations(
        home, [item for item in ready if not is_converged(item) and rollout_failure(item) is None]
    )
    return {ref: _status(item, seen, health[ref], left.get(ref)) for item in items if (ref := str(item.ref))}


def health_of(obj: StoredObject, seen: Observed, hosts: Mapping[str, StoredObject]) -> Health:
    """Return an object's health. ``hosts``: the recorded objects to which others are attached or for which they
    wait."""
    if job := obj.awaits:
        return waiting_health(obj.ref, job, hosts.get(job), seen)
    host = hosts.get(host_of(obj) or "")
    spec = host.spec if host is not None else None
    return controller_of(obj.kind).health(str(obj.ref), obj.spec, seen, spec)


def waiting_health(ref: Ref, job: str, found: StoredObject | None, seen: Observed) -> Health:
    """Return the health of an object that starts when ``job`` has succeeded. ``found``: the job's record."""
    if found is None:
        return Health("Pending", 0, 1, "Waiting", f"waits for {job}, which is not recorded")
    controller, runs = controller_of(found.kind), seen.of(job)
    ended = controller.completion(found.spec, runs).ended
    health = controller.health(job, found.spec, seen, None)
    if ended == "Succeeded":
        why = (
            f"{job} has succeeded; it starts when another job ends or a process is stopped, or by areal reconcile {ref}"
        )
        return Health("Pending", 0, 1, "Waiting", why)
    why = f" ({health.message})" if health.message else ""
    if ended:
        message = f"waits for {job}, which has failed{why}; areal restart {job} runs it again"
        return Health("Pending", 0, 1, DEPENDENCY_FAILED, message)
    again = f"; areal resume {job} goes on with it" if health.phase == "Stopped" else ""
    return Health("Pending", 0, 1, "Waiting", f"waits for {job}, which is {health.phase}{why}{again}")


def held_back(home: Home, backend: RunControl) -> list[StoredObject]:
    """Return the objects that wait for a job that has succeeded: there was no room for them when it ended."""
    waiting = [item for item in ObjectStore(home).list() if item.awaits]
    if not waiting:
        return []
    jobs, states = hosts_of(home, waiting), backend.observe()
    return [
        item
        for item in waiting
        if (job := jobs.get(item.awaits)) is not None and completion_of(home, job, states).ended == "Succeeded"
    ]


def completion_of(home: Home, item: StoredObject, states: Runs | None = None) -> Completion:
    """Return how an object has ended. ``states``: all processes; None: they are observed if that matters."""
    controller, ref = controller_of(item.kind), str(item.ref)
    if not controller.runs_to_completion:
        return Completion()
    seen = (states if states is not None else Backends(home.root).observe()).values()
    return controller.completion(item.spec, [ObservedRun(state) for state in seen if state.spec.owner == ref])


def hosts_of(home: Home, objects: Sequence[StoredObject]) -> dict[str, StoredObject]:
    """Return the objects, given or recorded, to which any of ``objects`` is attached or for which it waits; in place of
    an unreadable record its newest revision."""
    known, store = {str(item.ref): item for item in objects}, ObjectStore(home)

    def recorded(ref: Ref) -> StoredObject | None:
        try:
            return store.get(ref)
        except UnreadableFile:
            revision = newest_revision(home, ref)
            return revision.object if revision is not None else None

    wanted = sorted({other for item in objects for other in (host_of(item), item.awaits) if other})
    found = {ref: known.get(ref) or recorded(Ref(*ref.split("/", 1))) for ref in wanted}
    return {ref: item for ref, item in found.items() if item is not None}


def is_converged(obj: StoredObject) -> bool:
    """Return whether a command has finished this generation. Processes may serve earlier, without their hot
    settings."""
    return obj.status.get("observedGeneration") == obj.generation


def converged_status(obj: StoredObject) -> dict[str, object]:
    """Return the recorded status of an object whose generation a command has finished."""
    return {**obj.status, "observedGeneration": obj.generation}


def rollout_health(obj: StoredObject, health: Health, left: str | None) -> Health:
    """Return ``health``, with Progressing in place of Ready while the operation ``left`` is to be done."""
    if health.phase != "Ready" or left is None:
        return health
    message = f"generation {obj.generation} has not converged: {left}; areal reconcile goes on with it"
    return replace(health, phase="Progressing", reason="NotConverged", message=message)


def _pending_operations(home: Home, objects: Sequence[StoredObject]) -> dict[str, str]:
    """Return the first operation that each object still needs, in words. This makes a plan, so callers pass only
    objects whose command has not finished: it is running, or was killed."""
    if not objects:
        return {}
    from areal.reconcilers.context import Context
    from areal.reconcilers.prepare import drift

    refs = [str(item.ref) for item in objects]
    try:
        plan = drift(Context(home, "", ""), refs)
    except ArealError as error:
        return dict.fromkeys(refs, error.message)
    return plan.first_ops | {item.ref: item.unseen for item in plan.objects if item.unseen}


def _status(obj: StoredObject, seen: Observed, health: Health, left: str | None) -> ObjectStatus:
    now, ref, controller = time.time(), str(obj.ref), controller_of(obj.kind)
    health = rollout_health(obj, health, left)
    previous: Sequence[Mapping[str, object]] = obj.status.get("conditions", [])
    failure = rollout_failure(obj)
    noticed = ((run.slot, run.notice) for run in seen.of(ref) if run.is_live and run.notice)
    notice = next((each._replace(message=f"{slot}: {each.message}") for slot, each in noticed), None)
    noted = f"{notice.message}; {notice.hint}" if notice else ""
    return ObjectStatus(
        ref,
        "Degraded" if failure and health.phase == "Ready" else health.phase,  # the old version still serves
        health.fraction,
        health.desired,
        health.ready,
        conditions_of(health, obj.generation, failure, previous, 0.0, notice),
        controller.address(seen.of(ref)),
        (health.message if health.reason in OF_A_PROCESS else failure) or health.message or noted,
        max(0.0, now - obj.created_at) if obj.created_at else 0.0,
        controller.details(ref, seen),
    )


_POLL_S = 0.2

_AT_REST = ("Stopped", "Suspended")
_SUCCESS = ("ready", "completed", "condition=ready", "condition=ready=true")  # in lower case

Conditions = tuple[tuple[str, ...], ...]


def wait(ctx: Context, refs: Sequence[Ref], conditions: Conditions, timeout_s: float) -> Outcome:
    """Wait until every object meets every condition, each a list of alternatives. Raises TimedOut, TargetFailed,
    NotFound."""
    from areal.reconcilers.context import ObjectOutcome, Outcome

    store, backend = ObjectStore(ctx.home), Backends(ctx.home.root)
    words = " and ".join(" or ".join(alternatives) for alternatives in conditions)
    began = time.monotonic()
    pending, attempts = list(dict.fromkeys(refs)), dict[Ref, str]()
    for ref in pending:
        if not _awaits_end(conditions):
            store.expect(ref)
    while True:
        runs = backend.observe()
        found = {ref: stored for ref in pending if (stored := store.get(ref)) is not None}
        seen = statuses(ctx.home, found.values(), runs)
        pending = [ref for ref in pending if not _met(ctx, ref, found.get(ref), seen.get(str(ref)), conditions, runs)]
        if not pending:
            return Outcome(tuple(ObjectOutcome(str(ref), "met", words) for ref in refs))
        if ctx.interrupted.is_set():
            return Outcome(notes=("interrupted",), exit_code=interrupt.STATUS)
        waited_s = time.monotonic() - began
        if waited_s >= timeout_s:
            names = ", ".join(str(ref) for ref in pending)
            message = f"timed out after {timeout_s:g} s waiting for {words}: {names}"
            now = [seen[str(ref)] for ref in pending if str(ref) in seen]
            lines = [f"{each.ref} is {each.phase}: {each.message}".removesuffix(": ") for each in now]
            paths = [text for each in conditions for text in each if text.startswith("jsonpath=")]
            for ref, text in ((ref, text) for ref in pending if ref in found for text in paths):
                expression, _, value = _path(text, found[ref], seen[str(ref)])
                lines.append(f"{ref}: {expression} is {value or 'empty'}")
            verb = "resume" if now and now[0].phase in _AT_REST else "describe"
            raise TimedOut(message, hint=f"areal {verb} {pending[0]}", detail="\n".join(lines))
        for ref in pending:
            status = seen.get(str(ref))
            attempt = status.message.partition(":")[0] if status is not None and status.phase == "Running" else ""
            if status is not None and attempt and attempts.get(ref) != attempt:  # why the one before failed
                attempts[ref] = attempt
                ctx.report(str(ref), status.message)
            ctx.progress(_progress(ctx.home, ref, status, words, waited_s))
        time.sleep(_POLL_S)


def _awaits_end(conditions: Conditions) -> bool:
    return any("deleted" in alternatives for alternatives in conditions)


def _met(
    ctx: Context, ref: Ref, stored: StoredObject | None, status: ObjectStatus | None, conditions: Conditions, runs: Runs
) -> bool:
    if all(any(_holds(text, stored, status) for text in alternatives) for alternatives in conditions):
        return True
    if status is not None and stored is not None:
        _fail_if_stalled(ctx.home, stored, status, conditions, runs)
    elif stored is None and not _awaits_end(conditions):
        raise TargetFailed(f"{ref} was deleted while it was waited for")
    return False


def _holds(text: str, stored: StoredObject | None, status: ObjectStatus | None) -> bool:
    if text == "deleted":
        return stored is None
    if stored is None or status is None:
        return False
    if text == "ready":
        return any(c.type == "Ready" and c.status == "True" for c in status.conditions)
    if text == "completed":
        return status.phase == "Succeeded"
    if text.startswith("condition="):
        name, _, value = text.removeprefix("condition=").partition("=")
        wanted = value or "True"
        return any(c.type.lower() == name.lower() and c.status.lower() == wanted.lower() for c in status.conditions)
    _, wanted, value = _path(text, stored, status)
    return value == wanted


def _path(text: str, stored: StoredObject, status: ObjectStatus) -> tuple[str, str, str]:
    """Return the expression of ``jsonpath=EXPR=VALUE``, VALUE, and the object's present value."""
    from areal.resources.jsonpath import evaluate

    expression, _, wanted = text.removeprefix("jsonpath=").rpartition("=")
    return expression, wanted, evaluate(expression, object_document(stored, status))


def _fail_if_stalled(
    home: Home, stored: StoredObject, status: ObjectStatus, conditions: Conditions, runs: Runs
) -> None:
    """Raise TargetFailed if the wait is for success, no command is working on the object, and the object has failed, is
    at rest, or only another command can continue its rollout."""
    ref, reasons = stored.ref, {c.reason for c in status.conditions if c.type == "Ready"}
    if not all(any(text.lower() in _SUCCESS for text in alternatives) for alternatives in conditions):
        return
    stalled = any(c.type == "Stalled" and c.status == "True" for c in status.conditions)
    rolled_out = any(c.type == "Degraded" and c.reason == "RolloutFailed" for c in status.conditions)
    unfinished = not is_converged(stored) and not reasons.isdisjoint(("NotConverged", "NotRouted"))
    resumed_by = _resumed_by(home, stored) if status.phase in _AT_REST else ""
    waits = stalled or rolled_out or unfinished or resumed_by
    if not waits or holder(home, ref) or _converges_in_background(ref, runs):
        return
    if resumed_by:
        raise TargetFailed(f"{ref} {'was stopped' if status.phase == 'Stopped' else 'is suspended'}", hint=resumed_by)
    if any(c.reason == DEPENDENCY_FAILED for c in status.conditions):
        raise TargetFailed(f"{ref} {status.message}", hint=f"areal describe {ref}")
    if stalled or rolled_out:
        hint = f"areal logs {ref}; {started_again_by(ref)} starts it again"
        raise TargetFailed(f"{ref} has failed: {status.message}", hint=hint)
    raise TargetFailed(f"{ref} waits for a command: {status.message}", hint=f"areal reconcile {ref}")


def _resumed_by(home: Home, stored: StoredObject) -> str:
    """Return the command that starts the processes of an object at rest; "" where a job starts them."""
    found = [stored, *hosts_of(home, [stored]).values()]
    if any(controller_of(item.owner.partition("/")[0]).runs_to_completion for item in found if item.owner):
        return ""
    if suspended := next((item.ref for item in found if item.spec.get("suspend")), None):
        return f"areal resume {suspended} goes on with it"
    if controller_of(stored.kind).runs_to_completion:
        return f"areal reconcile {stored.ref} starts it again"
    return f"it has no replicas: areal scale {stored.ref} --replicas N"


def _converges_in_background(ref: Ref, runs: Runs) -> bool:
    """Return whether a background command converges the object."""
    commands = [run for run in runs.values() if run.spec.component == BACKGROUND and run.phase not in ENDED]
    return any(str(ref) in run.spec.inputs["refs"] for run in commands)


def _progress(home: Home, ref: Ref, status: ObjectStatus | None, words: str, waited_s: float) -> Progress:
    if status is not None and status.phase == "Running":
        progress = controller_of(ref.kind).progress(home, ref.name, status.age_s)
        if progress is not None:
            return progress
    from areal.reconcilers.context import Progress

    stage = f"waiting for {words}"
    if status is not None and any(condition.reason == "Queued" for condition in status.conditions):
        stage += f"; {status.message}"
    return Progress(str(ref), stage, elapsed_s=waited_s)
