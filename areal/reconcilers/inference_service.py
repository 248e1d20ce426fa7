"""Plan an InferenceService: a router that says where, a gateway that relays. Pure.

The router and the gateway start side by side; the gateway follows the router's table and waits for it. A gateway
that must change on the same address starts beside the old one (the port is shared) and the old one drains. A router
is replaced in place: the relays keep serving from their last table meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from areal.reconcilers.components import Action, Component, Decision, decide, ended
from areal.reconcilers.desired import Target
from areal.reconcilers.observed import Observed, ObservedRun, RouteTable
from areal.reconcilers.plan import Drift, PlanBuilder, Verb
from areal.resources.inference_service import InferenceServiceSpec

ROUTER_FIELDS = ("logLevel", "auth", "scheduler", "router")
GATEWAY_FIELDS = ("gateway", "logLevel", "auth", "scheduler")


@dataclass
class Findings:
    """What planning collects beside the ops."""

    drift: list[Drift] = field(default_factory=list)
    destructive: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class ServiceView:
    """What a Model's plan must know of its service. ``router`` is a run uid or symbol, "" when there is none.

    ``table`` is the router's table if it will still hold when routes are changed; None when the router starts empty;
    a sentence when it cannot be read.
    """

    ref: str
    spec: InferenceServiceSpec
    router: str = ""
    router_ready: tuple[int, ...] = ()
    gateway_ready: tuple[int, ...] = ()
    table: RouteTable | str | None = None
    gone: bool = False
    gateway_stopped: tuple[int, ...] = ()

    @property
    def suspended(self) -> bool:
        return self.spec.suspend


def routers(ref: str, sparse: Mapping[str, Any], restarted: str) -> Component:
    return Component(ref, "router", 0, "InferenceService", sparse, ROUTER_FIELDS, _token(restarted))


def gateways(ref: str, sparse: Mapping[str, Any], restarted: str) -> Component:
    return Component(ref, "gateway", 0, "InferenceService", sparse, GATEWAY_FIELDS, _token(restarted))


def _token(restarted: str) -> dict[str, str]:
    return {"restartedAt": restarted} if restarted else {}


def plan_service(
    build: PlanBuilder,
    target: Target,
    spec: InferenceServiceSpec,
    observed: Observed,
    findings: Findings,
    recorded: tuple[int, ...],
) -> ServiceView:
    """Ops for the router and the gateway; returns what the service's models need to know."""
    ref, sparse = target.ref, target.object.spec
    restarted = str(target.object.status.get("restartedAt", ""))
    if spec.suspend:
        _stop_everything(build, ref, observed, "suspended", recorded)
        return ServiceView(ref, spec)
    router_run, router_ready, fresh = _plan_router(build, routers(ref, sparse, restarted), observed, findings, recorded)
    gateway_ready = _plan_gateway(
        build, gateways(ref, sparse, restarted), router_run, observed, findings, recorded, spec
    )
    table = None if fresh else observed.routes.get(ref)
    if isinstance(table, str):
        findings.unknown.append(table)
    hot = _configuration(spec)
    if table is None or (isinstance(table, RouteTable) and _differs(table, hot)):
        cause = "router starts empty" if table is None else "settings changed"
        configured = build.add(Verb.CONFIGURE, ref, "router", cause, needs=router_ready, run=router_run, args=hot)
        router_ready = (configured,)
    return ServiceView(ref, spec, router_run, router_ready, gateway_ready, table)


def _configuration(spec: InferenceServiceSpec) -> dict[str, Any]:
    limits = spec.limits.model_dump(mode="json", by_alias=False)
    return {"strategy": spec.router.strategy, "limits": limits}


def _differs(table: RouteTable, hot: Mapping[str, Any]) -> bool:
    return table.strategy != hot["strategy"] or any(
        table.limits.get(name) != value for name, value in hot["limits"].items()
    )


def _plan_router(
    build: PlanBuilder, component: Component, observed: Observed, findings: Findings, recorded: tuple[int, ...]
) -> tuple[str, tuple[int, ...], bool]:
    """(run, ops after which it is ready, whether its table starts empty)."""
    runs = observed.of(component.ref, component.name)
    decision = decide(component, runs)
    _note(findings, component, decision)
    if decision.action in (Action.KEEP, Action.LEAVE):
        return _uid(decision), (), False
    if decision.action is Action.AWAIT:
        waited = build.add(
            Verb.AWAIT, component.ref, component.target, decision.cause, needs=recorded, run=_uid(decision)
        )
        return _uid(decision), (waited,), observed.routes.get(component.ref) is None
    needs = recorded
    if decision.action is Action.REPLACE:
        findings.destructive.append(f"{component.ref}: the router is restarted (gateways serve on meanwhile)")
        needs = (
            build.add(Verb.STOP, component.ref, component.target, decision.cause, needs=recorded, run=_uid(decision)),
        )
    run, ready = start_component(build, component, decision, runs, needs)
    return run, ready, True


def _plan_gateway(
    build: PlanBuilder,
    component: Component,
    router_run: str,
    observed: Observed,
    findings: Findings,
    recorded: tuple[int, ...],
    spec: InferenceServiceSpec,
) -> tuple[int, ...]:
    runs = observed.of(component.ref, component.name)
    decision = decide(component, runs)
    _note(findings, component, decision)
    if decision.action in (Action.KEEP, Action.LEAVE):
        return _stop_extras(build, component, decision, runs, ())
    if decision.action is Action.AWAIT:
        waited = build.add(
            Verb.AWAIT, component.ref, component.target, decision.cause, needs=recorded, run=_uid(decision)
        )
        return (waited,)
    _, ready = start_component(build, component, decision, runs, recorded, args={"router": router_run})
    if decision.action is Action.REPLACE:
        assert decision.run is not None
        build.add(
            Verb.STOP,
            component.ref,
            component.target,
            f"replaced: {decision.cause}",
            needs=ready,
            run=decision.run.uid,
            args={"graceSeconds": spec.strategy.drain_timeout_seconds},
        )
    return ready


def start_component(
    build: PlanBuilder,
    component: Component,
    decision: Decision,
    runs: Sequence[ObservedRun],
    needs: tuple[int, ...],
    args: Mapping[str, Any] | None = None,
    after: tuple[int, ...] = (),
) -> tuple[str, tuple[int, ...]]:
    """SPAWN or KICK, then AWAIT: (the run's uid or symbol, the op after which it is ready).

    It is waited for only ``after`` what it waits for itself: an engine that fails ends the wait for its data proxy.
    Records of earlier runs of this slot are forgotten, all but the newest: `logs --previous` reads that one.
    """
    if decision.action is Action.KICK:
        assert decision.run is not None
        begun = build.add(Verb.KICK, component.ref, component.target, decision.cause, needs=needs, run=decision.run.uid)
        run = decision.run.uid
    else:
        if decision.run is not None and decision.run.leaves_session:
            swept = "sweep what its session left"
            needs = (build.add(Verb.STOP, component.ref, component.target, swept, needs=needs, run=decision.run.uid),)
        for old in sorted(ended(runs), key=lambda run: run.ended_at)[:-1]:
            build.add(Verb.FORGET, component.ref, component.target, "an older record", needs=needs, run=old.uid)
        run = f"+{component.ref}/{component.target}"
        begun = build.add(
            Verb.SPAWN,
            component.ref,
            component.target,
            decision.cause,
            needs=needs,
            run=run,
            args={**(args or {}), **({"inputs": dict(component.inputs)} if component.inputs else {})},
        )
    ready = build.add(Verb.AWAIT, component.ref, component.target, "started", needs=(begun, *after), run=run)
    return run, (ready,)


def _stop_extras(
    build: PlanBuilder,
    component: Component,
    decision: Decision,
    runs: Sequence[ObservedRun],
    needs: tuple[int, ...],
) -> tuple[int, ...]:
    """A second live gateway is what an interrupted replacement leaves behind."""
    for run in runs:
        if run.is_live and decision.action is Action.KEEP and run.uid != _uid(decision):
            build.add(Verb.STOP, component.ref, component.target, "not wanted beside another", needs=needs, run=run.uid)
    return ()


def _stop_everything(
    build: PlanBuilder, ref: str, observed: Observed, cause: str, needs: tuple[int, ...]
) -> tuple[int, ...]:
    last = needs
    for name in ("gateway", "router"):
        stops = [
            build.add(Verb.STOP, ref, f"{name}/{run.state.spec.replica}", cause, needs=last, run=run.uid)
            for run in observed.of(ref, name)
            if run.is_live
        ]
        last = tuple(stops) or last
    return last


def plan_service_end_of_traffic(
    build: PlanBuilder, target: Target, observed: Observed, grace_s: float | None
) -> tuple[int, ...]:
    """First half of a deletion: the gateway drains and goes; its models go next."""
    args = {} if grace_s is None else {"graceSeconds": grace_s}
    return tuple(
        build.add(
            Verb.STOP, target.ref, f"gateway/{run.state.spec.replica}", _end_cause(target), run=run.uid, args=args
        )
        for run in observed.of(target.ref, "gateway")
        if run.is_live or run.leaves_session
    )


def plan_service_end(
    build: PlanBuilder, target: Target, observed: Observed, needs: tuple[int, ...], grace_s: float | None
) -> None:
    """Second half of a deletion: the router, every record, the object."""
    args = {} if grace_s is None else {"graceSeconds": grace_s}
    stops = tuple(
        build.add(
            Verb.STOP,
            target.ref,
            f"router/{run.state.spec.replica}",
            _end_cause(target),
            needs=needs,
            run=run.uid,
            args=args,
        )
        for run in observed.of(target.ref, "router")
        if run.is_live or run.leaves_session
    )
    erase(build, target, observed, (*needs, *stops))


def erase(build: PlanBuilder, target: Target, observed: Observed, needs: tuple[int, ...]) -> int:
    """Forget every run's record, then the object."""
    forgotten = tuple(
        build.add(
            Verb.FORGET,
            target.ref,
            f"{run.state.spec.component}/{run.state.spec.replica}",
            _end_cause(target),
            needs=needs,
            run=run.uid,
        )
        for run in observed.of(target.ref)
    )
    return build.add(Verb.ERASE, target.ref, "", _end_cause(target), needs=(*needs, *forgotten))


def _end_cause(target: Target) -> str:
    return target.cause or ("pruned" if target.action == "prune" else "deleted")


def _note(findings: Findings, component: Component, decision: Decision) -> None:
    if decision.drift is not None:
        findings.drift.append(Drift(component.ref, decision.drift[0], component.target, decision.drift[1]))
    if decision.action is Action.LEAVE:
        findings.unknown.append(f"{component.ref} {component.target}: {decision.cause}")


note = _note


def _uid(decision: Decision) -> str:
    return decision.run.uid if decision.run else ""
