"""The whole plan: every target's ops in dependency order. Pure: no I/O, no clock, no randomness.

Order: records first (an object is ours before its processes exist); services before models; within a service the
router, the gateway, the engines and the data proxies start side by side, then routes. A router that starts empty
learns at once what serves, and its relays that its table is whole; only then is anything taken away. Deletions run
the other way round: the gateway stops taking requests, models go, the router goes. Models that give GPUs back are
planned before those that take some.

An object of which a run cannot be seen is never deleted, and a model that only has to be healed and does not fit is
left as it is: both are *refused*, and the rest of the plan goes on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from areal.errors import NoCapacity
from areal.reconcilers.capacity import GpuPool
from areal.reconcilers.desired import Target
from areal.reconcilers.findings import Findings
from areal.reconcilers.inference_service import (
    ServicePlan,
    ServiceView,
    close_service,
    open_service,
    plan_service_end,
    plan_service_end_of_traffic,
)
from areal.reconcilers.job_phase import DRIVER, JobPhase, standing
from areal.reconcilers.model import ModelPlan, close_model, open_model, plan_model_end, settle
from areal.reconcilers.model_work import ModelWork, Policy
from areal.reconcilers.observed import Observed, ObservedRun, RouteTable
from areal.reconcilers.plan import ObjectPlan, Op, Plan, PlanBuilder, Refusal, Verb
from areal.reconcilers.processes import erase, slot_of, unseen
from areal.reconcilers.replicas import ENGINE, gpus_per_replica, replica_count
from areal.reconcilers.train_job import JobWork, plan_job, plan_job_end, plan_job_stop
from areal.resources.inference_service import InferenceServiceSpec
from areal.resources.kinds import KINDS, served_name
from areal.resources.model import ModelSpec
from areal.resources.registry import effective
from areal.resources.train_job import TrainJobSpec
from areal.resources.update import Update

_HOW = {
    Update.META: "recorded only",
    Update.HOT: "in place, no process restarts",
    Update.ROLL: "rolling update",
    Update.RECREATE: "processes are replaced",
    Update.IMMUTABLE: "deleted and created again",
}
_SERVICE, _MODEL, _JOB = "InferenceService", "Model", "TrainJob"
_HINT = "delete it where it runs"
_TO_START = (JobPhase.PENDING, JobPhase.STOPPED, JobPhase.LOST)


@dataclass(frozen=True)
class Scope:
    """``targets`` are asked for. ``context`` are stored neighbours: services that targets need, and models whose
    routes a restarted router would lose. Of the context, services are healed and models only routed."""

    targets: tuple[Target, ...]
    context: tuple[Target, ...] = ()

    @cached_property
    def all(self) -> tuple[Target, ...]:
        ordered = sorted((*self.targets, *self.context), key=lambda t: (KINDS[t.object.kind].order, t.object.name))
        return tuple(ordered)


def make_plan(
    scope: Scope,
    observed: Observed,
    policy: Policy,
    *,
    serial: int = 0,
    source: Mapping[str, Any] | None = None,
) -> Plan:
    """Everything that must be done so that reality agrees with ``scope.targets``. Raises NoCapacity."""
    return _Planning(scope, observed, policy).plan(serial, source or {})


@dataclass
class _Planning:
    scope: Scope
    observed: Observed
    policy: Policy
    build: PlanBuilder = field(default_factory=PlanBuilder)
    findings: Findings = field(default_factory=Findings)
    gpus: GpuPool = field(default_factory=GpuPool)
    recorded: dict[str, tuple[int, ...]] = field(default_factory=dict)
    services: dict[str, ServiceView] = field(default_factory=dict)
    fronts: list[ServicePlan] = field(default_factory=list)
    jobs_stopped: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def plan(self, serial: int, source: Mapping[str, Any]) -> Plan:
        self.gpus = GpuPool(self.policy.free_gpus)
        self._refuse_unseen()
        self._record_all()
        self._stop_jobs()
        ending = [target for target in self._of(_SERVICE) if target.gone]
        self._end_traffic(ending)
        for target in self._of(_SERVICE):
            if not target.gone:
                self._open_service(target)
        models = self._open_models()
        self._unroute_strangers()
        self._mark_synced()
        ended = self._end_models()
        for front in self.fronts:
            self.services[front.ref] = close_service(front, self.services[front.ref])
        for model in models:
            self._close_model(model)
        for target in ending:
            needs = (*self.services[target.ref].gateway_stopped, *ended.get(target.ref, ()))
            plan_service_end(self.build, target, self.observed, needs, self.policy.grace_s)
        self._plan_jobs()
        self._erase_plain()
        return self._finished(serial, source)

    def _of(self, kind: str) -> list[Target]:
        """Targets and neighbours of a kind that something may be done about."""
        return [t for t in self.scope.all if t.object.kind == kind and t.ref not in self.findings.refused]

    # -- refusals

    def _refuse_unseen(self) -> None:
        """What may be alive where nobody can look is not deleted, nor is what it hangs on."""
        gone = {target.ref: ending for target in self.scope.all if (ending := _ending(target)) is not None}
        for target in gone.values():
            self._refuse_hidden(target, unseen(self.observed.of(target.ref)))
            if target.object.kind == _MODEL:
                self._refuse_hidden(target, unseen(self.observed.of(_service_ref(target), "router")))
        models = [target for target in gone.values() if target.object.kind == _MODEL]
        for target in models:
            if target.ref in self.findings.refused and _service_ref(target) in gone:
                self._refuse(_service_ref(target), f"{target.ref} still belongs to it", _HINT)
        for target in models:
            if _service_ref(target) in self.findings.refused:
                self._refuse(target.ref, f"{_service_ref(target)} cannot be deleted", _HINT)

    def _refuse_hidden(self, target: Target, hidden: Sequence[ObservedRun]) -> None:
        for run in hidden[:1]:
            where = f"{run.state.spec.owner} {slot_of(run)}"
            hint = f"{_HINT}; if that place is gone for good, remove runs/{run.uid} from the areal home"
            self._refuse(target.ref, f"{where} cannot be seen: {run.state.reason}", hint)

    def _refuse(self, ref: str, why: str, hint: str) -> None:
        self.findings.refused.setdefault(ref, Refusal("unseen", f"{ref} is not deleted: {why}", hint))

    # -- records

    def _record_all(self) -> None:
        for target in self.scope.all:
            if target.action in ("create", "configure"):
                cause = "new object" if target.action == "create" else target.cause or _change_cause(target)
                self.recorded[target.ref] = (self.build.add(Verb.RECORD, target.ref, "", cause),)

    # -- services

    def _end_traffic(self, ending: Sequence[Target]) -> None:
        for target in ending:
            spec = _service_spec(target)
            grace_s = self.policy.drain_s(spec.strategy.drain_timeout_seconds)
            needs = self._all_jobs_stopped
            stopped = plan_service_end_of_traffic(self.build, target, self.observed, grace_s, needs)
            self.services[target.ref] = ServiceView(target.ref, spec, gone=True, gateway_stopped=stopped)

    def _open_service(self, target: Target) -> None:
        recorded = self.recorded.get(target.ref, ())
        front = ServicePlan(self.build, target, _service_spec(target), self.observed, self.findings, recorded)
        self.fronts.append(front)
        self.services[target.ref] = open_service(front)
        if target.action == "configure" and any(change.path.startswith("spec.auth.") for change in target.changes):
            self.findings.destructive.append(
                f"{target.ref}: the key changes; requests fail until every process has the new one"
            )

    # -- models

    def _work(self, target: Target, service: ServiceView) -> ModelWork:
        return ModelWork(
            self.build,
            target,
            effective(_MODEL, target.object.spec),
            service,
            self.observed,
            self.findings,
            self.policy,
            self.gpus,
            self.recorded.get(target.ref, ()),
            trainer=self._trainer_of(target),
        )

    def _trainer_of(self, model: Target) -> str:
        """The job that trains the model and whose driver does not run yet: it starts when the model's processes are
        there, and the model may wait for its weights."""
        service = model.object.spec.get("service", "default")
        found = [
            self._trainers[key] for key in ((service, None), (service, model.object.name)) if key in self._trainers
        ]
        return min(found)[1] if found else ""

    @cached_property
    def _trainers(self) -> dict[tuple[str, str | None], tuple[int, str]]:
        """Of each service and model (None: any of the service's) the first job that is to start: its place, its ref."""
        first: dict[tuple[str, str | None], tuple[int, str]] = {}
        for place, job in enumerate(self._of(_JOB)):
            spec: TrainJobSpec = effective(_JOB, job.object.spec)
            rollout = spec.rollout
            if job.gone or spec.suspend or rollout is None:
                continue
            seen = self.observed.without(job.ref) if _ending(job) is not None else self.observed
            if standing(seen.of(job.ref, DRIVER), suspended=False).phase in _TO_START:
                first.setdefault((rollout.service, rollout.model), (place, job.ref))
        return first

    def _end_models(self) -> dict[str, tuple[int, ...]]:
        """Plan the end of every deleted model; the last ops, by service."""
        ended: dict[str, tuple[int, ...]] = {}
        for target in self._of(_MODEL):
            old = _ending(target)
            if old is None:
                continue
            ref = _service_ref(old)
            service = self.services.get(ref) or ServiceView(ref, InferenceServiceSpec())
            last = plan_model_end(self._work(old, service), (*service.gateway_stopped, *self._all_jobs_stopped))
            if target.gone:
                ended[ref] = (*ended.get(ref, ()), *last)
            else:
                again = self.build.add(Verb.RECORD, target.ref, "", f"created again: {target.cause}", needs=last)
                self.recorded[target.ref] = (again,)
        return ended

    def _gpus_more(self, target: Target) -> tuple[int, str]:
        """How many GPUs more than now the model will hold; those that give are planned before those that take."""
        held = sum(len(run.state.spec.gpus) for run in self.observed.of(target.ref, ENGINE) if run.is_live)
        if target.gone:
            return -held, target.object.name
        spec: ModelSpec = effective(_MODEL, target.object.spec)
        service = self.services.get(_service_ref(target))
        idle = spec.suspend or (service is not None and service.suspended)
        return (0 if idle else replica_count(spec) * gpus_per_replica(spec)) - held, target.object.name

    def _open_models(self) -> list[ModelPlan]:
        asked = {item.ref for item in self.scope.targets}
        opened = []
        for target in sorted(self._of(_MODEL), key=self._gpus_more):
            service = self.services.get(_service_ref(target))
            if target.gone:
                continue
            if service is None or service.gone:
                self.findings.unknown.append(f"{target.ref}: its service {_service_ref(target)} is not recorded")
                continue
            neighbour = target.ref not in asked and service.ref not in asked
            work = self._work(target, service)
            if target.replaces is not None:
                work.observed = self.observed.without(target.ref)  # it will be as if it had never been
            opened.append(open_model(work, routes_only=neighbour))
        return opened

    def _close_model(self, model: ModelPlan) -> None:
        work = model.work
        work.service = self.services[work.service.ref]
        work.recorded = self.recorded.get(work.ref, ())
        try:
            with self.build.all_or_nothing(), self.gpus.all_or_nothing():
                close_model(model)
        except NoCapacity as error:
            if work.target.action != "unchanged":
                raise
            self.findings.refused[work.ref] = Refusal("capacity", error.message, error.hint or "")
        settle(work)

    def _unroute_strangers(self) -> None:
        """Models in a router's table that no object declares."""
        objects = [item for target in self.scope.all for item in (target.object, target.replaces) if item is not None]
        declared = {served_name(item.name, item.spec) for item in objects if item.kind == _MODEL}
        for view in self.services.values():
            if not isinstance(view.table, RouteTable) or view.gone:
                continue
            for name in sorted(view.table.models):
                if name not in declared:
                    args = {"service": view.ref, "router": view.router, "model": name}
                    cause = f"route-extra: no object declares model {name}"
                    self.build.add(Verb.UNROUTE, view.ref, f"routes/{name}", cause, args=args)

    def _mark_synced(self) -> None:
        """A router that started empty is whole again when it knows what serves today. What has yet to start comes
        later: it must not keep the rest of the table from being trusted."""
        for view in list(self.services.values()):
            if not view.needs_sync:
                continue
            restored = [op for op in self.build.ops() if op.verb is Verb.ROUTE and op.args["service"] == view.ref]
            strangers = [op for op in self.build.ops_of(view.ref) if op.verb is Verb.UNROUTE]
            routes = [op.id for op in (*restored, *strangers)]
            needs = (*view.router_ready, *routes)
            op = self.build.add(Verb.SYNC, view.ref, "router", "its table is whole again", needs=needs, run=view.router)
            self.services[view.ref] = replace(view, synced=(op,))

    # -- jobs

    def _job(self, target: Target, observed: Observed | None = None) -> JobWork:
        spec: TrainJobSpec = effective(_JOB, target.object.spec)
        recorded = self.recorded.get(target.ref, ())
        seen = observed or self.observed
        return JobWork(self.build, target, spec, seen, self.findings, self.policy, self.gpus, recorded)

    def _stop_jobs(self) -> None:
        """Drivers that end, end before what they sample from does."""
        for target in self._of(_JOB):
            if (old := _ending(target)) is not None:
                self.jobs_stopped[target.ref] = plan_job_stop(self._job(old))

    @property
    def _all_jobs_stopped(self) -> tuple[int, ...]:
        return tuple(op for stopped in self.jobs_stopped.values() for op in stopped)

    def _plan_jobs(self) -> None:
        """Last of all: a driver starts when what it samples from is there."""
        asked = {item.ref for item in self.scope.targets}
        for target in self._of(_JOB):
            old = _ending(target)
            if old is not None:
                erased = plan_job_end(self._job(old), self.jobs_stopped[target.ref])
                if target.gone:
                    continue
                again = self.build.add(Verb.RECORD, target.ref, "", f"created again: {target.cause}", needs=(erased,))
                self.recorded[target.ref] = (again,)
            if target.ref in asked:
                self._plan_job(target, self.observed.without(target.ref) if old is not None else self.observed)

    def _plan_job(self, target: Target, observed: Observed) -> None:
        try:
            plan_job(self._job(target, observed))
        except NoCapacity as error:
            if target.action != "unchanged":
                raise
            self.findings.refused[target.ref] = Refusal("capacity", error.message, error.hint or "")

    def _erase_plain(self) -> None:
        for target in self.scope.all:
            if target.gone and target.object.kind not in (_SERVICE, _MODEL, _JOB):
                erase(self.build, target, self.observed, ())

    # -- the result

    def _finished(self, serial: int, source: Mapping[str, Any]) -> Plan:
        ops = self.build.ops()
        touched: dict[str, list[Op]] = {}
        for op in ops:
            touched.setdefault(op.ref, []).append(op)
        refused = self.findings.refused
        shown = [t for t in self.scope.all if t not in self.scope.context or t.ref in touched or t.ref in refused]
        ended = [t for t in self.scope.all if t.gone and t.ref not in refused]
        ended += [t for t in self.scope.all if t.replaces is not None]
        past = {"prune": "pruned", "delete": "deleted", "replace": "deleted and created again"}
        return Plan(
            objects=tuple(_object_plan(target, touched.get(target.ref, []), self.findings) for target in shown),
            ops=ops,
            drift=tuple(self.findings.drift),
            destructive=(*self.findings.destructive, *(f"{t.ref} is {past[t.action]}" for t in ended)),
            unknown=tuple(dict.fromkeys(self.findings.unknown)),
            serial=serial,
            source=source,
        )


def _ending(target: Target) -> Target | None:
    """The deletion that a target is, or begins with."""
    if target.replaces is not None:
        return Target(target.replaces, "delete", cause=f"replaced: {target.cause}")
    return target if target.gone else None


def _service_ref(target: Target) -> str:
    return f"{_SERVICE}/{target.object.spec.get('service', 'default')}"


def _service_spec(target: Target) -> InferenceServiceSpec:
    spec: InferenceServiceSpec = effective(_SERVICE, target.object.spec)
    return spec


def _change_cause(target: Target) -> str:
    decisive = target.decisive
    return f"{decisive.path} changed" if decisive else "metadata changed"


def _object_plan(target: Target, ops: Sequence[Op], findings: Findings) -> ObjectPlan:
    action, cause, decided = target.action, target.cause, ""
    refusal = findings.refused.get(target.ref)
    if refusal is not None:
        return ObjectPlan(target.ref, "blocked", refusal.message, refusal=refusal)
    if action == "configure" and target.decisive is not None:
        decided = target.decisive.path
        cause = cause or _HOW[target.decisive.update]
    elif action == "configure":
        cause = cause or "metadata"
    if action == "unchanged" and ops:
        action = "heal"
        mine = [drift for drift in findings.drift if drift.ref == target.ref]
        cause = "; ".join(f"{drift.target} {drift.kind}" for drift in mine)
        cause = cause or next((op.cause for op in ops if op.verb is Verb.STOP), "not converged yet")
    return ObjectPlan(target.ref, action, cause, decided, target.changes, target.taken)


def without_ops(plan: Plan) -> Plan:
    """The plan as a client-side dry run sees it: fields only."""
    return replace(plan, ops=(), drift=(), destructive=())
