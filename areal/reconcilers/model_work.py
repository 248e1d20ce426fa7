"""The working state of one Model's plan, and the few ops that every part of it uses. Pure.

Routes are one declarative set a model; the only op that takes a replica out of rotation is DRAIN. ``routed`` is the
set as it will be after the ops so far.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from areal.errors import NoCapacity
from areal.reconcilers.capacity import GpuPool
from areal.reconcilers.components import Action, Component, Decision
from areal.reconcilers.desired import Target
from areal.reconcilers.findings import Findings
from areal.reconcilers.inference_service import ServiceView
from areal.reconcilers.observed import Observed, ObservedRun, RouteTable
from areal.reconcilers.plan import PlanBuilder, Verb
from areal.reconcilers.processes import SWEPT, Started, awaiting, keep, slot_of, start
from areal.reconcilers.replicas import ENGINE, PROXY, Replica, gpus_per_replica, read_replica, replica_count
from areal.resources.blocks import Strategy
from areal.resources.model import ModelSpec


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


@dataclass
class ModelWork:
    build: PlanBuilder
    target: Target
    spec: ModelSpec
    service: ServiceView
    observed: Observed
    findings: Findings
    policy: Policy
    gpus: GpuPool
    recorded: tuple[int, ...] = ()
    trainer: str = ""  # the job that trains it, where its driver has yet to start
    routed: list[str] = field(default_factory=list)
    cordoned: list[str] = field(default_factory=list)  # of those routed: nothing new, but the sessions that they have
    swept: dict[str, tuple[int, ...]] = field(default_factory=dict)  # by slot

    @property
    def ref(self) -> str:
        return self.target.ref

    @property
    def name(self) -> str:
        """The router's name of it."""
        return self.spec.served_model_name or self.target.object.name

    @property
    def suspended(self) -> bool:
        return self.spec.suspend or self.service.suspended

    @property
    def count(self) -> int:
        return 0 if self.suspended else replica_count(self.spec)

    @property
    def need(self) -> int:
        """GPUs of one replica."""
        return gpus_per_replica(self.spec)

    @property
    def strategy(self) -> Strategy:
        return self.spec.strategy or self.service.spec.strategy

    @property
    def known(self) -> Mapping[str, str]:
        """The model's workers in the router's table, with their states; empty when it has none or starts empty."""
        table = self.service.table
        if not isinstance(table, RouteTable):
            return {}
        return {worker: state for worker, _, state in table.models.get(self.name, ())}

    @property
    def readiness(self) -> dict[str, Any]:
        """How the router is to probe the model's data proxies."""
        return self.spec.probes.readiness.model_dump(by_alias=False, mode="json")

    @property
    def table_lost(self) -> bool:
        """Whether the router has started anew and does not know the model."""
        table = self.service.table
        if isinstance(table, RouteTable):
            return not table.synced and self.name not in table.models
        return table is None and bool(self.service.router)

    @property
    def table_readable(self) -> bool:
        return not isinstance(self.service.table, str)

    def replica(self, index: int) -> Replica:
        """What is to be done about one slot."""
        return read_replica(self.target, self.spec, self.service.spec, self.observed, self.findings, index)

    def start(
        self,
        component: Component,
        decision: Decision,
        needs: Sequence[int],
        args: Mapping[str, Any] | None = None,
        after: Sequence[int] = (),
    ) -> Started:
        """Start a process, with the GPUs that it needs; or wait for the one that is there."""
        trainer = self.trainer if component.name == PROXY else ""
        if decision.action in (Action.KEEP, Action.LEAVE, Action.DEFER, Action.AWAIT):
            return keep(self.build, component, decision, needs, after, trainer)
        if decision.action is not Action.KICK:
            needs = (*needs, *self.swept.get(component.target, ()))
        if component.name == ENGINE and decision.action is not Action.KICK:
            needs = (*needs, *self.gpus.take(self.need, f"{self.ref} {component.target}"))
        return start(self.build, component, decision, self.observed, needs, args, after, trainer)

    def stop(self, run: ObservedRun, cause: str, needs: Sequence[int], args: Mapping[str, Any] | None = None) -> int:
        """End a run; its GPUs are free afterwards."""
        op = self.build.add(Verb.STOP, self.ref, slot_of(run), cause, needs=needs, run=run.uid, args=args)
        self.gpus.give(sum(1 for uuid in run.state.spec.gpus if self._is_held(run, uuid)), op)
        return op

    def _is_held(self, run: ObservedRun, uuid: str) -> bool:
        """The lease of a run whose shim died is free; what its session left may still use the GPU."""
        return run.is_live or uuid in self.observed.capacity.squatters

    def sweep(self) -> None:
        """End what dead shims have left, before anything is started in their place."""
        for run in self.observed.of(self.ref):
            if run.leaves_session:
                self.swept[slot_of(run)] = (*self.swept.get(slot_of(run), ()), self.stop(run, SWEPT, self.recorded))

    def warm(self, replica: Replica, run: str, needs: Sequence[int]) -> tuple[int, ...]:
        """A completion through the data proxy, before it is routed. An endpoint of somebody else is asked for nothing
        that costs: that it answers at all is part of being ready."""
        if self.spec.external is not None:
            return tuple(needs)
        target = replica.proxy_component.target
        args = awaiting(self.trainer)
        return (self.build.add(Verb.WARM, self.ref, target, "before it is routed", needs=needs, run=run, args=args),)

    def leave_router(self, proxies: Sequence[ObservedRun], cause: str) -> tuple[int, ...]:
        """Drain every data proxy and forget the model at the router; to be waited for, whatever becomes of it."""
        seconds = self.policy.drain_s(self.strategy.drain_timeout_seconds)
        drains = self.drain([run.uid for run in proxies], (), cause, seconds=seconds)
        args = {**self._router, **self._own_name, "after": list(drains)}
        needs = (*self.service.router_ready, *self.service.synced)
        gone = self.build.add(Verb.UNROUTE, self.ref, "routes", cause, needs=needs, args=args)
        return (*drains, gone)

    def stop_all(self, runs: Sequence[ObservedRun], cause: str, needs: Sequence[int]) -> tuple[int, ...]:
        return tuple(self.stop(run, cause, needs) for run in runs) or tuple(needs)

    def route(self, cause: str, needs: Sequence[int]) -> int:
        """Give the router the model's whole set."""
        return self.build.add(
            Verb.ROUTE,
            self.ref,
            "routes",
            cause,
            needs=(*needs, *self.service.router_ready),
            runs=tuple(self.routed),
            args={
                **self._router,
                "expected": min(self.count, len(self.routed)),
                "readiness": self.readiness,
                **({"cordoned": list(self.cordoned)} if self.cordoned else {}),
            },
        )

    def unroute(self, cause: str, needs: Sequence[int]) -> int:
        needs = (*needs, *self.service.router_ready)
        return self.build.add(
            Verb.UNROUTE, self.ref, "routes", cause, needs=needs, args={**self._router, **self._own_name}
        )

    @property
    def _own_name(self) -> dict[str, str]:
        """Of an object that will be gone, or another one, when its routes go."""
        return {"model": self.name} if self.spec.served_model_name else {}

    def drain(
        self, proxies: Sequence[str], needs: Sequence[int], cause: str, *, seconds: float | None = None
    ) -> tuple[int, ...]:
        """No new picks, running requests finish; ``seconds`` None: as long as the strategy says."""
        args = {**self._router, "seconds": self.strategy.drain_timeout_seconds if seconds is None else seconds}
        needs = (*needs, *self.service.router_ready, *self.service.synced)
        drains = [
            self.build.add(Verb.DRAIN, self.ref, "data-proxy", cause, needs=needs, run=uid, args=args)
            for uid in proxies
        ]
        return tuple(drains) or tuple(needs)

    @property
    def _router(self) -> dict[str, Any]:
        return {"service": self.service.ref, "router": self.service.router}

    def downtime(self, sentence: str) -> None:
        self.findings.destructive.append(f"{self.ref}: {sentence}")

    def require_gpus(self, count: int, message: str, hint: str) -> None:
        """Refuse, before anything is planned, what the machine cannot hold."""
        if count > self.gpus.available:
            raise NoCapacity(f"{self.ref}{message}; {self.gpus.available} are free", hint=hint)
