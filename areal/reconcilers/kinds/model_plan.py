"""Plan a Model: its replicas behind its service's router. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property

from areal.reconcilers.desired import Target
from areal.reconcilers.kinds.replica_plan import close_replicas, end_replicas, open_replicas, settle
from areal.reconcilers.kinds.replicas import Replica, ReplicaWork
from areal.reconcilers.kinds.service_plan import ServiceView
from areal.reconcilers.plan import AwaitReady, Verb
from areal.reconcilers.planning import ENV_INPUT, KindPlan, Planning
from areal.resources.backend import inference_part
from areal.resources.kinds import service_ref
from areal.resources.specs import InferenceServiceSpec, ModelSpec
from areal.wire.routing import Readiness

ENGINE = "engine"
ENGINE_FIELDS = ("backend", "path", "revision", "engineArgs", "env", "envFrom", "resources", "lora")
PROXY_FIELDS = (
    *("backend", "path", "revision", "external", "engineUrl", "engineApiKeyFrom"),
    *("tokenizerPath", "chatTemplate", "toolCallParser", "reasoningParser", "proxyArgs"),
)


def replica_count(spec: ModelSpec) -> int:
    """Return ``replicas``, or else the backend's data-parallel dimension, or else 1. A model without an engine of ours
    has one data proxy."""
    if not spec.starts_engine:
        return 1
    if spec.replicas is not None:
        return spec.replicas
    return inference_part(spec.backend).data if spec.backend else 1


def gpus_per_replica(spec: ModelSpec) -> int:
    """Return ``resources.gpus``, or else tensor x pipeline for engines that need GPUs. The embedded engine has 1 with
    ``engineArgs.device: cuda``, else 0."""
    if not spec.starts_engine:
        return 0
    if spec.resources.gpus is not None:
        return spec.resources.gpus
    part = inference_part(spec.backend or "embedded")
    if part.engine == "embedded":
        return int(str(spec.engine_args.get("device", "")).startswith("cuda"))
    return part.devices_per_replica


def readiness_of(spec: ModelSpec) -> Readiness:
    """Return the router's probe settings for the data proxies."""
    return Readiness(**spec.probes.readiness.model_dump(by_alias=False))


class ModelWork(ReplicaWork):
    engine_name = ENGINE
    engine_input = "engineUrl"
    engine_fields = ENGINE_FIELDS
    proxy_fields = PROXY_FIELDS

    spec: ModelSpec

    def __post_init__(self) -> None:
        spec, service = self.spec, self.service.spec
        assert isinstance(service, InferenceServiceSpec)
        self.name = spec.served_model_name or self.target.object.name
        self.suspended = spec.suspend or service.suspend
        self.count = 0 if self.suspended else replica_count(spec)
        self.starts_engine, self.need = spec.starts_engine, gpus_per_replica(spec)
        strategy = self.strategy = spec.strategy or service.strategy
        self.max_unavailable, self.drain_s = strategy.max_unavailable, strategy.drain_timeout_seconds

    @cached_property
    def service(self) -> ServiceView:
        """The Model's service, with default settings where it is not recorded."""
        ref = service_ref(self.target.object.spec)
        view: ServiceView | None = self.planning.views.get(ref)
        return view or ServiceView(ref, InferenceServiceSpec())

    @property
    def trainer(self) -> str:
        """The job that trains the model and whose driver does not run yet. It starts when the model's processes run,
        and the model may wait for its weights."""
        spec, trainers = self.target.object.spec, self.planning.trainers
        service = spec.get("service", "default")
        found = [trainers[key] for key in ((service, None), (service, self.target.object.name)) if key in trainers]
        return min(found)[1] if found else ""

    @property
    def proxy_inputs(self) -> Mapping[str, str]:
        env = self.service.spec.env
        return {ENV_INPUT: json.dumps(env, sort_keys=True)} if env else {}

    @property
    def readiness(self) -> Readiness:
        return readiness_of(self.spec)

    def warm(self, replica: Replica, run: str, needs: Sequence[int]) -> tuple[int, ...]:
        """Request one completion from the data proxy before it is routed. An external endpoint is not warmed up:
        completions cost money there, and its readiness already shows that it answers."""
        if self.spec.external is not None:
            return tuple(needs)
        target = replica.proxy_component.target
        args = AwaitReady(trainer=self.trainer)
        return (self.build.add(Verb.WARM, self.ref, target, "before it is routed", needs=needs, run=run, args=args),)


class ModelPlan(KindPlan):
    """The plan of Models. Models that release GPUs are opened before those that take some."""

    def __init__(self, planning: Planning, kind: str) -> None:
        super().__init__(planning, kind)
        self._opened: list[ModelWork] = []

    def open(self) -> None:
        planning = self.planning
        for target in sorted(self.staying, key=self._gpu_growth):
            ref = service_ref(target.object.spec)
            service: ServiceView | None = planning.views.get(ref)
            if service is None or service.is_deleted:
                why = "cannot be read" if ref in planning.scope.unreadable else "is not recorded"
                planning.notes.unknown.append(f"{target.ref}: its service {ref} {why}")
                continue
            work = ModelWork(planning, target, routes_only=not {target.ref, service.ref} & planning.scope.requested)
            open_replicas(work)
            self._opened.append(work)

    def _gpu_growth(self, target: Target) -> tuple[int, str]:
        """Return the number of GPUs by which the model grows, and its name."""
        held = sum(len(run.state.spec.gpus) for run in self.planning.observed.of(target.ref, ENGINE) if run.is_live)
        spec: ModelSpec = target.spec
        service: ServiceView | None = self.planning.views.get(service_ref(target.object.spec))
        idle = spec.suspend or (service is not None and service.suspended)
        return (0 if idle else replica_count(spec) * gpus_per_replica(spec)) - held, target.object.name

    def end(self) -> None:
        planning = self.planning
        for target in self.targets:
            if (old := target.ending) is None:
                continue
            work = ModelWork(planning, old)
            erased = end_replicas(work, (*work.service.gateway_stopped, *planning.all_drained))
            if target.is_deleted:
                ref = work.service.ref
                planning.ended[ref] = (*planning.ended.get(ref, ()), erased)
            else:
                planning.record_again(target, erased)

    def close(self) -> None:
        for work in self._opened:
            with self.planning.healing(work.target):
                close_replicas(work)
            settle(work)

    def finish(self) -> None:
        """Do nothing: ended models were erased in ``end``."""
