"""Plans from recorded and observed objects. Read-only."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from areal.dataclasses import dataclass, replace
from areal.errors import ArealError, NoCapacity
from areal.reconcilers.context import Context
from areal.reconcilers.desired import Target, needs_of
from areal.reconcilers.kinds import controller_of, controllers, host_of
from areal.reconcilers.observe import Observed, look
from areal.reconcilers.plan import DoesNotFit, Drift, ObjectPlan, Plan, Refusal, Verb, refusal_of
from areal.reconcilers.planner import make_plan
from areal.reconcilers.planning import NO_LIMIT, PlanScope, Policy
from areal.resources.kinds import Ref, parse_ref
from areal.runtime.backends import LOCAL, Backends
from areal.runtime.backends.base import LIVE, Capacity, RunState
from areal.state.files import crash_point, remedy
from areal.state.objects import ObjectStore, StoreSnapshot
from areal.state.records import Listing, StoredObject
from areal.state.upkeep import ref_of

STABLE_READS = 3
_FILE = "object.json"

Choose = Callable[[list[StoredObject]], tuple[Target, ...]]


@dataclass
class CommandContext:
    """A command's context, object store and backends."""

    ctx: Context
    store: ObjectStore
    backend: Backends

    @classmethod
    def open(cls, ctx: Context) -> CommandContext:
        if os.path.lexists(ctx.home.root) and not ctx.home.root.is_dir():
            ctx.home.ensure()  # raises, with the reason
        return cls(ctx, ObjectStore(ctx.home), Backends(ctx.home.root, crash=crash_point))

    def scheduler_of(self, planned: Mapping[str, StoredObject], ref: str) -> Mapping[str, Any]:
        """Return ``spec.scheduler`` of a planned or recorded object, or of its host if it has one. ``type`` is the name
        of its backend."""
        item = planned.get(ref) or self.store.get(parse_ref(ref))
        if item is not None and (host := host_of(item)) is not None:
            return self.scheduler_of(planned, host)
        return {"type": LOCAL, **((item.spec.get("scheduler") if item else None) or {})}


@dataclass(frozen=True)
class Prepared:
    """A plan and its inputs."""

    scope: PlanScope
    observed: Observed
    plan: Plan
    states: Mapping[str, RunState]
    """All processes when the plan was made."""

    @property
    def touched(self) -> frozenset[Ref]:
        return frozenset(parse_ref(op.ref) for op in self.plan.ops)

    def is_current(self, command: CommandContext) -> bool:
        """Return whether no object and no process has changed since the plan was made. Routes may have changed."""
        return command.store.serial() == self.plan.serial and command.backend.observe() == self.states


def plan_targets(
    command: CommandContext,
    choose: Choose,
    policy: Policy,
    source: dict[str, Any] | None = None,
    *,
    whole: bool = False,
) -> Prepared:
    """Choose targets among the stored objects, add their neighbours, observe, plan. Read-only. ``whole``: plan all
    recorded objects, so that the plan names each that cannot be read."""
    snapshot, states, scope, observed, asked = _observe_stable(command, choose)
    refused: dict[str, Refusal] = {}
    while True:
        try:
            plan, seen = _plan_scope(command, scope, observed, policy, snapshot.serial, source)
            break
        except DoesNotFit as error:  # an object that only waited for a job keeps waiting, and the plan proceeds
            waiting = _still_waiting(scope, snapshot.objects, error.ref)
            if waiting is None:
                raise
            scope, refused[error.ref] = waiting, refusal_of(error)
    objects = [
        ObjectPlan(item.ref, "blocked", why.message, refusal=why) if (why := refused.get(item.ref)) else item
        for item in plan.objects
    ]
    plan = replace(plan, objects=tuple(objects))
    return Prepared(scope, seen, _with_unreadable(plan, scope.unreadable if whole else asked), states)


def _plan_scope(
    command: CommandContext,
    scope: PlanScope,
    observed: Observed,
    policy: Policy,
    serial: int,
    source: dict[str, Any] | None,
) -> tuple[Plan, Observed]:
    plan = make_plan(scope, observed, replace(policy, free_gpus=NO_LIMIT), serial=serial, source=source)
    # Reading GPUs starts a process for NVML: only a plan that starts or stops something needs it.
    if not policy.assume_capacity and any(op.verb in (Verb.SPAWN, Verb.STOP) for op in plan.ops):
        computing = [t for t in scope.all if controller_of(t.object.kind).wants_gpus(t.object.spec)]
        if any(not target.is_deleted for target in computing):
            planned = {target.ref: target.object for target in scope.all}
            needed = {command.scheduler_of(planned, target.ref)["type"] for target in computing}
            observed = replace(observed, capacity=_capacity(command, needed))
            policy = replace(policy, free_gpus=len(observed.capacity.gpus))
            plan = make_plan(scope, observed, policy, serial=serial, source=source)
    return plan, observed


def _still_waiting(scope: PlanScope, stored: Sequence[StoredObject], ref: str) -> PlanScope | None:
    """Return ``scope`` with ``ref``, and the objects that it owns, hosts or is needed by, waiting as recorded. Return
    None if it did not wait or its manifest has changed."""
    known = {str(item.ref): item for item in stored}

    def only_waited(target: Target) -> bool:
        before = known.get(target.ref)
        same = before is not None and bool(before.awaits) and target.object.applied == before.applied
        return same and not target.is_deleted

    if not only_waited(scope.by_ref[ref]):
        return None
    kept = {ref}

    def follows(target: Target) -> bool:
        needs = (*needs_of(target.object), target.object.owner, host_of(target.object))
        mine = (target.object.owner in kept and not target.is_deleted) or only_waited(target)
        return target.ref in known and target.ref not in kept and mine and not kept.isdisjoint(needs)

    while more := {target.ref for target in scope.targets if follows(target)}:
        kept |= more
    return replace(
        scope, targets=tuple(Target(known[t.ref], "unchanged") if t.ref in kept else t for t in scope.targets)
    )


def _with_unreadable(plan: Plan, unreadable: Mapping[str, tuple[str, str]]) -> Plan:
    """Return the plan with the unreadable objects added as blocked."""
    drifts = [Drift(ref, "record-unreadable", _FILE, why) for ref, (why, _) in unreadable.items()]
    blocked = [
        ObjectPlan(ref, "blocked", why, refusal=Refusal("invalid", f"{ref}: {why}", hint))
        for ref, (why, hint) in unreadable.items()
    ]
    return replace(plan, objects=(*plan.objects, *blocked), drift=(*plan.drift, *drifts))


def _capacity(command: CommandContext, schedulers: Collection[str]) -> Capacity:
    """Return the capacity. Raises NoCapacity if a scheduler does not answer."""
    try:
        return command.backend.capacity(schedulers)
    except ArealError as error:
        hint = f"{error.hint}; `areal diff --assume-capacity` plans without an answer"
        raise NoCapacity(f"free GPUs are not known: {error.message}", hint=hint, detail=error.detail) from error


def _observe_stable(
    command: CommandContext, choose: Choose
) -> tuple[StoreSnapshot, Mapping[str, RunState], PlanScope, Observed, dict[str, tuple[str, str]]]:
    """Return a consistent snapshot of objects and processes, and the chosen objects that this version refuses. A model
    that another command records meanwhile would look undeclared: its routes are observed, its object is not."""
    for _ in range(STABLE_READS):
        snapshot = command.store.snapshot()
        chosen, by_uid = choose(snapshot.objects), command.backend.observe()
        targets, refused = _accepted(chosen)
        states = tuple(by_uid.values())
        kinds = {item.kind for item in (*snapshot.objects, *(target.object for target in targets))}
        for controller in controllers(kinds):
            targets = controller.follow(targets, snapshot.objects, states)
        wanted = (*targets, *(target for target in chosen if target.ref in refused))
        unreadable = _unreadable(snapshot.objects, wanted, states)
        context, others = _accepted(_context(wanted, snapshot.objects))
        left = tuple(f"{ref}: {why}" for ref, (why, _) in others.items())
        scope = PlanScope(targets, context, {**unreadable, **others, **refused}, left)
        owners = {target.ref for target in scope.all}
        observed = look([state for state in states if state.spec.owner in owners])
        if command.store.serial() == snapshot.serial:
            break
    return snapshot, by_uid, scope, observed, refused


def _accepted(targets: Iterable[Target]) -> tuple[tuple[Target, ...], dict[str, tuple[str, str]]]:
    """``targets`` without the recorded ones that this version refuses, and those: why, and the next step."""
    faults = {each.ref: fault for each in targets if each.action == "unchanged" and (fault := each.fault)}
    return tuple(each for each in targets if each.ref not in faults), faults


def _unreadable(
    stored: Listing[StoredObject], targets: Sequence[Target], states: Iterable[RunState]
) -> dict[str, tuple[str, str]]:
    """Return objects with unreadable records, or with living processes but no record: why, and the next step. A target
    replaces a record without a readable revision."""
    asked = {target.ref for target in targets}
    known = {str(item.ref) for item in stored} | asked
    found = {
        ref: (f"{path} is unreadable: {why}", remedy(why))
        for path, why in stored.unreadable
        if (ref := str(ref_of(path))) not in asked or path in stored.presumed
    }
    hint = "apply its manifest again, which keeps them; areal doctor --fix ends them"
    for state in states:
        if state.phase in LIVE and state.spec.owner and state.spec.owner not in known:
            found.setdefault(state.spec.owner, ("its processes live, and it is not recorded", hint))
    return found


def _context(targets: Sequence[Target], stored: Sequence[StoredObject]) -> tuple[Target, ...]:
    """Return the hosts of the targets, the services that they call, and the neighbors needed for planning those: the
    other models of a service, and the jobs that train in it."""
    names = {target.ref for target in targets}
    hosts = {host for target in targets if (host := host_of(target.object))}
    staying = [target.object for target in targets if not target.is_deleted]
    hosts |= {called for item in staying if (called := controller_of(item.kind).called(item.spec))}
    in_play = names | hosts
    return tuple(
        Target(item, "unchanged")
        for item in stored
        if (ref := str(item.ref)) not in names
        and (ref in hosts or controller_of(item.kind).neighbour_of(item.spec) in in_play)
    )


def drift(ctx: Context, refs: Iterable[str] | None = None, *, assume_capacity: bool = False) -> Plan:
    """Return the plan that heals the recorded objects, naming every drift. ``refs`` None: all objects. Read-only."""
    wanted = None if refs is None else set(refs)

    def choose(stored: list[StoredObject]) -> tuple[Target, ...]:
        return tuple(Target(item, "unchanged") for item in stored if wanted is None or str(item.ref) in wanted)

    policy = Policy(assume_capacity=assume_capacity)
    return plan_targets(CommandContext.open(ctx), choose, policy, whole=wanted is None).plan
