"""The whole plan: every target's ops in dependency order. Pure: no I/O, no clock, no randomness.

Order: records first (an object is ours before its processes exist); services before models; within a service the
router, the gateway, the engines and the data proxies start side by side, then routes. Deletions run the other way
round: the gateway stops taking requests, models go, the router goes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from areal.reconcilers.desired import Target
from areal.reconcilers.inference_service import (
    Findings,
    ServiceView,
    plan_service,
    plan_service_end,
    plan_service_end_of_traffic,
)
from areal.reconcilers.model import Policy, plan_model, plan_model_end
from areal.reconcilers.observed import Observed, RouteTable
from areal.reconcilers.plan import ObjectPlan, Plan, PlanBuilder, Verb
from areal.resources.inference_service import InferenceServiceSpec
from areal.resources.kinds import KINDS
from areal.resources.model import ModelSpec
from areal.resources.registry import effective
from areal.resources.update import Update

_HOW = {
    Update.META: "recorded only",
    Update.HOT: "in place, no process restarts",
    Update.ROLL: "rolling update",
    Update.RECREATE: "processes are replaced",
    Update.IMMUTABLE: "deleted and created again",
}


@dataclass(frozen=True)
class Scope:
    """``targets`` are asked for. ``context`` are stored neighbours: services that targets need, and models whose
    routes a restarted router would lose. Of the context, services are healed and models only routed."""

    targets: tuple[Target, ...]
    context: tuple[Target, ...] = ()

    @property
    def all(self) -> tuple[Target, ...]:
        ordered = sorted((*self.targets, *self.context), key=lambda t: (KINDS[t.object.kind].order, t.object.name))
        return tuple(ordered)


@dataclass
class _Assembly:
    build: PlanBuilder = field(default_factory=PlanBuilder)
    findings: Findings = field(default_factory=Findings)
    recorded: dict[str, tuple[int, ...]] = field(default_factory=dict)
    services: dict[str, ServiceView] = field(default_factory=dict)


def make_plan(
    scope: Scope,
    observed: Observed,
    policy: Policy,
    *,
    serial: int = 0,
    source: Mapping[str, Any] | None = None,
) -> Plan:
    """Everything that must be done so that reality agrees with ``scope.targets``. Raises NoCapacity."""
    work = _Assembly()
    everything = scope.all
    _record_all(work, everything)
    gone_services = [t for t in everything if t.gone and t.object.kind == "InferenceService"]
    _end_traffic(work, gone_services, observed, policy)
    for target in everything:
        if target.object.kind == "InferenceService" and not target.gone:
            work.services[target.ref] = _service(work, target, observed)
    context = {target.ref for target in scope.context}
    asked = {target.ref for target in scope.targets}
    erased = _models(work, everything, context, asked, observed, policy)
    for target in gone_services:
        models = tuple(op for ref, ops in erased.items() if ref[1] == target.ref for op in ops)
        plan_service_end(
            work.build, target, observed, (*work.services[target.ref].gateway_stopped, *models), policy.grace_s
        )
    _erase_plain(work, everything)
    return _finish(work, scope, serial, source or {})


def _record_all(work: _Assembly, targets: Sequence[Target]) -> None:
    for target in targets:
        if target.action in ("create", "configure"):
            cause = "new object" if target.action == "create" else target.cause or _change_cause(target)
            work.recorded[target.ref] = (work.build.add(Verb.RECORD, target.ref, "", cause),)


def _change_cause(target: Target) -> str:
    decisive = target.decisive
    return f"{decisive.path} changed" if decisive else "metadata changed"


def _end_traffic(work: _Assembly, gone: Sequence[Target], observed: Observed, policy: Policy) -> None:
    for target in gone:
        stopped = plan_service_end_of_traffic(work.build, target, observed, policy.grace_s)
        spec = _service_spec(target)
        work.services[target.ref] = ServiceView(target.ref, spec, gone=True, gateway_stopped=stopped)


def _service_spec(target: Target) -> InferenceServiceSpec:
    spec = effective("InferenceService", target.object.spec)
    assert isinstance(spec, InferenceServiceSpec)
    return spec


def _service(work: _Assembly, target: Target, observed: Observed) -> ServiceView:
    recorded = work.recorded.get(target.ref, ())
    return plan_service(work.build, target, _service_spec(target), observed, work.findings, recorded)


def _models(
    work: _Assembly,
    everything: Sequence[Target],
    context: set[str],
    asked: set[str],
    observed: Observed,
    policy: Policy,
) -> dict[tuple[str, str], tuple[int, ...]]:
    """Plan every model; returns the last op of each deleted one, keyed by (model, service)."""
    erased: dict[tuple[str, str], tuple[int, ...]] = {}
    routed_services: dict[str, set[str]] = {}
    for target in everything:
        if target.object.kind != "Model":
            continue
        spec = effective("Model", target.object.spec)
        assert isinstance(spec, ModelSpec)
        service = work.services.get(f"InferenceService/{spec.service}")
        if target.gone:
            needs = service.gateway_stopped if service is not None else ()
            last = plan_model_end(work.build, target, service, observed, policy, needs)
            erased[(target.ref, f"InferenceService/{spec.service}")] = last
            continue
        if service is None or service.gone:
            work.findings.unknown.append(f"{target.ref}: its service {spec.service} is not recorded")
            continue
        routed_services.setdefault(service.ref, set()).add(target.object.name)
        routes_only = target.ref in context and service.ref not in asked
        recorded = work.recorded.get(target.ref, ())
        plan_model(
            work.build, target, spec, service, observed, work.findings, policy, recorded, routes_only=routes_only
        )
    _unroute_strangers(work, routed_services, {ref for ref, _ in erased})
    _mark_synced(work, everything)
    return erased


def _unroute_strangers(work: _Assembly, known: Mapping[str, set[str]], erased: set[str]) -> None:
    """Models in a router's table that no object declares."""
    for view in work.services.values():
        if not isinstance(view.table, RouteTable) or view.gone:
            continue
        for name in sorted(set(view.table.models) - known.get(view.ref, set())):
            if f"Model/{name}" in erased:
                continue
            args = {"service": view.ref, "router": view.router, "model": name}
            cause = f"route-extra: no object declares model {name}"
            work.build.add(Verb.UNROUTE, view.ref, f"routes/{name}", cause, args=args)


def _mark_synced(work: _Assembly, everything: Sequence[Target]) -> None:
    """A router that started empty is whole again when every route op of its models has run."""
    for view in work.services.values():
        if view.gone or not view.router or isinstance(view.table, str):
            continue
        if isinstance(view.table, RouteTable) and view.table.synced:
            continue
        routes = tuple(
            op.id
            for op in work.build.ops()
            if op.verb in (Verb.ROUTE, Verb.UNROUTE) and op.args.get("service") == view.ref
        )
        # A model that failed to come up must not keep the rest of the table from being trusted.
        work.build.add(
            Verb.SYNC,
            view.ref,
            "router",
            "its table is whole again",
            needs=view.router_ready,
            run=view.router,
            args={"after": list(routes)},
        )


def _erase_plain(work: _Assembly, everything: Sequence[Target]) -> None:
    for target in everything:
        if target.gone and target.object.kind not in ("InferenceService", "Model"):
            work.build.add(Verb.ERASE, target.ref, "", target.cause or "deleted")


def _finish(work: _Assembly, scope: Scope, serial: int, source: Mapping[str, Any]) -> Plan:
    ops = work.build.ops()
    touched = {op.ref for op in ops}
    objects = []
    for target in scope.all:
        if target in scope.context and target.ref not in touched:
            continue
        objects.append(_object_plan(target, target.ref in touched, work.findings))
    deleted = [t for t in scope.all if t.gone]
    destructive = [*work.findings.destructive, *(f"{t.ref} is {_past(t.action)}" for t in deleted)]
    return Plan(
        objects=tuple(objects),
        ops=ops,
        drift=tuple(work.findings.drift),
        destructive=tuple(destructive),
        unknown=tuple(work.findings.unknown),
        serial=serial,
        source=source,
    )


def _past(action: str) -> str:
    return "pruned" if action == "prune" else "deleted"


def _object_plan(target: Target, touched: bool, findings: Findings) -> ObjectPlan:
    action, cause, decided = target.action, target.cause, ""
    if action == "configure" and target.decisive is not None:
        decided = target.decisive.path
        cause = cause or _HOW[target.decisive.update]
    elif action == "configure":
        cause = cause or "metadata"
    if action == "unchanged" and touched:
        action = "heal"
        mine = [drift for drift in findings.drift if drift.ref == target.ref]
        cause = "; ".join(f"{drift.target} {drift.kind}" for drift in mine) or "not converged yet"
    return ObjectPlan(target.ref, action, cause, decided, target.changes, target.taken)


def without_ops(plan: Plan) -> Plan:
    """The plan as a client-side dry run sees it: fields only."""
    return replace(plan, ops=(), drift=(), destructive=())
