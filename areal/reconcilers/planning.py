"""The input of planning, the state that the kinds share while they plan, the phases of a kind's part, and the plan of
a ``SimpleController``. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from areal.errors import NoCapacity
from areal.reconcilers.components import (
    SWEPT,
    Action,
    Component,
    PlanNotes,
    decide,
    end_cause,
    erase,
    keep,
    slot_of,
    start,
    stop_in_order,
    stoppable,
    unseen,
)
from areal.reconcilers.desired import Target
from areal.reconcilers.observe import Observed, ObservedRun
from areal.reconcilers.plan import GpuPool, PlanBuilder, Refusal, Verb
from areal.resources.kinds import KINDS


@dataclass(frozen=True)
class Policy:
    """What the caller allows. ``free_gpus`` is what can be leased before this plan begins. For deletions: ``grace_s``
    between SIGTERM and SIGKILL, and for running requests (None: as each object says); ``drain`` False waits for none.
    """

    allow_downtime: bool = False
    free_gpus: int = 0
    grace_s: float | None = None
    drain: bool = True

    def drain_s(self, usual: float) -> float:
        """How long running requests may take when their object is deleted."""
        return 0.0 if not self.drain else usual if self.grace_s is None else self.grace_s

    @property
    def grace(self) -> dict[str, Any]:
        """Of an op that stops a process."""
        return {} if self.grace_s is None else {"graceSeconds": self.grace_s}


@dataclass(frozen=True)
class PlanScope:
    """``targets`` are asked for. ``context`` are stored neighbours: services that targets need, and models whose
    routes a restarted router would lose. Of the context, services are healed and models only routed."""

    targets: tuple[Target, ...]
    context: tuple[Target, ...] = ()

    @cached_property
    def all(self) -> tuple[Target, ...]:
        ordered = sorted((*self.targets, *self.context), key=lambda t: (KINDS[t.object.kind].order, t.object.name))
        return tuple(ordered)

    @cached_property
    def asked(self) -> frozenset[str]:
        return frozenset(target.ref for target in self.targets)


@dataclass
class Planning:
    """The working state of one plan, shared by the kinds.

    ``recorded``: the op that records an object. ``views``: what a kind tells of an object to the kinds that refer to
    it. ``drained``: ops after which an ending object takes no more work. ``ended``: the last ops of ended objects, by
    their host. ``trainers``: of each service and model (None: any of the service's) the job that is to start: its
    place, its reference.
    """

    scope: PlanScope
    observed: Observed
    policy: Policy
    gpus: GpuPool
    build: PlanBuilder = field(default_factory=PlanBuilder)
    notes: PlanNotes = field(default_factory=PlanNotes)
    recorded: dict[str, tuple[int, ...]] = field(default_factory=dict)
    views: dict[str, Any] = field(default_factory=dict)
    drained: dict[str, tuple[int, ...]] = field(default_factory=dict)
    ended: dict[str, tuple[int, ...]] = field(default_factory=dict)
    trainers: dict[tuple[str, str | None], tuple[int, str]] = field(default_factory=dict)

    def record_again(self, target: Target, needs: Sequence[int]) -> None:
        """After a target's predecessor has been erased."""
        again = self.build.add(Verb.RECORD, target.ref, "", f"created again: {target.cause}", needs=needs)
        self.recorded[target.ref] = (again,)

    @property
    def all_drained(self) -> tuple[int, ...]:
        return tuple(op for drained in self.drained.values() for op in drained)

    @contextmanager
    def healing(self, target: Target) -> Iterator[None]:
        """What only has to be healed and does not fit is refused; for what was changed NoCapacity is raised."""
        try:
            with self.build.all_or_nothing(), self.gpus.all_or_nothing():
                yield
        except NoCapacity as error:
            if target.action != "unchanged":
                raise
            self.notes.refused[target.ref] = Refusal("capacity", error.message, error.hint or "")


@dataclass
class ObjectWork:
    """The working state of one object's plan. ``swept``: by slot, the ops that end what dead shims have left there."""

    planning: Planning
    target: Target
    swept: dict[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def ref(self) -> str:
        return self.target.ref

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
        return self.planning.gpus

    @cached_property
    def observed(self) -> Observed:
        """An object that is created again has never run."""
        observed = self.planning.observed
        return observed.without(self.ref) if self.target.replaces is not None else observed

    @property
    def recorded(self) -> tuple[int, ...]:
        return self.planning.recorded.get(self.ref, ())

    @property
    def restarted(self) -> dict[str, str]:
        """The input of a process by which it is outdated after `areal restart`."""
        asked = str(self.target.object.status.get("restartedAt", ""))
        return {"restartedAt": asked} if asked else {}

    def stop(self, run: ObservedRun, cause: str, needs: Sequence[int], args: Mapping[str, Any] | None = None) -> int:
        """End a run; its GPUs are free afterwards. The lease of a run whose shim died is free already; what its session
        left may still use the GPU."""
        op = self.build.add(Verb.STOP, self.ref, slot_of(run), cause, needs=needs, run=run.uid, args=args)
        squatters = self.observed.capacity.squatters
        self.gpus.give(sum(1 for uuid in run.state.spec.gpus if run.is_live or uuid in squatters), op)
        return op

    def sweep(self) -> None:
        """End what dead shims have left, before anything is started in their place."""
        for run in self.observed.of(self.ref):
            if run.leaves_session:
                self.swept[slot_of(run)] = (*self.swept.get(slot_of(run), ()), self.stop(run, SWEPT, self.recorded))


class KindPlan:
    """One kind's part of a plan. Every phase is called for all kinds before the next one."""

    def __init__(self, planning: Planning, kind: str) -> None:
        self.planning = planning
        found = (target for target in planning.scope.all if target.object.kind == kind)
        self.targets = [target for target in found if target.ref not in planning.notes.refused]

    def drain(self) -> None:
        """What ends takes no more work. The kinds that refer to others come first."""

    def open(self) -> None:
        """Read what stays, route what serves, start what other kinds need."""

    def sync(self) -> None:
        """Complete the routing tables."""

    def end(self) -> None:
        """Stop and erase what ends, before anything takes its place."""

    def close(self) -> None:
        """Start what is missing, replace what is outdated, remove what is superfluous. Raises NoCapacity."""

    def finish(self) -> None:
        """Whatever needs all of this: erase what others needed until now, start what needs the others."""
        for target in self.targets:
            if target.gone:
                erase(self.planning.build, target, self.planning.observed, ())


class SimplePlan(KindPlan):
    """N processes of one component; a successor is ready before an outdated process is stopped."""

    def __init__(
        self,
        planning: Planning,
        kind: str,
        component: str,
        fields: tuple[str, ...],
        replicas: Callable[[Mapping[str, Any]], int],
    ) -> None:
        super().__init__(planning, kind)
        self._component, self._fields, self._replicas = component, fields, replicas

    def drain(self) -> None:
        planning = self.planning
        for target in self.targets:
            if (old := target.ending) is not None:
                runs, grace = stoppable(planning.observed.of(old.ref)), planning.policy.grace
                names, needs = [self._component], planning.all_drained
                stopped = stop_in_order(planning.build, old.ref, runs, names, end_cause(old), needs, grace)
                planning.drained[old.ref] = stopped

    def end(self) -> None:
        planning = self.planning
        for target in self.targets:
            if (old := target.ending) is not None:
                erased = erase(planning.build, old, planning.observed, planning.drained[old.ref])
                if not target.gone:
                    planning.record_again(target, (erased,))

    def close(self) -> None:
        for target in self.targets:
            if not target.gone and target.ref in self.planning.scope.asked:
                with self.planning.healing(target):
                    self._converge(target)

    def finish(self) -> None:
        """Ended objects are erased already."""

    def _converge(self, target: Target) -> None:
        planning, work, item = self.planning, ObjectWork(self.planning, target), target.object
        build, observed = planning.build, work.observed
        runs, count = observed.of(target.ref), self._replicas(item.spec)
        planning.notes.cannot_see(target.ref, [run for run in unseen(runs) if run.replica >= count])
        needs = (*work.recorded, *build.ready_ops(item.depends_on))
        for run in runs:
            if run.leaves_session:
                needs = (*needs, build.add(Verb.STOP, target.ref, slot_of(run), SWEPT, needs=needs, run=run.uid))
        chosen: set[str] = set()
        for index in range(count):
            component = Component(work.ref, self._component, index, item.kind, item.spec, self._fields, work.restarted)
            decision = decide(component, observed.of(target.ref, component.name, index))
            planning.notes.note(component, decision)
            chosen |= {decision.run.uid} if decision.run is not None else set()
            if decision.action in (Action.KEEP, Action.LEAVE, Action.AWAIT, Action.DEFER):
                keep(build, component, decision, needs)
                continue
            old = decision.run if decision.action is Action.REPLACE else None
            started = start(build, component, decision, observed, needs, {"successor": True} if old else None)
            if old is not None:
                cause = f"replaced: {decision.cause}"
                build.add(Verb.STOP, target.ref, component.target, cause, needs=started.ready, run=old.uid)
        superfluous = [run for run in runs if run.is_live and run.uid not in chosen]
        cause = f"not one of {count} replicas" if count else "suspended"
        stop_in_order(build, target.ref, superfluous, [self._component], cause, needs)
