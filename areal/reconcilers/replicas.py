"""A Model's replicas: how many, of what size, and what is to be done about each slot's engine and data proxy. Pure.

A replica's data proxy names its engine by URL, and a replaced process keeps its port where it can, so an engine that
died comes back under a data proxy that never noticed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from areal.reconcilers.components import Action, Component, Decision, decide, inference_part, key_input
from areal.reconcilers.desired import Target
from areal.reconcilers.findings import Findings
from areal.reconcilers.observed import Observed, ObservedRun, Seen
from areal.reconcilers.processes import unseen
from areal.resources.inference_service import InferenceServiceSpec
from areal.resources.model import ModelSpec

ENGINE, PROXY = "engine", "data-proxy"
ENGINE_FIELDS = ("backend", "path", "revision", "engineArgs", "env", "envFrom", "resources", "lora")
PROXY_FIELDS = (
    *("backend", "path", "revision", "external", "engineUrl", "engineApiKeyFrom"),
    *("tokenizerPath", "chatTemplate", "toolCallParser", "reasoningParser", "proxyArgs"),
)


def replica_count(spec: ModelSpec) -> int:
    """``replicas``, else the backend's data-parallel dimension, else 1. A model without an engine of ours has one data
    proxy."""
    if not spec.starts_engine:
        return 1
    if spec.replicas is not None:
        return spec.replicas
    return inference_part(spec.backend).data if spec.backend else 1


def gpus_per_replica(spec: ModelSpec) -> int:
    """``resources.gpus``; else tensor x pipeline for engines that need GPUs; the embedded engine asks for none."""
    if not spec.starts_engine:
        return 0
    if spec.resources.gpus is not None:
        return spec.resources.gpus
    part = inference_part(spec.backend or "embedded")
    return 0 if part.engine == "embedded" else part.devices_per_replica


@dataclass(frozen=True)
class Replica:
    """One slot: what is to be done about its engine (None: not ours) and its data proxy. ``callers`` are surplus
    data proxies of an engine that is to be replaced: they go when it goes."""

    index: int
    engine: Decision | None
    proxy: Decision
    engine_component: Component | None
    proxy_component: Component
    callers: tuple[ObservedRun, ...] = ()

    @property
    def decisions(self) -> tuple[Decision, ...]:
        return (self.proxy,) if self.engine is None else (self.engine, self.proxy)

    @property
    def replaced(self) -> bool:
        return any(decision.action is Action.REPLACE for decision in self.decisions)

    @property
    def new_engine(self) -> bool:
        """Whether an engine will be started, and so GPUs are needed."""
        return self.engine is not None and self.engine.action in (Action.SPAWN, Action.REPLACE)

    @property
    def old_proxies(self) -> tuple[ObservedRun, ...]:
        """Data proxies to drain and stop when this slot is replaced."""
        own = (self.proxy.run,) if self.proxy.action is Action.REPLACE and self.proxy.run is not None else ()
        return (*own, *self.callers)

    @property
    def old_engine(self) -> ObservedRun | None:
        replaced = self.engine is not None and self.engine.action is Action.REPLACE
        return self.engine.run if replaced and self.engine is not None else None

    @property
    def live_proxy(self) -> ObservedRun | None:
        return self.proxy.run if self.proxy.run is not None and self.proxy.run.is_live else None

    @property
    def serves(self) -> bool:
        """Whether requests are answered by this slot today."""
        return self.live_proxy is not None and self.live_proxy.seen is Seen.READY


def read_replica(
    target: Target,
    spec: ModelSpec,
    service: InferenceServiceSpec,
    observed: Observed,
    findings: Findings,
    index: int,
) -> Replica:
    """Decide about one slot; drift goes to ``findings``."""
    ref = target.ref
    engine_component, proxy_component = _components(target, spec, service, index)
    engine = None
    if engine_component is not None:
        engine = decide(engine_component, observed.of(ref, ENGINE, index))
        findings.note(engine_component, engine)
        if engine.run is not None and engine.action in (Action.KEEP, Action.AWAIT, Action.KICK):
            inputs = {**proxy_component.inputs, "engineUrl": engine.run.url}
            proxy_component = replace(proxy_component, inputs=inputs)
    proxy = decide(proxy_component, observed.of(ref, PROXY, index))
    engine_restarts = engine is not None and engine.action in (Action.KICK, Action.SPAWN, Action.AWAIT)
    if not (engine_restarts and proxy.action is Action.AWAIT):
        findings.note(proxy_component, proxy)
    if engine is not None:
        proxy = _behind(engine, proxy)
        if proxy.action is Action.LEAVE and engine.action is Action.REPLACE:
            engine = Decision(Action.DEFER, "its data proxy cannot be seen", engine.run)
    return Replica(index, engine, proxy, engine_component, proxy_component)


def _behind(engine: Decision, proxy: Decision) -> Decision:
    """What to do about a data proxy, given what happens to its engine."""
    if engine.action is Action.SPAWN and proxy.action in (Action.AWAIT, Action.KICK):
        return Decision(Action.DEFER, "its engine has to start first", proxy.run)
    if engine.action is Action.LEAVE and proxy.action is not Action.KEEP:
        return Decision(Action.DEFER, "its engine cannot be seen", proxy.run)
    if engine.action is Action.REPLACE and proxy.run is not None and proxy.run.is_live:
        return Decision(Action.REPLACE, engine.cause, proxy.run, decided_by=engine.decided_by)
    return proxy


def not_replaced(slot: Replica) -> Replica:
    """The same slot when nothing may be replaced now: outdated processes are left as they are."""
    engine, proxy = slot.engine, slot.proxy
    if proxy.action is Action.REPLACE:
        proxy = Decision(Action.LEAVE, proxy.cause, proxy.run)
    if engine is not None and engine.action is Action.REPLACE:
        engine = Decision(Action.LEAVE, engine.cause, engine.run)
        proxy = _behind(engine, proxy)
    return replace(slot, engine=engine, proxy=proxy, callers=())


def _components(
    target: Target, spec: ModelSpec, service: InferenceServiceSpec, index: int
) -> tuple[Component | None, Component]:
    sparse = target.object.spec
    restarted = str(target.object.status.get("restartedAt", ""))
    inputs = {**({"restartedAt": restarted} if restarted else {}), **key_input(service)}
    proxy = Component(target.ref, PROXY, index, "Model", sparse, PROXY_FIELDS, inputs)
    if not spec.starts_engine:
        return None, proxy
    return Component(target.ref, ENGINE, index, "Model", sparse, ENGINE_FIELDS, inputs), proxy


@dataclass(frozen=True)
class Extras:
    """Runs that no slot wants. ``late`` are engines behind a data proxy that is only about to be replaced."""

    early: tuple[ObservedRun, ...] = ()
    late: tuple[ObservedRun, ...] = ()

    @property
    def all(self) -> tuple[ObservedRun, ...]:
        return (*self.early, *self.late)


def with_callers(replicas: Sequence[Replica], runs: Sequence[ObservedRun]) -> list[Replica]:
    """The same slots, each with the surplus data proxies of the engine that it is about to lose."""
    free = [run for run in _surplus(runs, replicas) if run.state.spec.component == PROXY]
    return [
        replace(slot, callers=tuple(run for run in free if calls(run, slot.old_engine))) if slot.old_engine else slot
        for slot in replicas
    ]


def calls(proxy: ObservedRun, engine: ObservedRun | None) -> bool:
    return engine is not None and proxy.state.spec.inputs.get("engineUrl") == engine.url


def extras_of(runs: Sequence[ObservedRun], replicas: Sequence[Replica]) -> Extras:
    """Runs to stop: scaled away, suspended, left by an interrupted replacement. Where some run of the model cannot be
    seen none is: what looks superfluous from here may be all that serves."""
    if unseen(runs):
        return Extras()
    callers = {run.uid for slot in replicas for run in slot.callers}
    found = [run for run in _surplus(runs, replicas) if run.uid not in callers]
    gone = {run.uid for run in found}
    calling = [run for run in runs if run.state.spec.component == PROXY and run.is_live and run.uid not in gone]
    late = tuple(
        run for run in found if run.state.spec.component == ENGINE and any(calls(proxy, run) for proxy in calling)
    )
    return Extras(tuple(run for run in found if run not in late), late)


def _surplus(runs: Sequence[ObservedRun], replicas: Iterable[Replica]) -> list[ObservedRun]:
    """Living runs that no slot has chosen."""
    decisions = [decision for replica in replicas for decision in replica.decisions]
    wanted = {decision.run.uid for decision in decisions if decision.run is not None}
    return [run for run in runs if run.is_live and run.uid not in wanted]
