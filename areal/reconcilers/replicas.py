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
ENGINE_FIELDS = ("backend", "path", "engineArgs", "env", "envFrom", "resources", "lora")
PROXY_FIELDS = (
    *("backend", "path", "external"),
    *("tokenizerPath", "chatTemplate", "toolCallParser", "reasoningParser", "proxyArgs"),
)


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


@dataclass(frozen=True)
class Replica:
    """One slot: what is to be done about its engine (None: external) and its data proxy."""

    index: int
    engine: Decision | None
    proxy: Decision
    engine_component: Component | None
    proxy_component: Component

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
    if engine is not None and engine.action is Action.REPLACE and proxy.run is not None and proxy.run.is_live:
        proxy = Decision(Action.REPLACE, engine.cause, proxy.run, decided_by=engine.decided_by)
    return Replica(index, engine, proxy, engine_component, proxy_component)


def _components(
    target: Target, spec: ModelSpec, service: InferenceServiceSpec, index: int
) -> tuple[Component | None, Component]:
    sparse = target.object.spec
    restarted = str(target.object.status.get("restartedAt", ""))
    inputs = {**({"restartedAt": restarted} if restarted else {}), **key_input(service)}
    proxy = Component(target.ref, PROXY, index, "Model", sparse, PROXY_FIELDS, inputs)
    if spec.external is not None:
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


def extras_of(runs: Sequence[ObservedRun], replicas: Iterable[Replica]) -> Extras:
    """Runs to stop: scaled away, suspended, left by an interrupted replacement. Where some run of the model cannot be
    seen none is: what looks superfluous from here may be all that serves."""
    decisions = [decision for replica in replicas for decision in replica.decisions]
    wanted = {decision.run.uid for decision in decisions if decision.run is not None}
    if unseen(runs):
        return Extras()
    found = [run for run in runs if run.is_live and run.uid not in wanted]
    gone = {run.uid for run in found}
    still_called = {
        str(run.state.spec.inputs.get("engineUrl"))
        for run in runs
        if run.state.spec.component == PROXY and run.is_live and run.uid not in gone
    }
    late = tuple(run for run in found if run.state.spec.component == ENGINE and run.url in still_called)
    return Extras(tuple(run for run in found if run not in late), late)
