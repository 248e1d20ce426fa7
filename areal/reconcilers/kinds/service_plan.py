"""Plan the router and the gateway of a service: one says where, the other relays. Pure.

The router and the gateway start side by side; the gateway follows the router's table and waits for it. A gateway
that must change on the same address starts beside the old one (the port is shared) and the old one drains. A router
is replaced in place: the relays keep serving from their last table meanwhile, and do so until they hear that the
new table is whole (SYNC); until then nothing that they may still pick is stopped, and no gateway that knows only the
new table is started beside them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from areal.dataclasses import dataclass
from areal.reconcilers.observe import ObservedRun
from areal.reconcilers.plan import Drift, RemoveRoutes, StartRun, StopRun, Verb
from areal.reconcilers.planning import (
    KEY_INPUT,
    Action,
    Component,
    Decision,
    KindPlan,
    ObjectWork,
    Planning,
    key_input,
    stoppable,
    unseen,
)
from areal.resources.addresses import base_url
from areal.resources.fields import ModelRef
from areal.resources.kinds import served_name
from areal.resources.specs import InferenceServiceSpec
from areal.runtime.backends import LOCAL
from areal.runtime.backends.base import LOOPBACK
from areal.wire.routing import Snapshot

if TYPE_CHECKING:
    from areal.resources.agent_spec import AgentServiceSpec

ROUTER_FIELDS = ("logLevel", "auth", "scheduler", "router")
GATEWAY_FIELDS = ("gateway", "logLevel", "auth", "scheduler", "inference")


@dataclass
class ServiceView:
    """The state of a service for the plans of what is behind its router. ``router`` is a run uid or symbol, "" when
    there is none.

    ``table``: the router's table; None when the router starts empty; a sentence when it cannot be read. Relays follow
    the new table after the ops ``synced``. ``router_unseen``, ``gateway_unseen``: it cannot be seen, or has to wait for
    its router, and is left alone.
    """

    ref: str
    spec: InferenceServiceSpec | AgentServiceSpec
    router: str = ""
    router_ready: tuple[int, ...] = ()
    synced: tuple[int, ...] = ()
    gateway_ready: tuple[int, ...] = ()
    table: Snapshot | str | None = None
    is_deleted: bool = False
    gateway_stopped: tuple[int, ...] = ()
    router_unseen: bool = False
    gateway_unseen: bool = False

    @property
    def suspended(self) -> bool:
        return self.spec.suspend

    @property
    def needs_sync(self) -> bool:
        """Whether relays still follow the table of an earlier router."""
        if self.is_deleted or not self.router or self.router_unseen or isinstance(self.table, str):
            return False
        return self.table is None or not self.table.synced


def called_first(work: ObjectWork, model: ModelRef | None, *more: str) -> tuple[int, ...]:
    """Return the ops after which the object's dependencies, the model that its processes call, and ``more`` serve."""
    needed = {*work.target.object.depends_on, *more}
    if model is not None:
        service = f"InferenceService/{model.service}"
        routed = {op.ref for op in work.build.ops() if op.verb is Verb.ROUTE and op.args.service == service}
        needed |= {service, *([f"Model/{model.model}"] if model.model else routed)}  # which one, the process knows
    return work.build.ready_ops(needed)


def inference_inputs(spec: InferenceServiceSpec | AgentServiceSpec, url: str) -> dict[str, str]:
    """Return inputs of a process that records at an inference service. ``url`` "": not known yet."""
    source = key_input(spec).get(KEY_INPUT, "generated")
    return {**({"inferenceUrl": url} if url else {}), "inferenceKeyFrom": source}


def called_inputs(planning: Planning, spec: InferenceServiceSpec | AgentServiceSpec) -> dict[str, str]:
    """Return inputs of an agent service's processes, from the inference service that it calls; empty where the plan
    does not know it."""
    called = None if isinstance(spec, InferenceServiceSpec) else spec.inference
    view: ServiceView | None = planning.views.get(f"InferenceService/{called.service}") if called is not None else None
    if view is None:
        return {}
    if view.spec.scheduler.type == LOCAL:
        return inference_inputs(view.spec, base_url(view.spec.gateway.host, view.spec.gateway.port))
    placed = [run.url for run in planning.observed.of(view.ref, "gateway") if run.is_live]
    return inference_inputs(view.spec, max(placed, default=""))


class ServicePlan(KindPlan, ABC):
    """Publishes a ``ServiceView`` of each service for the objects behind its router."""

    def __init__(self, planning: Planning, kind: str) -> None:
        super().__init__(planning, kind)
        self._opened: list[ServiceWork] = []

    @abstractmethod
    def declared(self, ref: str) -> frozenset[str]:
        """Return the names that objects declare at the router of the service ``ref``."""

    def drain(self) -> None:
        planning = self.planning
        for target in self.deleted:
            work = ServiceWork(planning, target)
            grace = StopRun(planning.policy.drain_s(work.drain_s))
            stopped = work.stop_component("gateway", stoppable(work.runs), work.end_cause, planning.all_drained, grace)
            planning.views[target.ref] = ServiceView(target.ref, work.spec, is_deleted=True, gateway_stopped=stopped)

    def open(self) -> None:
        planning = self.planning
        for target in self.staying:
            work = ServiceWork(planning, target)
            self._opened.append(work)
            planning.views[target.ref] = work.view
            open_service(work)
            if target.action == "configure" and any(change.path.startswith("spec.auth.") for change in target.changes):
                planning.notes.destructive.append(
                    f"{target.ref}: the key changes; requests fail until every process has the new one"
                )

    def sync(self) -> None:
        views: list[ServiceView] = [planned for t in self.targets if (planned := self.planning.views.get(t.ref))]
        for view in views:
            self._unroute_undeclared(view)
        for view in views:
            self._mark_synced(view)

    def _unroute_undeclared(self, view: ServiceView) -> None:
        """Unroute models of the router's table that no object declares."""
        if not isinstance(view.table, Snapshot) or view.is_deleted or self.planning.scope.unreadable:
            return  # an unreadable object may declare it
        declared = self.declared(view.ref)
        for name in sorted(view.table.models):
            if name not in declared:
                args = RemoveRoutes(view.ref, view.router, model=name)
                cause = f"route-extra: no object declares model {name}"
                self.planning.build.add(Verb.UNROUTE, view.ref, f"routes/{name}", cause, args=args)

    def _mark_synced(self, view: ServiceView) -> None:
        """Mark the table of a router that started empty as complete once it has the routes of the replicas that serve
        now. Relays must not wait for replicas that have yet to start."""
        if not view.needs_sync:
            return
        build = self.planning.build
        restored = [op for op in build.ops() if op.verb is Verb.ROUTE and op.args.service == view.ref]
        undeclared = [op for op in build.ops_of(view.ref) if op.verb is Verb.UNROUTE]
        needs = (*view.router_ready, *(op.id for op in (*restored, *undeclared)))
        op = build.add(Verb.SYNC, view.ref, "router", "its table is whole again", needs=needs, run=view.router)
        view.synced = (op,)

    def close(self) -> None:
        for work in self._opened:
            close_service(work)

    def finish(self) -> None:
        """Stop the router, then erase the service."""
        planning = self.planning
        for target in self.deleted:
            work = ServiceWork(planning, target)
            needs = (*planning.views[target.ref].gateway_stopped, *planning.ended.get(target.ref, ()))
            stopped = work.stop_component("router", stoppable(work.runs), work.end_cause, needs, work.policy.grace)
            work.erase((*needs, *stopped))


class InferenceServicePlan(ServicePlan):
    @cached_property
    def _models(self) -> frozenset[str]:
        targets = self.planning.scope.all
        objects = [item for target in targets for item in (target.object, target.replaces) if item is not None]
        return frozenset(served_name(item.name, item.spec) for item in objects if item.kind == "Model")

    def declared(self, ref: str) -> frozenset[str]:
        return self._models


class ServiceWork(ObjectWork):
    """The working state of a service. ``gateway``: a gateway that has to be replaced."""

    components = ("router", "gateway")
    spec: InferenceServiceSpec | AgentServiceSpec
    gateway: tuple[Component, Decision] | None = None

    @cached_property
    def view(self) -> ServiceView:
        return ServiceView(self.ref, self.spec)

    @property
    def drain_s(self) -> float:
        """Seconds that running requests get."""
        spec = self.spec
        if isinstance(spec, InferenceServiceSpec):
            return spec.strategy.drain_timeout_seconds
        return spec.drain_timeout_seconds

    def drain_out(self, run: ObservedRun, cause: str, needs: Sequence[int]) -> None:
        """Stop a run with SIGTERM, and as much grace as running streams may take."""
        self.stop(run, cause, needs, StopRun(self.drain_s))

    def decide_component(
        self, name: str, fields: tuple[str, ...], inputs: Mapping[str, object] | None = None
    ) -> tuple[Component, Decision]:
        if isinstance(self.spec, InferenceServiceSpec):
            fields = (*fields, "env")  # an AgentService's ``env`` is for its workers
        component = self.component(name, 0, fields, {**(inputs or {}), **key_input(self.spec)})
        decision = self.decide(component)
        self.note(component, decision)
        return component, decision


def open_service(work: ServiceWork) -> None:
    """Plan the router, and the gateway unless it has to be replaced."""
    if work.spec.suspend:
        # The gateway lets running streams finish, then the router goes.
        work.notes.cannot_see(work.ref, unseen(work.runs))
        grace, ending = StopRun(work.drain_s), stoppable(work.runs)
        work.view.gateway_stopped = work.stop_component("gateway", ending, "suspended", work.recorded, grace)
        work.stop_component("router", ending, "suspended", work.view.gateway_stopped)
        return
    work.sweep()
    router = _open_router(work)
    _open_gateway(work, router)
    if not work.view.router_unseen:
        _configure(work)


def close_service(work: ServiceWork) -> None:
    """Replace an outdated gateway once the router's table is complete."""
    if work.gateway is None:
        return
    component, decision = work.gateway
    assert decision.run is not None
    started = work.start(component, decision, (*work.recorded, *work.view.synced), StartRun(work.view.router))
    work.drain_out(decision.run, f"replaced: {decision.cause}", started.ready)
    work.view.gateway_ready = started.ready


def _open_router(work: ServiceWork) -> Decision:
    view = work.view
    component, decision = work.decide_component("router", ROUTER_FIELDS)
    if decision.action in (Action.KEEP, Action.LEAVE, Action.AWAIT):
        _stop_extras(work, component, decision)
        started = work.start(component, decision, work.recorded)
        view.table, view.router_unseen = work.observed.routes.get(work.ref), decision.action is Action.LEAVE
        if isinstance(view.table, str):
            work.notes.unknown.append(view.table)
            work.notes.unseen.setdefault(work.ref, view.table)
            work.notes.drift.append(Drift(work.ref, "table-unreadable", "router/0", view.table))
    else:
        needs = (*work.recorded, *work.swept.get(component.target, ()))
        if decision.action is Action.REPLACE and decision.run is not None:
            work.notes.destructive.append(f"{work.ref}: the router is restarted (gateways serve on meanwhile)")
            needs = (work.stop(decision.run, decision.cause, work.recorded),)
        started = work.start(component, decision, needs)
    view.router, view.router_ready = started.run, started.ready
    return decision


def _open_gateway(work: ServiceWork, router: Decision) -> None:
    """Keep, heal or start the gateway. A gateway that has to be replaced waits until the routes are complete."""
    view = work.view
    stays = router.run is not None and router.action in (Action.KEEP, Action.AWAIT, Action.KICK)
    url = router.run.url if stays and router.run is not None else _declared_router(work)
    inputs = {**({"routerUrl": url} if url else {}), **called_inputs(work.planning, work.spec)}
    component, decision = work.decide_component("gateway", GATEWAY_FIELDS, inputs)
    if not stays and decision.action in (Action.AWAIT, Action.KICK):
        view.gateway_unseen = True  # its router has to start first: the next pass decides
    elif decision.action in (Action.KEEP, Action.LEAVE, Action.AWAIT):
        kept = work.start(component, decision, work.recorded, after=view.router_ready)
        _stop_extras(work, component, decision, kept.ready)
        view.gateway_ready, view.gateway_unseen = kept.ready, decision.action is Action.LEAVE
    elif view.router_unseen:
        view.gateway_unseen = True  # a gateway without its router would serve nothing
    elif decision.action is Action.REPLACE:
        work.gateway = component, decision
    else:  # A router that fails ends the wait for the gateway that follows it.
        needs = (*work.recorded, *work.swept.get(component.target, ()))
        started = work.start(component, decision, needs, StartRun(view.router), view.router_ready)
        view.gateway_ready = started.ready


def _declared_router(work: ServiceWork) -> str:
    """Return the address at which the router will listen; "" if only its start decides it."""
    port = work.spec.router.port if isinstance(work.spec, InferenceServiceSpec) else None
    return base_url(LOOPBACK, port) if port is not None and work.scheduler == LOCAL else ""


def _configure(work: ServiceWork) -> None:
    """Send changed hot settings to the router."""
    view, table = work.view, work.view.table
    if not isinstance(work.spec, InferenceServiceSpec):
        return  # no hot settings
    strategy, limits = work.spec.router.strategy, work.spec.limits.model_dump(mode="json", by_alias=False)
    if isinstance(table, str):
        return
    if table is not None and (table.strategy, {name: table.limits.get(name) for name in limits}) == (strategy, limits):
        return
    from areal.wire.bodies import ConfigureRouter

    cause = "router starts empty" if table is None else "settings changed"
    needs, hot = view.router_ready or work.recorded, ConfigureRouter(strategy=strategy, limits=limits)
    configured = work.build.add(Verb.CONFIGURE, work.ref, "router", cause, needs=needs, run=view.router, args=hot)
    view.router_ready = (configured,)


def _stop_extras(work: ServiceWork, component: Component, decision: Decision, needs: tuple[int, ...] = ()) -> None:
    """Stop second live processes, which an interrupted replacement leaves."""
    if decision.action is Action.LEAVE or decision.run is None:
        return
    for run in work.observed.of(work.ref, component.name):
        if run.is_live and run.uid != decision.run.uid:
            work.drain_out(run, "not wanted beside another", needs)
