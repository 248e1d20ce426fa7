"""Plan an AgentService: a router and a gateway of its own, and pairs of (worker, data proxy) behind them. Pure.

A pair corresponds to a replica of a Model: it is started, routed, drained and replaced in the same way. Session
settings are changed in running data proxies.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from areal.reconcilers.desired import Target
from areal.reconcilers.kinds.replica_plan import close_replicas, open_replicas, settle, stop_replicas
from areal.reconcilers.kinds.replicas import PROXY, ReplicaWork
from areal.reconcilers.kinds.service_plan import ServicePlan, ServiceView, called_first, called_inputs, inference_inputs
from areal.reconcilers.observe import ObservedRun
from areal.reconcilers.plan import Verb
from areal.reconcilers.planning import Action, Planning
from areal.resources.addresses import base_url
from areal.resources.agent_spec import AgentServiceSpec
from areal.resources.kinds import service_ref
from areal.resources.specs import InferenceServiceSpec
from areal.runtime.backends import LOCAL
from areal.runtime.backends.base import RunState
from areal.state.records import StoredObject
from areal.wire.agents import ConfigureSessions
from areal.wire.routing import Readiness

WORKER = "worker"
WORKER_FIELDS = ("agent", "kwargs", "command", "tools", "env", "envFrom", "workingDir", "logLevel", "auth", "scheduler")
PROXY_FIELDS = ("inference", "logLevel", "auth", "scheduler")


def readiness_of(spec: AgentServiceSpec) -> Readiness:
    """Return the router's probe settings for the data proxies."""
    return Readiness(period_seconds=spec.health_poll_seconds)


def session_settings(spec: AgentServiceSpec) -> dict[str, Any]:
    """Return the settings that data proxies accept while they run (``ConfigureSessions``)."""
    return {
        "idle_timeout": spec.session.idle_timeout_seconds,
        "turn_timeout": spec.session.turn_timeout_seconds,
        "max_concurrent": spec.session.max_concurrent_per_pair,
        "health_period": spec.health_poll_seconds,
    }


def with_callers_of(
    targets: Sequence[Target], stored: Iterable[StoredObject], states: Iterable[RunState]
) -> tuple[Target, ...]:
    """Return ``targets``, and the agent services whose processes have an outdated address or key of an inference
    service among ``targets``."""
    chosen = {target.ref: target for target in targets}
    recorded: dict[str, list[Mapping[str, object]]] = {}
    for run in map(ObservedRun, states):
        if run.is_live and "inferenceUrl" in run.state.spec.inputs:
            recorded.setdefault(run.state.spec.owner, []).append(run.state.spec.inputs)
    for item in stored:
        ref, target = str(item.ref), chosen.get(service_ref(item.spec.get("inference") or {}))
        if ref not in recorded or ref in chosen or target is None or target.is_deleted:
            continue
        spec: InferenceServiceSpec = target.spec
        if spec.scheduler.type != LOCAL:
            continue  # known when it is placed
        now = inference_inputs(spec, base_url(spec.gateway.host, spec.gateway.port))
        if any(inputs.get(name) != value for inputs in recorded[ref] for name, value in now.items()):
            chosen[ref] = Target(item, "unchanged")
    return tuple(chosen.values())


class PairWork(ReplicaWork):
    components = (WORKER, PROXY)
    engine_name = WORKER
    engine_input = "workerUrl"
    engine_fields = WORKER_FIELDS
    proxy_fields = PROXY_FIELDS

    spec: AgentServiceSpec

    def __post_init__(self) -> None:
        spec = self.spec
        self.name, self.suspended = self.target.object.name, spec.suspend
        self.count = 0 if spec.suspend else spec.pairs
        self.strategy, self.drain_s = spec.strategy, spec.drain_timeout_seconds

    @property
    def service(self) -> ServiceView:
        view: ServiceView = self.planning.views[self.ref]
        return view

    @property
    def readiness(self) -> Readiness:
        return readiness_of(self.spec)

    @property
    def proxy_inputs(self) -> Mapping[str, str]:
        """The inputs from the inference service that the agents call; empty if the plan does not know it."""
        return called_inputs(self.planning, self.spec)

    @property
    def before_start(self) -> tuple[int, ...]:
        return (*self.recorded, *called_first(self, self.spec.inference))

    def configure_sessions(self) -> None:
        """Send changed session settings to data proxies that keep running."""
        wanted = session_settings(self.spec)
        for replica in self.replicas:
            run = replica.proxy.run
            if run is None or replica.proxy.action is not Action.KEEP:
                continue
            other = {name: value for name, value in wanted.items() if run.settings.get(name, value) != value}
            if other:
                target, args = replica.proxy_component.target, ConfigureSessions(**other)
                self.build.add(
                    Verb.CONFIGURE, self.ref, target, "settings changed", needs=self.recorded, run=run.uid, args=args
                )


class AgentServicePlan(ServicePlan):
    def __init__(self, planning: Planning, kind: str) -> None:
        super().__init__(planning, kind)
        self._pairs: list[PairWork] = []

    def declared(self, ref: str) -> frozenset[str]:
        return frozenset({ref.partition("/")[2]})

    def drain(self) -> None:
        """Stop everything except the router before the services that its agents call."""
        super().drain()
        planning = self.planning
        for target in self.deleted:
            gateway = planning.views[target.ref].gateway_stopped
            stopped = stop_replicas(PairWork(planning, target), gateway)
            planning.ended[target.ref] = stopped
            planning.drained[target.ref] = (*gateway, *stopped)

    def open(self) -> None:
        super().open()
        for target in self.staying:
            work = PairWork(self.planning, target, routes_only=target.ref not in self.planning.scope.requested)
            open_replicas(work)
            self._pairs.append(work)

    def close(self) -> None:
        super().close()
        for work in self._pairs:
            with self.planning.healing(work.target):
                close_replicas(work)
            work.configure_sessions()
            settle(work)
