"""Plan an InferenceService: a router that says where, a gateway that relays. Pure.

The router and the gateway start side by side; the gateway follows the router's table and waits for it. A gateway
that must change on the same address starts beside the old one (the port is shared) and the old one drains. A router
is replaced in place: the relays keep serving from their last table meanwhile, and do so until they are told that the
new table is whole (SYNC); until then nothing that they may still pick is stopped, and no gateway that knows only the
new table is started beside them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from areal.reconcilers.components import Action, Component, Decision, decide, key_input
from areal.reconcilers.desired import Target
from areal.reconcilers.findings import Findings
from areal.reconcilers.observed import Observed, ObservedRun, RouteTable
from areal.reconcilers.plan import PlanBuilder, Verb
from areal.reconcilers.processes import (
    SWEPT,
    Started,
    end_cause,
    erase,
    keep,
    slot_of,
    start,
    stop_in_order,
    stoppable,
    unseen,
)
from areal.resources.inference_service import InferenceServiceSpec

ROUTER_FIELDS = ("logLevel", "auth", "scheduler", "router")
GATEWAY_FIELDS = ("gateway", "logLevel", "auth", "scheduler")


@dataclass(frozen=True)
class ServiceView:
    """What a Model's plan must know of its service. ``router`` is a run uid or symbol, "" when there is none.

    ``table`` is the router's table if it will still hold when routes are changed; None when the router starts empty;
    a sentence when it cannot be read. Relays go by the table alone after the ops ``synced``. ``router_unseen``,
    ``gateway_unseen``: out of sight, or not to be counted on yet, and left alone.
    """

    ref: str
    spec: InferenceServiceSpec
    router: str = ""
    router_ready: tuple[int, ...] = ()
    synced: tuple[int, ...] = ()
    gateway_ready: tuple[int, ...] = ()
    table: RouteTable | str | None = None
    gone: bool = False
    gateway_stopped: tuple[int, ...] = ()
    router_unseen: bool = False
    gateway_unseen: bool = False

    @property
    def suspended(self) -> bool:
        return self.spec.suspend

    @property
    def needs_sync(self) -> bool:
        """Whether relays still go by what they inherited from an earlier router."""
        if self.gone or not self.router or self.router_unseen or isinstance(self.table, str):
            return False
        return self.table is None or not self.table.synced


@dataclass
class ServicePlan:
    """The working state of one service's plan."""

    build: PlanBuilder
    target: Target
    spec: InferenceServiceSpec
    observed: Observed
    findings: Findings
    recorded: tuple[int, ...]
    swept: dict[str, tuple[int, ...]] = field(default_factory=dict)  # by slot
    gateway: tuple[Component, Decision] | None = None

    @property
    def ref(self) -> str:
        return self.target.ref

    def sweep(self) -> None:
        """End what dead shims have left, before anything is started in their place."""
        for run in self.observed.of(self.ref):
            if run.leaves_session:
                op = self.build.add(Verb.STOP, self.ref, slot_of(run), SWEPT, needs=self.recorded, run=run.uid)
                self.swept[slot_of(run)] = (*self.swept.get(slot_of(run), ()), op)

    def start(
        self,
        component: Component,
        decision: Decision,
        needs: Sequence[int],
        args: Mapping[str, Any] | None = None,
        after: Sequence[int] = (),
    ) -> Started:
        needs = (*needs, *self.swept.get(component.target, ()))
        return start(self.build, component, decision, self.observed, needs, args, after)

    def component(self, name: str, fields: tuple[str, ...], inputs: Mapping[str, Any] | None = None) -> Component:
        restarted = str(self.target.object.status.get("restartedAt", ""))
        token = {**({"restartedAt": restarted} if restarted else {}), **key_input(self.spec)}
        sparse = self.target.object.spec
        return Component(self.ref, name, 0, "InferenceService", sparse, fields, {**(inputs or {}), **token})

    def decide(self, component: Component) -> Decision:
        decision = decide(component, self.observed.of(self.ref, component.name))
        self.findings.note(component, decision)
        return decision


def open_service(front: ServicePlan) -> ServiceView:
    """The router, and a gateway where there is none: what the service's models need to know."""
    if front.spec.suspend:
        return ServiceView(front.ref, front.spec, gateway_stopped=_suspend(front))
    front.sweep()
    routing = front.component("router", ROUTER_FIELDS)
    decision = front.decide(routing)
    router, fresh = _plan_router(front, routing, decision)
    table = None if fresh else front.observed.routes.get(front.ref)
    if isinstance(table, str):
        front.findings.unknown.append(table)
    view = ServiceView(front.ref, front.spec, router.run, router.ready, table=table)
    if decision.action is Action.LEAVE:
        view = replace(view, router_unseen=True)
    front.gateway = _decide_gateway(front, decision)
    view = _plan_gateway(front, view)
    return view if view.router_unseen else replace(view, router_ready=_configure(front, router, table))


def close_service(front: ServicePlan, view: ServiceView) -> ServiceView:
    """A gateway that has to change follows its predecessor, once the table that it will follow is whole."""
    if front.gateway is None or front.gateway[1].action is not Action.REPLACE or view.router_unseen:
        return view
    component, decision = front.gateway
    assert decision.run is not None
    started = front.start(component, decision, (*front.recorded, *view.synced), {"router": view.router})
    _drain_out(front, component, decision.run, f"replaced: {decision.cause}", started.ready)
    return replace(view, gateway_ready=started.ready)


def _suspend(front: ServicePlan) -> tuple[int, ...]:
    """Stop the gateway, which lets running streams finish, then the router; the ops after which no request comes."""
    runs = front.observed.of(front.ref)
    front.findings.cannot_see(front.ref, unseen(runs))
    args = {"graceSeconds": front.spec.strategy.drain_timeout_seconds}
    ending = stoppable(runs)
    closed = stop_in_order(front.build, front.ref, ending, ["gateway"], "suspended", front.recorded, args)
    stop_in_order(front.build, front.ref, ending, ["router"], "suspended", closed)
    return closed


def _configure(front: ServicePlan, router: Started, table: RouteTable | str | None) -> tuple[int, ...]:
    """Hot settings, where the router does not have them; the ops after which it does."""
    hot = {"strategy": front.spec.router.strategy, "limits": front.spec.limits.model_dump(mode="json", by_alias=False)}
    if isinstance(table, str) or (isinstance(table, RouteTable) and not _differs(table, hot)):
        return router.ready
    cause = "router starts empty" if table is None else "settings changed"
    needs = router.ready or front.recorded
    return (front.build.add(Verb.CONFIGURE, front.ref, "router", cause, needs=needs, run=router.run, args=hot),)


def _differs(table: RouteTable, hot: Mapping[str, Any]) -> bool:
    return table.strategy != hot["strategy"] or any(
        table.limits.get(name) != value for name, value in hot["limits"].items()
    )


def _plan_router(front: ServicePlan, component: Component, decision: Decision) -> tuple[Started, bool]:
    """The router, and whether its table starts empty."""
    if decision.action in (Action.KEEP, Action.LEAVE, Action.AWAIT):
        _stop_extras(front, component, decision)
        kept = keep(front.build, component, decision, front.recorded)
        return kept, decision.action is Action.AWAIT and front.observed.routes.get(front.ref) is None
    needs = front.recorded
    if decision.action is Action.REPLACE:
        assert decision.run is not None
        front.findings.destructive.append(f"{front.ref}: the router is restarted (gateways serve on meanwhile)")
        old = front.build.add(Verb.STOP, front.ref, component.target, decision.cause, needs=needs, run=decision.run.uid)
        needs = (old,)
    return front.start(component, decision, needs), True


def _decide_gateway(front: ServicePlan, router: Decision) -> tuple[Component, Decision]:
    stays = router.run is not None and router.action in (Action.KEEP, Action.AWAIT, Action.KICK)
    inputs = {"routerUrl": router.run.url} if stays and router.run is not None else {}
    component = front.component("gateway", GATEWAY_FIELDS, inputs)
    decision = front.decide(component)
    moving = (Action.SPAWN, Action.REPLACE, Action.LEAVE)
    if router.action in moving and decision.action in (Action.AWAIT, Action.KICK):
        return component, Decision(Action.DEFER, "its router has to be there first", decision.run)
    return component, decision


def _plan_gateway(front: ServicePlan, view: ServiceView) -> ServiceView:
    """Keep, heal or start the gateway; one that has to be replaced waits until the routes are whole."""
    assert front.gateway is not None
    component, decision = front.gateway
    if decision.action is Action.DEFER:
        return replace(view, gateway_unseen=True)
    if decision.action in (Action.KEEP, Action.LEAVE, Action.AWAIT):
        kept = keep(front.build, component, decision, front.recorded, view.router_ready)
        _stop_extras(front, component, decision, kept.ready)
        return replace(view, gateway_ready=kept.ready, gateway_unseen=decision.action is Action.LEAVE)
    if view.router_unseen:
        return replace(view, gateway_unseen=True)  # a gateway without its router would serve nothing
    if decision.action is Action.REPLACE:
        return view
    # A router that fails ends the wait for the gateway that follows it.
    started = front.start(component, decision, front.recorded, {"router": view.router}, view.router_ready)
    return replace(view, gateway_ready=started.ready)


def _drain_out(front: ServicePlan, component: Component, run: ObservedRun, cause: str, needs: Sequence[int]) -> None:
    """SIGTERM, and as much time as running streams may take."""
    args = {"graceSeconds": front.spec.strategy.drain_timeout_seconds}
    front.build.add(Verb.STOP, front.ref, component.target, cause, needs=needs, run=run.uid, args=args)


def _stop_extras(front: ServicePlan, component: Component, decision: Decision, needs: tuple[int, ...] = ()) -> None:
    """A second live process is what an interrupted replacement leaves behind."""
    if decision.action is Action.LEAVE or decision.run is None:
        return
    for run in front.observed.of(front.ref, component.name):
        if run.is_live and run.uid != decision.run.uid:
            _drain_out(front, component, run, "not wanted beside another", needs)


def plan_service_end_of_traffic(
    build: PlanBuilder, target: Target, observed: Observed, grace_s: float, needs: tuple[int, ...] = ()
) -> tuple[int, ...]:
    """First half of a deletion: the gateway drains and goes; its models go next."""
    runs = stoppable(observed.of(target.ref))
    return stop_in_order(build, target.ref, runs, ["gateway"], end_cause(target), needs, {"graceSeconds": grace_s})


def plan_service_end(
    build: PlanBuilder, target: Target, observed: Observed, needs: tuple[int, ...], grace_s: float | None
) -> None:
    """Second half of a deletion: the router, every record, the object."""
    args = {} if grace_s is None else {"graceSeconds": grace_s}
    runs = stoppable(observed.of(target.ref))
    stopped = stop_in_order(build, target.ref, runs, ["router"], end_cause(target), needs, args)
    erase(build, target, observed, (*needs, *stopped))
