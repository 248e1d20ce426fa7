"""The building blocks of a kind's plan. Pure.

- ``decide``: keep, heal or replace one process. It compares the sparse spec for which the run was started with the
  object's, both read with today's defaults and reduced to the fields on which the process depends. It never compares
  hashes: an upgrade that adds a field with a default, or reorders keys, restarts nothing.
- ``Planning``: the state of one plan, shared by the kinds; ``ObjectWork``: the state of one object, with the ops that
  start, stop and erase.
- ``KindPlan``: the phases of a kind's part; ``SimplePlan``: those of a ``SimpleController``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from enum import StrEnum
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, ClassVar

from areal.dataclasses import dataclass, field, replace
from areal.errors import InvalidManifest, NoCapacity
from areal.reconcilers.desired import Target, in_full
from areal.reconcilers.observe import Observed, ObservedRun, Seen
from areal.reconcilers.plan import (
    NO_PROCESS,
    OWN_GRACE,
    PLAIN_START,
    AwaitReady,
    DoesNotFit,
    Drift,
    GpuPool,
    PlanBuilder,
    Refusal,
    StartRun,
    StopRun,
    Verb,
)
from areal.resources.kinds import KINDS
from areal.resources.tree import UpdateClass, changes, path_text
from areal.resources.validation import update_class
from areal.runtime.backends import LOCAL, declared_backend
from areal.runtime.backends.base import ENDED, Phase
from areal.state.records import StoredObject

if TYPE_CHECKING:
    from areal.resources.agent_spec import AgentServiceSpec
    from areal.resources.specs import InferenceServiceSpec

NO_LIMIT = 1 << 20  # more GPUs than any plan takes
KEY_LOST = "key-lost"  # the file of a process's key is missing
STARTING_S = 60.0  # a process younger than this that does not answer yet is starting, not unhealthy
ENV_INPUT = "serviceEnv"  # a data proxy's input from its service; compared even if absent
KEY_INPUT = "keyFrom"  # compared even if absent from the spec: a process must not keep an undeclared key


class Action(StrEnum):
    KEEP = "keep"
    AWAIT = "await"  # it lives and has not answered yet
    KICK = "kick"  # its shim waits in back-off
    SPAWN = "spawn"
    REPLACE = "replace"
    LEAVE = "leave"  # it cannot be observed
    DEFER = "defer"  # its neighbor has no address yet: the next pass decides


@dataclass(frozen=True)
class Component:
    """One process that an object should have. ``fields``: the top-level spec keys on which it depends. ``inputs``: the
    values from its neighbors that it must have been started with; an absent key is not compared, except for the key's
    origin."""

    ref: str
    name: str
    replica: int
    kind: str
    spec: Mapping[str, Any]
    fields: tuple[str, ...]
    inputs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def target(self) -> str:
        return f"{self.name}/{self.replica}"


@dataclass(frozen=True)
class Decision:
    """A decision about a process. ``run``: the run acted on (kept, kicked, replaced). ``drift``: (kind, message) if the
    actual state differs. ``changed``: the field because of which it is replaced."""

    action: Action
    cause: str = ""
    run: ObservedRun | None = None
    drift: tuple[str, str] | None = None
    changed: str = ""


def decide(component: Component, runs: Sequence[ObservedRun]) -> Decision:
    """Decide about one process slot: keep the best run that fits, else an action and its cause."""
    if hidden := unseen(runs):
        return Decision(Action.LEAVE, f"cannot be seen: {hidden[0].state.reason}", hidden[0])
    live = [(run, _outdated(component, run)) for run in runs if run.is_live]
    if fitting := [run for run, changed in live if not changed]:
        return _decide_living(max(fitting, key=_preference))
    if live:
        run, changed = max(live, key=lambda each: _preference(each[0]))
        if run.key_fault:
            return Decision(Action.REPLACE, f"{KEY_LOST}: {run.key_fault}", run, (KEY_LOST, run.key_fault))
        cause = "restart requested" if changed == "its restartedAt" else f"{changed} changed"
        return Decision(Action.REPLACE, cause, run, changed=changed)
    ended = [run for run in runs if run.state.phase in (*ENDED, Phase.INTENDED)]
    dead = max(ended, key=lambda run: (run.ended_at, run.uid), default=None)
    if dead is None:
        return Decision(Action.SPAWN, NO_PROCESS)
    died = _death_of(dead)
    kind = str(dead.state.cause) or ("crash-loop" if dead.state.phase is Phase.CRASHLOOP else "process-died")
    return Decision(Action.SPAWN, f"{kind}: {died}", dead, (kind, died))


def _decide_living(run: ObservedRun) -> Decision:
    if run.state.phase is Phase.BACKOFF:
        died = _death_of(run)
        return Decision(Action.KICK, f"process-died: {died}", run, ("process-died", died))
    if run.state.phase is Phase.QUEUED:
        drift = (cause, f"{cause}: queued again") if (cause := str(run.state.cause)) else None
        return Decision(Action.AWAIT, f"queued: {run.state.reason}" if run.state.reason else "queued", run, drift)
    if run.state.phase is Phase.STARTING:
        return Decision(Action.AWAIT, "starting", run)
    if run.seen in (Seen.REFUSING, Seen.SILENT):
        # A probe that times out is not proof of death: wait for an answer, and let the shim's liveness probe judge.
        if run.age_s is not None and run.age_s < STARTING_S and not run.state.halted:
            return Decision(Action.AWAIT, "starting", run)
        message = run.why or "does not answer its probe"
        return Decision(Action.AWAIT, f"unhealthy: {message}", run, ("unhealthy", message))
    if run.trouble:
        return Decision(Action.AWAIT, f"unhealthy: {run.trouble.message}", run, ("unhealthy", run.trouble.message))
    if run.seen is Seen.NOT_READY:
        return Decision(Action.AWAIT, f"not ready: {run.why}" if run.why else "not ready yet", run)
    return Decision(Action.KEEP, run=run)


def _outdated(component: Component, run: ObservedRun) -> str:
    """Return the field that makes ``run`` the wrong process for ``component``; "" if it may stay."""
    if run.key_fault:
        return "its key"
    recorded = run.state.spec.inputs
    for name, value in sorted({KEY_INPUT: None, ENV_INPUT: None, **component.inputs}.items()):
        if recorded.get(name) != value:
            return f"its {name}"
    had, wanted = run.state.spec.spec, component.spec
    if had == wanted:
        return ""
    return _changed_field(component.kind, component.fields, json.dumps(had), json.dumps(wanted))


@lru_cache(maxsize=1024)  # the replicas of an object were started for only a few specs
def _changed_field(kind: str, fields: tuple[str, ...], had: str, wanted: str) -> str:
    """Return the field whose change between two sparse specs (JSON) replaces a process; "" if there is none."""
    one, other = json.loads(had), json.loads(wanted)
    with suppress(InvalidManifest):  # a process that an earlier version started may have a spec that is now refused
        one, other = in_full(kind, one), in_full(kind, other)
    found = changes(*({name: spec[name] for name in fields if name in spec} for spec in (one, other)))
    classes = [(update_class(kind, change.path), change.path) for change in found]
    update, path = max(classes, key=lambda each: each[0], default=(UpdateClass.META, ()))
    return path_text(("spec", *path)) if update >= UpdateClass.ROLL else ""


def key_input(service: InferenceServiceSpec | AgentServiceSpec) -> dict[str, str]:
    """Return the origin of the key that all processes of a service share; empty if it is generated."""
    source = service.auth.admin_key_from
    if source is None:
        return {}
    return {KEY_INPUT: f"file {source.file}" if source.file else f"env {source.env}"}


def _death_of(run: ObservedRun) -> str:
    """Return the last exit in words ("killed by SIGKILL", "exited 1"), or why the record says that the run is gone."""
    return run.state.death or "gone without an exit record"


def _preference(run: ObservedRun) -> tuple[int, int, str]:
    ready = {Seen.READY: 3, Seen.UNSEEN: 2, Seen.NOT_READY: 1}.get(run.seen, 0)
    return (int(run.state.phase is Phase.RUNNING), ready, run.uid)


def stoppable(runs: Sequence[ObservedRun]) -> list[ObservedRun]:
    """Return live runs, and dead ones whose session may have left processes, but no run that cannot be observed."""
    return [run for run in runs if run.is_live or run.leaves_session]


def unseen(runs: Sequence[ObservedRun]) -> list[ObservedRun]:
    return [run for run in runs if run.state.phase is Phase.UNKNOWN]


def superseded(slot: Sequence[ObservedRun], kept: int = 1) -> list[ObservedRun]:
    """Return runs whose records can be deleted: all ended runs except the last ``kept``, and runs that never
    started."""
    ended = [run for run in slot if run.state.phase in ENDED]
    ended.sort(key=lambda run: (run.ended_at, run.uid))
    return [*(run for run in slot if run.state.phase is Phase.INTENDED), *ended[:-kept]]


@dataclass(frozen=True)
class Policy:
    """The caller's limits. ``free_gpus``: GPUs that can be leased before this plan begins; ``assume_capacity``: assume
    any number. For deletions, ``grace_s``: seconds between SIGTERM and SIGKILL, and for running requests (None: as each
    object says); ``drain`` False: do not wait for running requests."""

    allow_downtime: bool = False
    assume_capacity: bool = False
    free_gpus: int = 0
    grace_s: float | None = None
    drain: bool = True

    def drain_s(self, usual: float) -> float:
        """Return the seconds that running requests get when their object is deleted."""
        return 0.0 if not self.drain else usual if self.grace_s is None else self.grace_s

    @property
    def grace(self) -> StopRun:
        """The grace of an op that stops a process."""
        return StopRun(self.grace_s)


@dataclass(frozen=True)
class PlanScope:
    """``targets`` are asked for. ``context`` are stored neighbours: services that targets need, and models whose
    routes a restarted router would lose. Of the context, services are healed and models only routed. ``unreadable``:
    objects that are recorded and cannot be read, or that this version refuses: why, and what to do. ``left_alone``: the
    refused ones among the neighbours."""

    targets: tuple[Target, ...]
    context: tuple[Target, ...] = ()
    unreadable: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    left_alone: tuple[str, ...] = ()

    @cached_property
    def all(self) -> tuple[Target, ...]:
        ordered = sorted((*self.targets, *self.context), key=lambda t: (KINDS[t.object.kind].order, t.object.name))
        return tuple(ordered)

    @cached_property
    def requested(self) -> frozenset[str]:
        return frozenset(target.ref for target in self.targets)

    @cached_property
    def by_ref(self) -> dict[str, Target]:
        return {target.ref: target for target in (*self.context, *self.targets)}


@dataclass
class PlanNotes:
    drift: list[Drift] = field(default_factory=list)
    destructive: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    unseen: dict[str, str] = field(default_factory=dict)  # by object: a process of it that cannot be seen, and why
    refused: dict[str, Refusal] = field(default_factory=dict)  # by object
    replaced: dict[str, str] = field(default_factory=dict)  # by object: the field for which a process gets a successor

    def destroy(self, sentence: str) -> None:
        """Note what needs an approval, once."""
        if sentence not in self.destructive:
            self.destructive.append(sentence)

    def cannot_see(self, ref: str, runs: Iterable[ObservedRun]) -> None:
        """Note runs that may be alive elsewhere. No operation touches them."""
        for run in runs:
            self.leave(ref, run.slot, f"cannot be seen: {run.state.reason}")

    def leave(self, ref: str, slot: str, why: str) -> None:
        self.unknown.append(f"{ref} {slot}: {why}")
        self.unseen.setdefault(ref, f"{slot} {why}")


@dataclass
class Planning:
    """The working state of one plan, shared by the kinds.

    ``recorded``: the op that records an object. ``views``: what a kind tells of an object to the kinds that refer to
    it. ``drained``: ops after which an ending object takes no more work. ``ended``: the last ops of ended objects, by
    their host. ``trainers``: of each service and model (None: any of the service's) the job that is to start: its
    place, its reference. ``host_of`` and ``called_by``: the object that one is attached to, and the service that its
    processes call; only kinds can tell.
    """

    scope: PlanScope
    observed: Observed
    policy: Policy
    gpus: GpuPool
    host_of: Callable[[StoredObject], str | None]
    called_by: Callable[[StoredObject], str | None]
    build: PlanBuilder = field(default_factory=PlanBuilder)
    notes: PlanNotes = field(default_factory=PlanNotes)
    recorded: dict[str, tuple[int, ...]] = field(default_factory=dict)
    views: dict[str, Any] = field(default_factory=dict)
    drained: dict[str, tuple[int, ...]] = field(default_factory=dict)
    ended: dict[str, tuple[int, ...]] = field(default_factory=dict)
    trainers: dict[tuple[str, str | None], tuple[int, str]] = field(default_factory=dict)

    def scheduler_of(self, target: Target) -> str:
        """Return ``spec.scheduler.type`` of an object, or of the one to which it is attached."""
        while (host := self.host_of(target.object)) is not None and host in self.scope.by_ref:
            target = self.scope.by_ref[host]
        return declared_backend(target.object.spec)

    def record_again(self, target: Target, erased: int) -> None:
        """Record a target again after its predecessor was erased."""
        again = self.build.add(Verb.RECORD, target.ref, "", f"created again: {target.cause}", needs=(erased,))
        self.recorded[target.ref] = (again,)

    @property
    def all_drained(self) -> tuple[int, ...]:
        return tuple(op for drained in self.drained.values() for op in drained)

    @contextmanager
    def healing(self, target: Target) -> Iterator[None]:
        """Refuse an unchanged object for which there are not enough GPUs. For a changed one, raise NoCapacity."""
        try:
            with self.build.all_or_nothing(), self.gpus.all_or_nothing():
                yield
        except NoCapacity as error:
            if target.action != "unchanged":
                raise DoesNotFit(target.ref, error) from error
            self.notes.refused[target.ref] = Refusal("capacity", error.message, error.hint or "")


STARTED = "started"  # the cause of the wait for a process that the plan itself starts


@dataclass(frozen=True)
class Started:
    """A process that is, or will be, running. ``run``: its uid or symbol; it is ready after the ops ``ready``."""

    run: str
    ready: tuple[int, ...] = ()


@dataclass
class ObjectWork:
    """The working state of one object's plan, or of its processes in ``components`` (empty: all). ``swept``: by slot,
    the ops that end what dead shims have left there."""

    components: ClassVar[tuple[str, ...]] = ()
    planning: Planning
    target: Target
    swept: dict[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def ref(self) -> str:
        return self.target.ref

    @cached_property
    def spec(self) -> Any:
        """The object's spec with its defaults."""
        return self.target.spec

    @property
    def build(self) -> PlanBuilder:
        return self.planning.build

    @property
    def notes(self) -> PlanNotes:
        return self.planning.notes

    @property
    def policy(self) -> Policy:
        return self.planning.policy

    @property
    def gpus(self) -> GpuPool:
        return GpuPool(NO_LIMIT) if self.queues else self.planning.gpus

    @property
    def scheduler(self) -> str:
        """The name of the backend of its processes."""
        return self.planning.scheduler_of(self.target)

    @property
    def queues(self) -> bool:
        """Whether its processes wait for GPUs in their scheduler's queue instead of in a plan."""
        return self.scheduler in self.planning.observed.capacity.queued

    @cached_property
    def observed(self) -> Observed:
        """The observed state, without this object's runs if it is created again."""
        observed = self.planning.observed
        return observed.without(self.ref) if self.target.replaces is not None else observed

    @property
    def runs(self) -> tuple[ObservedRun, ...]:
        found = self.observed.of(self.ref)
        return tuple(run for run in found if not self.components or run.state.spec.component in self.components)

    @property
    def recorded(self) -> tuple[int, ...]:
        return self.planning.recorded.get(self.ref, ())

    @property
    def restarted(self) -> dict[str, str]:
        """The input that makes a process outdated after `areal restart`."""
        asked = str(self.target.object.status.get("restartedAt", ""))
        return {"restartedAt": asked} if asked else {}

    def component(
        self, name: str, replica: int, fields: tuple[str, ...], inputs: Mapping[str, Any] | None = None
    ) -> Component:
        item = self.target.object
        return Component(self.ref, name, replica, item.kind, item.spec, fields, {**(inputs or {}), **self.restarted})

    def decide(self, component: Component) -> Decision:
        decision = decide(component, self.observed.of(self.ref, component.name, component.replica))
        if decision.run is not None and decision.action is not Action.REPLACE and (why := decision.run.state.damage):
            self.notes.drift.append(Drift(self.ref, "record-damaged", component.target, why))
            self.build.add(Verb.REPAIR, self.ref, component.target, f"record-damaged: {why}", run=decision.run.uid)
        return decision

    def note(self, component: Component, decision: Decision) -> None:
        """Note a process's drift, or that it cannot be observed."""
        if decision.drift is not None:
            kind, message = decision.drift
            self.notes.drift.append(Drift(self.ref, kind, component.target, message))
            if kind == KEY_LOST:
                self.notes.destroy(f"{self.ref}: {message}; requests fail until every process has a new one")
        if decision.action is Action.LEAVE:
            self.notes.leave(self.ref, component.target, decision.cause)

    def start(
        self,
        component: Component,
        decision: Decision,
        needs: Sequence[int],
        args: StartRun = PLAIN_START,
        after: Sequence[int] = (),
        trainer: str = "",
    ) -> Started:
        """SPAWN or KICK, then AWAIT; a process that is kept is awaited if it has not answered yet.

        AWAIT comes ``after`` the processes that this one waits for: an engine that fails ends the wait for its data
        proxy. ``trainer``: the job that starts later and brings the weights that a data proxy may wait for. Records of
        earlier runs of the slot are deleted, except the newest, which `logs --previous` reads.
        """
        ref, target, add = self.ref, component.target, self.build.add
        run, cause = decision.run.uid if decision.run is not None else "", STARTED
        if decision.action is Action.AWAIT:
            cause = decision.cause
        elif decision.action is Action.KICK:
            needs = (add(Verb.KICK, ref, target, decision.cause, needs=needs, run=run),)
        elif decision.action in (Action.SPAWN, Action.REPLACE):
            if decision.action is Action.REPLACE:
                self.notes.replaced.setdefault(ref, decision.changed or decision.cause)
            needs = (*needs, *self.swept.get(target, ()))
            for old in superseded(self.observed.of(ref, component.name, component.replica)):
                add(Verb.FORGET, ref, target, "an older record", needs=needs, run=old.uid)
            run = f"+{ref}/{target}"
            given = replace(args, inputs=dict(component.inputs))
            if self.scheduler != LOCAL:  # the address of a neighbour is known once that is placed
                neighbours = [given.router, given.engine]
                item = self.target.object
                if (service := self.planning.called_by(item)) not in (None, self.planning.host_of(item)):
                    neighbours.append(f"+{service}/gateway/0")
                needs = (*needs, *self.build.spawn_ops(neighbours))
            needs = (add(Verb.SPAWN, ref, target, decision.cause, needs=needs, run=run, args=given),)
        else:
            return Started(run)
        wait = AwaitReady(args.engine, trainer)
        return Started(run, (add(Verb.AWAIT, ref, target, cause, needs=(*needs, *after), run=run, args=wait),))

    def stop(
        self, run: ObservedRun, cause: str, needs: Sequence[int], grace: StopRun = OWN_GRACE, after: Sequence[int] = ()
    ) -> int:
        """End a run, after which its GPUs are free. If its shim has died, its lease is already free, but processes left
        in its session may still use the GPU."""
        op = self.build.add(Verb.STOP, self.ref, run.slot, cause, needs=needs, run=run.uid, args=grace, after=after)
        squatters = self.observed.capacity.squatters
        self.gpus.give(sum(1 for uuid in run.state.spec.gpus if run.is_live or uuid in squatters), op)
        return op

    def stop_component(
        self,
        name: str,
        runs: Iterable[ObservedRun],
        cause: str,
        needs: Sequence[int],
        grace: StopRun = OWN_GRACE,
        after: Sequence[int] = (),
    ) -> tuple[int, ...]:
        """Stop those of ``runs`` that belong to one component. Return the ops, or ``needs`` if there are none."""
        stops = (self.stop(run, cause, needs, grace, after) for run in runs if run.state.spec.component == name)
        return tuple(stops) or tuple(needs)

    def sweep(self) -> None:
        """Stop processes that dead shims left, before their successors start, since they may hold ports and GPUs."""
        for run in self.runs:
            if run.leaves_session:
                op = self.stop(run, "sweep what its session left", self.recorded)
                self.swept[run.slot] = (*self.swept.get(run.slot, ()), op)

    def erase(self, needs: Sequence[int], after: Sequence[int] = ()) -> int:
        """Delete every run's record, then the object."""
        needs = self.build.barrier(self.ref, "all of it has ended", tuple(needs))
        forgotten = [
            self.build.add(Verb.FORGET, self.ref, run.slot, self.end_cause, needs=needs, run=run.uid)
            for run in self.observed.of(self.ref)
        ]
        return self.build.add(Verb.ERASE, self.ref, "", self.end_cause, needs=(*needs, *forgotten), after=after)

    @property
    def end_cause(self) -> str:
        return self.target.cause or ("pruned" if self.target.action == "prune" else "deleted")


class KindPlan:
    """One kind's part of a plan. Each phase is run for all kinds before the next phase."""

    def __init__(self, planning: Planning, kind: str) -> None:
        self.planning = planning
        found = (target for target in planning.scope.all if target.object.kind == kind)
        self.targets = [target for target in found if target.ref not in planning.notes.refused]
        self.staying = [target for target in self.targets if not target.is_deleted]
        self.deleted = [target for target in self.targets if target.is_deleted]

    def drain(self) -> None:
        """Drain ending objects. Kinds that refer to others come first."""

    def open(self) -> None:
        """Decide about the objects that stay, route to processes that serve, start what other kinds need."""

    def sync(self) -> None:
        """Complete the routing tables."""

    def end(self) -> None:
        """Stop and erase ending objects before anything takes their place."""

    def close(self) -> None:
        """Start what is missing, replace what is outdated, remove what is superfluous. Raises NoCapacity."""

    def finish(self) -> None:
        """Erase objects that others needed until now, and start objects that need the others."""
        for target in self.deleted:
            ObjectWork(self.planning, target).erase(())


class SimplePlan(KindPlan):
    """N processes of one component; a successor is ready before an outdated process is stopped."""

    def __init__(
        self,
        planning: Planning,
        kind: str,
        component: str,
        fields: tuple[str, ...],
        replicas: Callable[[Mapping[str, object]], int],
    ) -> None:
        super().__init__(planning, kind)
        self._component, self._fields, self._replicas = component, fields, replicas

    def drain(self) -> None:
        planning = self.planning
        for target in self.targets:
            if (old := target.ending) is not None:
                work = ObjectWork(planning, old)
                needs, grace = planning.all_drained, planning.policy.grace
                stopped = work.stop_component(self._component, stoppable(work.runs), work.end_cause, needs, grace)
                planning.drained[old.ref] = stopped

    def end(self) -> None:
        for target in self.targets:
            if (old := target.ending) is not None:
                erased = ObjectWork(self.planning, old).erase(self.planning.drained[old.ref])
                if not target.is_deleted:
                    self.planning.record_again(target, erased)

    def close(self) -> None:
        for target in self.staying:
            if target.ref in self.planning.scope.requested:
                with self.planning.healing(target):
                    self._converge(ObjectWork(self.planning, target))

    def finish(self) -> None:
        """Do nothing: ended objects were erased in ``end``."""

    def _converge(self, work: ObjectWork) -> None:
        item = work.target.object
        runs, count = work.runs, self._replicas(item.spec)
        work.notes.cannot_see(work.ref, [run for run in unseen(runs) if run.replica >= count])
        work.sweep()
        needs = (*work.recorded, *work.build.ready_ops(item.depends_on))
        chosen: set[str] = set()
        for index in range(count):
            component = work.component(self._component, index, self._fields)
            decision = work.decide(component)
            work.note(component, decision)
            chosen |= {decision.run.uid} if decision.run is not None else set()
            old = decision.run if decision.action is Action.REPLACE else None
            started = work.start(component, decision, needs, StartRun(successor=old is not None))
            if old is not None:
                work.stop(old, f"replaced: {decision.cause}", started.ready)
        superfluous = [run for run in runs if run.is_live and run.uid not in chosen]
        cause = f"not one of {count} replicas" if count else "suspended"
        work.stop_component(self._component, superfluous, cause, needs)
