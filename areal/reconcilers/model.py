"""Plan a Model: replicas of (engine, data proxy) behind its service's router. Pure.

A replica's data proxy names its engine by URL, and a replaced process keeps its port where it can, so an engine that
died comes back under a data proxy that never noticed. Routes are one declarative set a model; the only op that takes
a replica out of rotation is DRAIN, and nothing is stopped before its successor is routed, unless the strategy, or a
machine with no room for two, says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from areal.errors import NoCapacity
from areal.reconcilers.components import Action, Component, Decision, decide, inference_part
from areal.reconcilers.desired import Target
from areal.reconcilers.inference_service import (
    Findings,
    ServiceView,
    erase,
    note,
    start_component,
)
from areal.reconcilers.observed import Observed, ObservedRun, RouteTable
from areal.reconcilers.plan import Drift, PlanBuilder, Verb
from areal.resources.model import ModelSpec

ENGINE_FIELDS = ("backend", "path", "engineArgs", "env", "envFrom", "resources", "lora")
PROXY_FIELDS = ("tokenizerPath", "chatTemplate", "toolCallParser", "reasoningParser", "proxyArgs", "external")


@dataclass(frozen=True)
class Policy:
    """What the caller allows. ``free_gpus`` is what can be leased before this plan begins."""

    allow_downtime: bool = False
    free_gpus: int = 0
    grace_s: float | None = None


@dataclass(frozen=True)
class Replica:
    """One slot: what is to be done about its engine (None: external) and its data proxy."""

    index: int
    engine: Decision | None
    proxy: Decision
    engine_component: Component | None
    proxy_component: Component

    @property
    def replaced(self) -> bool:
        engine = self.engine is not None and self.engine.action is Action.REPLACE
        return engine or self.proxy.action is Action.REPLACE

    @property
    def routed_now(self) -> str:
        """The uid of the data proxy that serves this slot today, "" when none does."""
        alive = self.proxy.run is not None and self.proxy.run.is_live
        return self.proxy.run.uid if alive and self.proxy.run else ""


@dataclass
class _Building:
    """The working state of one model's plan: ``routed`` is the route set as it will be after the ops so far."""

    build: PlanBuilder
    target: Target
    spec: ModelSpec
    service: ServiceView
    observed: Observed
    findings: Findings
    policy: Policy
    recorded: tuple[int, ...]
    count: int
    routes_only: bool = False
    routed: list[str] = field(default_factory=list)

    @property
    def ref(self) -> str:
        return self.target.ref

    @property
    def name(self) -> str:
        return self.target.object.name


def replica_count(spec: ModelSpec) -> int:
    """``replicas``, else the backend's data-parallel dimension, else 1. An external model has one data proxy."""
    if spec.external is not None:
        return 1
    if spec.replicas is not None:
        return spec.replicas
    return inference_part(spec.backend).data if spec.backend else 1


def gpus_per_replica(spec: ModelSpec) -> int:
    """``resources.gpus``; else tensor x pipeline for engines that need GPUs; the embedded engine asks for none."""
    if spec.external is not None:
        return 0
    if spec.resources.gpus is not None:
        return spec.resources.gpus
    part = inference_part(spec.backend or "embedded")
    return 0 if part.engine == "embedded" else part.devices_per_replica


def plan_model(
    build: PlanBuilder,
    target: Target,
    spec: ModelSpec,
    service: ServiceView,
    observed: Observed,
    findings: Findings,
    policy: Policy,
    recorded: tuple[int, ...],
    *,
    routes_only: bool = False,
) -> None:
    """Ops for one model. ``routes_only``: a neighbour, whose processes are left alone and whose routes are kept."""
    count = 0 if spec.suspend or service.suspended else replica_count(spec)
    work = _Building(build, target, spec, service, observed, findings, policy, recorded, count, routes_only)
    replicas = [_replica(work, index) for index in range(count)]
    extras = [] if routes_only else _extras(work, replicas)
    if routes_only:
        replicas = [_left_alone(replica) for replica in replicas]
    table = service.table if isinstance(service.table, RouteTable) else None
    work.routed = [uid for replica in replicas if (uid := replica.routed_now)] + [
        run.uid for run in extras if run.state.spec.component == "data-proxy"
    ]
    _check_gpus(work, replicas)
    fresh_ready, fresh = _bring_up(work, [replica for replica in replicas if not replica.replaced])
    last = _route_fresh(work, replicas, fresh, fresh_ready, table)
    last = _replace_all(work, [replica for replica in replicas if replica.replaced], last)
    last = _remove_extras(work, extras, last)
    _settle(work, last)


def _components(work: _Building, index: int) -> tuple[Component | None, Component]:
    sparse = work.target.object.spec
    restarted = str(work.target.object.status.get("restartedAt", ""))
    inputs = {"restartedAt": restarted} if restarted else {}
    proxy = Component(work.ref, "data-proxy", index, "Model", sparse, PROXY_FIELDS, inputs)
    if work.spec.external is not None:
        return None, proxy
    return Component(work.ref, "engine", index, "Model", sparse, ENGINE_FIELDS, inputs), proxy


def _replica(work: _Building, index: int) -> Replica:
    engine_component, proxy_component = _components(work, index)
    engine = None
    if engine_component is not None:
        engine = decide(engine_component, work.observed.of(work.ref, "engine", index))
        _note(work, engine_component, engine)
        if engine.run is not None and engine.action in (Action.KEEP, Action.AWAIT, Action.KICK):
            inputs = {**proxy_component.inputs, "engineUrl": engine.run.url}
            proxy_component = Component(
                work.ref, "data-proxy", index, "Model", proxy_component.spec, PROXY_FIELDS, inputs
            )
    proxy = decide(proxy_component, work.observed.of(work.ref, "data-proxy", index))
    engine_restarts = engine is not None and engine.action in (Action.KICK, Action.SPAWN, Action.AWAIT)
    if not (engine_restarts and proxy.action is Action.AWAIT):
        _note(work, proxy_component, proxy)
    if engine is not None and engine.action is Action.REPLACE and proxy.run is not None and proxy.run.is_live:
        proxy = Decision(Action.REPLACE, engine.cause, proxy.run, decided_by=engine.decided_by)
    return Replica(index, engine, proxy, engine_component, proxy_component)


def _note(work: _Building, component: Component, decision: Decision) -> None:
    if not work.routes_only:
        note(work.findings, component, decision)


def _left_alone(replica: Replica) -> Replica:
    """The same slot with nothing to be done about its processes."""
    engine = Decision(Action.LEAVE, run=replica.engine.run) if replica.engine is not None else None
    proxy = Decision(Action.LEAVE, run=replica.proxy.run)
    return Replica(replica.index, engine, proxy, replica.engine_component, replica.proxy_component)


def _extras(work: _Building, replicas: Sequence[Replica]) -> list[ObservedRun]:
    """Live runs that no slot wants: scaled away, suspended, or left by an interrupted replacement."""
    wanted = {
        decision.run.uid
        for replica in replicas
        for decision in (replica.engine, replica.proxy)
        if decision is not None and decision.run is not None
    }
    if any(run.state.phase.value == "unknown" for run in work.observed.of(work.ref)):
        return []
    return [run for run in work.observed.of(work.ref) if run.is_live and run.uid not in wanted]


def _check_gpus(work: _Building, replicas: Sequence[Replica]) -> None:
    """Refuse, before anything starts, what the machine cannot hold at the plan's worst point."""
    need = gpus_per_replica(work.spec)
    if not need:
        return
    fresh = sum(1 for r in replicas if r.engine is not None and r.engine.action is Action.SPAWN)
    if fresh * need > work.policy.free_gpus:
        raise NoCapacity(
            f"{work.ref} needs {fresh * need} GPUs for {fresh} new replicas; {work.policy.free_gpus} are free",
            hint="areal get processes -o wide shows who holds the GPUs; lower spec.replicas or stop something",
        )


def _bring_up(work: _Building, replicas: Sequence[Replica]) -> tuple[tuple[int, ...], list[str]]:
    """Start what is missing in the slots that need no replacement; (ready ops, data proxies that were started)."""
    ready: list[int] = []
    started: list[str] = []
    for replica in replicas:
        engine_run = ""
        engine_ready: tuple[int, ...] = ()
        if replica.engine is not None and replica.engine_component is not None:
            engine_run, engine_ready = _tend(work, replica.engine_component, replica.engine)
        proxy_run, waited = _tend(work, replica.proxy_component, replica.proxy, engine_run, engine_ready)
        ready += (*engine_ready, *waited)
        if replica.proxy.action is Action.SPAWN:
            started.append(proxy_run)
    return tuple(ready), started


def _tend(
    work: _Building,
    component: Component,
    decision: Decision,
    engine_run: str = "",
    after: tuple[int, ...] = (),
) -> tuple[str, tuple[int, ...]]:
    run = decision.run.uid if decision.run else ""
    if decision.action in (Action.KEEP, Action.LEAVE):
        return run, ()
    if decision.action is Action.AWAIT:
        waited = work.build.add(
            Verb.AWAIT, work.ref, component.target, decision.cause, needs=(*work.recorded, *after), run=run
        )
        return run, (waited,)
    runs = work.observed.of(work.ref, component.name, component.replica)
    args = {"engine": engine_run} if engine_run else {}
    return start_component(work.build, component, decision, runs, work.recorded, args, after)


def _route_fresh(
    work: _Building,
    replicas: Sequence[Replica],
    fresh: list[str],
    ready: tuple[int, ...],
    table: RouteTable | None,
) -> tuple[int, ...]:
    """Publish the whole set at once when it is ready: new replicas, or routes that the router lost."""
    kept = list(work.routed)
    work.routed = [*kept, *fresh]
    if not work.routed or not work.service.router:
        return ready
    cause = _route_cause(work, kept, fresh, table)
    if not cause:
        return ready
    warmed = ready
    for run in fresh:
        index = run.rsplit("/", 1)[1]
        warm = work.build.add(Verb.WARM, work.ref, f"data-proxy/{index}", "before it is routed", needs=ready, run=run)
        warmed = (*warmed, warm)
    return (_route(work, cause, (*warmed, *work.service.router_ready)),)


def _route_cause(work: _Building, kept: list[str], fresh: list[str], table: RouteTable | None) -> str:
    if fresh:
        return "new replicas are ready"
    if isinstance(work.service.table, str):
        return ""
    known = {worker: state for worker, _, state in table.models.get(work.name, ())} if table else {}
    missing = [uid for uid in kept if uid not in known]
    extra = [worker for worker in known if worker not in kept]
    draining = [uid for uid in kept if known.get(uid) == "draining"]
    if missing:
        message = f"{len(missing)} of {len(kept)} replicas are not in the router's table"
        work.findings.drift.append(Drift(work.ref, "route-missing", "routes", message))
        return f"route-missing: {message}"
    if extra:
        message = f"the router knows workers that are not ours: {', '.join(sorted(extra))}"
        work.findings.drift.append(Drift(work.ref, "route-extra", "routes", message))
        return f"route-extra: {message}"
    return "a drain was interrupted" if draining else ""


def _route(work: _Building, cause: str, needs: Sequence[int]) -> int:
    return work.build.add(
        Verb.ROUTE,
        work.ref,
        "routes",
        cause,
        needs=needs,
        runs=tuple(work.routed),
        args={
            "service": work.service.ref,
            "router": work.service.router,
            "expected": min(work.count, len(work.routed)),
        },
    )


def _replace_all(work: _Building, replicas: Sequence[Replica], last: tuple[int, ...]) -> tuple[int, ...]:
    if not replicas:
        return last
    strategy = work.spec.strategy or work.service.spec.strategy
    if strategy.type == "Recreate":
        _downtime(work, f"all {len(replicas)} replicas stop before their successors start (strategy Recreate)")
        return _recreate(work, replicas, last)
    if strategy.type == "BlueGreen":
        _require_room(work, len(replicas))
        return _surge(work, replicas, last)
    size = _surge_size(work, len(replicas))
    for begin in range(0, len(replicas), max(size, 1)):
        batch = replicas[begin : begin + max(size, 1)]
        last = _surge(work, batch, last) if size else _recreate(work, batch, last)
    return last


def _surge_size(work: _Building, replaced: int) -> int:
    """How many new replicas may run beside the old ones; 0: the old one has to go first."""
    strategy = work.spec.strategy or work.service.spec.strategy
    wish = 1 if strategy.max_surge in (None, "auto") else int(strategy.max_surge)
    need = gpus_per_replica(work.spec)
    new_engines = need and any(True for _ in range(replaced))
    if not new_engines or work.policy.free_gpus >= need:
        room = work.policy.free_gpus // need if need else wish
        return max(1, min(wish or 1, room))
    if work.count >= 2:
        _downtime(work, f"capacity during the rollout is {work.count - 1}/{work.count}: no spare GPU")
        return 0
    if not work.policy.allow_downtime:
        raise NoCapacity(
            f"{work.ref}: a rolling update of one replica needs {need} spare GPUs; {work.policy.free_gpus} are free",
            hint="use strategy: {type: Recreate} or --allow-downtime to stop the old replica first",
        )
    _downtime(work, "the only replica stops before its successor starts (--allow-downtime)")
    return 0


def _require_room(work: _Building, replaced: int) -> None:
    need = gpus_per_replica(work.spec) * replaced
    if need > work.policy.free_gpus:
        raise NoCapacity(
            f"{work.ref}: blue-green needs {need} spare GPUs for a second set; {work.policy.free_gpus} are free",
            hint="use strategy: {type: Rolling}",
        )


def _downtime(work: _Building, sentence: str) -> None:
    work.findings.destructive.append(f"{work.ref}: {sentence}")


def _successor(work: _Building, replica: Replica, needs: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
    """Start the new engine (where the engine changes) and its data proxy; (the proxy, ops after which it is warm)."""
    engine_run = ""
    ready: tuple[int, ...] = ()
    if replica.engine is not None and replica.engine_component is not None:
        runs = work.observed.of(work.ref, "engine", replica.index)
        if replica.engine.action is Action.REPLACE:
            engine_run, ready = start_component(
                work.build, replica.engine_component, replica.engine, runs, needs, {"successor": True}
            )
        else:
            engine_run, ready = _tend(work, replica.engine_component, replica.engine)
    args = {"engine": engine_run, "successor": True} if engine_run else {"successor": True}
    runs = work.observed.of(work.ref, "data-proxy", replica.index)
    proxy_run, proxy_ready = start_component(
        work.build, replica.proxy_component, replica.proxy, runs, needs, args, ready
    )
    warm = work.build.add(
        Verb.WARM,
        work.ref,
        replica.proxy_component.target,
        "before it is routed",
        needs=(*ready, *proxy_ready),
        run=proxy_run,
    )
    return proxy_run, (warm,)


def _surge(work: _Building, batch: Sequence[Replica], last: tuple[int, ...]) -> tuple[int, ...]:
    """New beside old: start, warm, route in, soak, then drain and stop the old ones."""
    warmed: tuple[int, ...] = ()
    new: list[str] = []
    needs = last or work.recorded
    for replica in batch:
        run, warm = _successor(work, replica, needs)
        new.append(run)
        warmed = (*warmed, *warm)
    cause = batch[0].proxy.cause or "replaced"
    retired = [uid for replica in batch if (uid := replica.routed_now)]
    strategy = work.spec.strategy or work.service.spec.strategy
    switched = strategy.type == "BlueGreen"  # one table change: from then on only the new set is picked
    work.routed = [*(uid for uid in work.routed if not switched or uid not in retired), *new]
    routed = _route(work, f"successors are warm: {cause}", (*warmed, *last, *work.service.router_ready))
    soak_s = max(strategy.min_ready_seconds, strategy.keep_old_seconds if switched else 0.0)
    if soak_s:
        args = {"seconds": soak_s}
        routed = work.build.add(
            Verb.SOAK, work.ref, "routes", "must stay ready", needs=(routed,), runs=tuple(new), args=args
        )
    drained = _drain(work, retired, (routed,), f"replaced: {cause}")
    if not switched:
        work.routed = [uid for uid in work.routed if uid not in retired]
        drained = (_route(work, "the old ones are drained", drained),)
    return _retire(work, batch, drained, f"replaced: {cause}")


def _recreate(work: _Building, batch: Sequence[Replica], last: tuple[int, ...]) -> tuple[int, ...]:
    """Old before new: drain, stop, start. There is no room for both, or the user asked for it."""
    retired = [uid for replica in batch if (uid := replica.routed_now)]
    cause = f"makes room: {batch[0].proxy.cause}"
    drained = _drain(work, retired, last or work.recorded, cause)
    work.routed = [uid for uid in work.routed if uid not in retired]
    gone = (_route(work, cause, (*drained, *work.service.router_ready)),) if work.service.router else drained
    stopped = _retire(work, batch, gone, cause)
    warmed: tuple[int, ...] = ()
    for replica in batch:
        run, warm = _successor(work, replica, stopped)
        work.routed.append(run)
        warmed = (*warmed, *warm)
    return (_route(work, "successors are warm", (*warmed, *work.service.router_ready)),)


def _drain(work: _Building, proxies: Sequence[str], needs: Sequence[int], cause: str) -> tuple[int, ...]:
    strategy = work.spec.strategy or work.service.spec.strategy
    args = {
        "service": work.service.ref,
        "router": work.service.router,
        "seconds": strategy.drain_timeout_seconds,
    }
    return tuple(
        work.build.add(Verb.DRAIN, work.ref, "data-proxy", cause, needs=needs, run=uid, args=args) for uid in proxies
    ) or tuple(needs)


def _retire(work: _Building, batch: Sequence[Replica], needs: tuple[int, ...], cause: str) -> tuple[int, ...]:
    """Stop the old data proxies, then the old engines."""
    last = needs
    for part in ("proxy", "engine"):
        stops = []
        for replica in batch:
            decision = replica.proxy if part == "proxy" else replica.engine
            if decision is None or decision.action is not Action.REPLACE or decision.run is None:
                continue
            name = "data-proxy" if part == "proxy" else "engine"
            stops.append(
                work.build.add(Verb.STOP, work.ref, f"{name}/{replica.index}", cause, needs=last, run=decision.run.uid)
            )
        last = tuple(stops) or last
    return last


def _remove_extras(work: _Building, extras: Sequence[ObservedRun], last: tuple[int, ...]) -> tuple[int, ...]:
    if not extras:
        return last
    cause = _extra_cause(work)
    proxies = [run.uid for run in extras if run.state.spec.component == "data-proxy"]
    needs = last or work.recorded
    if proxies and work.service.router and not isinstance(work.service.table, str):
        table = work.service.table
        known = {worker for worker, _, _ in table.models.get(work.name, ())} if table else set()
        drained = _drain(work, [uid for uid in proxies if uid in known], needs, cause)
        work.routed = [uid for uid in work.routed if uid not in proxies]
        if work.routed:
            needs = (_route(work, cause, drained),)
        else:
            args = {"service": work.service.ref, "router": work.service.router}
            needs = (work.build.add(Verb.UNROUTE, work.ref, "routes", cause, needs=drained, args=args),)
    for name in ("data-proxy", "engine"):
        needs = (
            tuple(
                work.build.add(Verb.STOP, work.ref, f"{name}/{run.state.spec.replica}", cause, needs=needs, run=run.uid)
                for run in extras
                if run.state.spec.component == name
            )
            or needs
        )
    return needs


def _extra_cause(work: _Building) -> str:
    if work.spec.suspend or work.service.suspended:
        return "suspended"
    return f"scaled to {work.count}"


def _settle(work: _Building, last: tuple[int, ...]) -> None:
    """The model is visible where users ask for it: at the gateway."""
    changed = [op for op in work.build.ops() if op.ref == work.ref and op.verb in (Verb.ROUTE, Verb.AWAIT)]
    if not changed or not work.routed or not work.count:
        return
    needs = (*(op.id for op in changed), *last, *work.service.gateway_ready, *work.service.router_ready)
    work.build.add(
        Verb.SETTLE, work.ref, "routes", "users ask the gateway", needs=needs, args={"service": work.service.ref}
    )


def plan_model_end(
    build: PlanBuilder,
    target: Target,
    service: ServiceView | None,
    observed: Observed,
    policy: Policy,
    needs: tuple[int, ...],
) -> tuple[int, ...]:
    """Delete: drain and unroute while the service lives on, then stop, forget, erase."""
    cause = target.cause or ("pruned" if target.action == "prune" else "deleted")
    runs = [run for run in observed.of(target.ref) if run.is_live or run.leaves_session]
    last = needs
    if service is not None and service.router and not service.gone:
        args = {"service": service.ref, "router": service.router}
        seconds = service.spec.strategy.drain_timeout_seconds if policy.grace_s is None else policy.grace_s
        drains = tuple(
            build.add(
                Verb.DRAIN, target.ref, "data-proxy", cause, needs=last, run=run.uid, args={**args, "seconds": seconds}
            )
            for run in runs
            if run.state.spec.component == "data-proxy" and run.is_live
        )
        last = (build.add(Verb.UNROUTE, target.ref, "routes", cause, needs=drains or last, args=args),)
    grace = {} if policy.grace_s is None else {"graceSeconds": policy.grace_s}
    for name in ("data-proxy", "engine"):
        last = (
            tuple(
                build.add(
                    Verb.STOP,
                    target.ref,
                    f"{name}/{run.state.spec.replica}",
                    cause,
                    needs=last,
                    run=run.uid,
                    args=grace,
                )
                for run in runs
                if run.state.spec.component == name
            )
            or last
        )
    return (erase(build, target, observed, last),)
