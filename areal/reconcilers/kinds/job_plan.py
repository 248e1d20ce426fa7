"""Plan a TrainJob: one driver that runs to its end, and the inference service that it brings along.

The driver starts when the model that it samples from is ready, and is stopped before that model is. A finished job is
never run again, whatever is applied: another spec is another job (``--replace``), and `areal restart` requests another
run of the same job.

A job without ``rollout`` whose configuration lays out an inference engine (``rollout.backend``, or the first part of
``allocation_mode``) stands for three objects: itself, an InferenceService of the same name, and a Model in that
service. The job owns the service: it is deleted with the job, and has processes for as long as the job may start its
driver. With ``shutdown_server_on_exit: false`` it has no owner, and outlives the job. Objects of these names that the
job does not own are never changed.

An object of any kind whose ``metadata.dependsOn`` names a job starts when that job has succeeded, and so does an object
that needs a waiting object. Until then a separate layer suspends it. An object that has started once never waits again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from areal.client.command import free_port
from areal.errors import ArealError, Conflict, InvalidManifest, NoCapacity, UsageFault
from areal.hub import TOKENIZER_FILES, is_id
from areal.reconcilers.desired import Target, Wanted, compared, is_derived, needs_of, with_derived, with_layer
from areal.reconcilers.kinds import StageReporter
from areal.reconcilers.kinds.inference_launch import HubModel, hub_of, require_ids
from areal.reconcilers.kinds.job_config import BUILT_IN, CLUSTERS, PROCESSES, JobConfig, expand_job, require_runnable
from areal.reconcilers.kinds.job_status import DRIVER, JobPhase, JobStatus, has_ended, job_status
from areal.reconcilers.kinds.scheduling_spec import with_placement
from areal.reconcilers.kinds.service_plan import called_first
from areal.reconcilers.observe import ObservedRun
from areal.reconcilers.plan import NO_PROCESS, Drift, StartRun, Verb
from areal.reconcilers.planning import KindPlan, ObjectWork, stoppable, superseded
from areal.resources.job_spec import TrainJobSpec
from areal.resources.kinds import AGENT_SERVICE, INFERENCE_SERVICE, MODEL, TRAIN_JOB, name_problem
from areal.resources.nodes import ManifestError
from areal.resources.tree import ABSENT, get_path, set_path
from areal.resources.validation import effective
from areal.runtime.backends import LOCAL
from areal.runtime.backends.base import RunState
from areal.state.records import AWAITING, JOB, Layer, StoredObject

TARGET = f"{DRIVER}/0"
_TO_START = (JobPhase.PENDING, JobPhase.STOPPED, JobPhase.LOST)


class JobWork(ObjectWork):
    spec: TrainJobSpec


class TrainJobPlan(KindPlan):
    """A driver stops before the model that it samples from, and starts when that model is ready."""

    def drain(self) -> None:
        for place, target in enumerate(self.targets):
            if (old := target.ending) is not None:
                work = JobWork(self.planning, old)
                stopped = work.stop_component(DRIVER, stoppable(work.runs), work.end_cause, (), work.policy.grace)
                self.planning.drained[target.ref] = stopped
            work = JobWork(self.planning, target)
            if target.is_deleted or work.spec.suspend or work.spec.rollout is None:
                continue
            if job_status(work.runs, suspended=False).phase in _TO_START:  # the model may wait for its weights
                key = work.spec.rollout.service, work.spec.rollout.model
                self.planning.trainers.setdefault(key, (place, target.ref))

    def finish(self) -> None:
        planning = self.planning
        for target in self.targets:
            if (old := target.ending) is not None:
                # What it made stays in its folder.
                erased = JobWork(planning, old).erase(planning.drained[target.ref])
                if target.is_deleted:
                    continue
                planning.record_again(target, erased)
            if target.ref in planning.scope.requested:
                with planning.healing(target):
                    plan_job(JobWork(planning, target))


_KEPT = 3  # starts by a person whose output can still be read; each has all attempts of its own


def plan_job(work: JobWork) -> None:
    """Plan a job's driver. Raises NoCapacity."""
    now = job_status(work.runs, suspended=work.spec.suspend)
    if now.phase is JobPhase.UNKNOWN:
        work.notes.cannot_see(work.ref, [run for run in work.runs if not run.is_live and run.may_live])
        return
    if work.spec.suspend:
        _stop(work, now, "suspended")
        return
    cause = _start_cause(work, now)
    if cause:
        _start(work, now, cause, (*work.recorded, *_stop(work, now, cause)))


def _start_cause(work: JobWork, now: JobStatus) -> str:
    """Return why the driver has to start; "" if it does not."""
    if _restart_requested(work.target.object, now):
        return "restart requested"
    if now.phase is JobPhase.PENDING:
        return NO_PROCESS
    if now.phase is JobPhase.STOPPED:
        return f"resumes after attempt {now.attempt}"
    if now.phase is JobPhase.RUNNING and now.run is not None:
        supervised: TrainJobSpec = effective(TRAIN_JOB, now.run.state.spec.spec)  # what its supervisor goes by
        if supervised.restart != work.spec.restart:
            return "spec.restart changed"
    if now.phase is JobPhase.LOST and work.spec.restart.policy != "Never":
        kind = (now.run.state.cause if now.run is not None else "") or "process-died"
        work.notes.drift.append(Drift(work.ref, str(kind), TARGET, now.message))
        return f"{kind}: {now.message}"
    return ""


def _restart_requested(job: StoredObject, now: JobStatus) -> bool:
    """Return whether `areal restart` was called since the newest run started."""
    asked = str(job.status.get("restartedAt", ""))
    return bool(asked) and now.run is not None and str(now.run.state.spec.inputs.get("restartedAt", "")) != asked


def _restarts_left(work: JobWork, now: JobStatus) -> int:
    """Return the number of restarts left for a driver that fails. A user's restart or resume resets it. A killed
    supervisor, such as by a reboot, does not count."""
    restart = work.spec.restart
    if restart.policy == "Never":
        return 0
    if now.run is None or now.phase is not JobPhase.LOST:
        return restart.max_restarts
    allowed = int(now.run.state.spec.inputs.get("restartsAllowed", restart.max_restarts))
    return allowed - now.run.state.restarts


def _start(work: JobWork, now: JobStatus, cause: str, needs: Sequence[int]) -> None:
    inputs = {
        "attempt": now.attempt + 1,
        "restartsAllowed": max(0, _restarts_left(work, now)),
        "restartedAt": str(work.target.object.status.get("restartedAt", "")),
    }
    resources = work.spec.resources
    capacity = work.observed.capacity
    local = len(capacity.gpus) + len(capacity.leased) + len(capacity.squatters)
    there = capacity.queued[work.scheduler] if work.queues else local
    each = resources.gpus if resources.gpus is not None else min(1, there)
    count = each * resources.processes_per_node  # on each node
    if count > work.gpus.available:
        raise NoCapacity(
            f"{work.ref} needs {count} GPUs (spec.resources); {work.gpus.available} are free",
            hint="areal get processes -o wide shows who holds the GPUs; resources: {gpus: 0} trains without",
        )
    rollout = work.spec.rollout
    agents = [f"{AGENT_SERVICE}/{rollout.agents}"] if rollout is not None and rollout.agents else []
    needs = (*needs, *work.gpus.take(count, work.ref), *called_first(work, rollout, *agents))
    for old in superseded(work.runs, _KEPT):
        work.build.add(Verb.FORGET, work.ref, TARGET, "an older record", needs=needs, run=old.uid)
    args = StartRun(inputs=inputs, gpus=count, nodes=resources.nodes)
    work.build.add(Verb.SPAWN, work.ref, TARGET, cause, needs=needs, run=f"+{work.ref}/{TARGET}", args=args)


def _stop(work: JobWork, now: JobStatus, cause: str) -> tuple[int, ...]:
    """Stop live runs, and processes that a dead supervisor left."""
    ending = [run for run in work.runs if run.is_live or (run.leaves_session and run is now.run)]
    return work.stop_component(DRIVER, ending, cause, work.recorded, work.policy.grace) if ending else ()


_DERIVED = (("rollout",), ("scheduler",), ("resources", PROCESSES), ("resources", "nodes"))


def with_services(
    wanted: Sequence[Wanted],
    stored: Sequence[StoredObject],
    replacing: Sequence[str],
    refused: MutableMapping[str, ArealError],
) -> list[Wanted]:
    """Return ``wanted``, and the services and models that its jobs own. ``replacing``: references of jobs that are
    created again. ``refused`` collects the errors of jobs that are left out."""
    known = {str(item.ref): item for item in stored}
    wanted = [_with_owner(item, known, replacing) for item in wanted]
    declared = {item.ref for item in wanted}
    owners = {ref: item.owner for ref, item in known.items()} | {item.ref: item.owner for item in wanted}
    specs = {ref: item.spec for ref, item in known.items()} | {item.ref: item.spec for item in wanted}
    found: list[Wanted] = []
    for item in wanted:
        made: list[Wanted] = []
        try:
            if item.kind == TRAIN_JOB:
                item = _with_model_of_agents(item, specs)
                *services, job = _expand(item, known, owners, specs, recreate=item.ref in replacing)
                made = [each for each in services if each.ref not in declared]
                earlier = None if item.ref in replacing else known.get(item.ref)
                item = with_derived(item, job.spec, _DERIVED, earlier)
        except ArealError as error:
            if item.where and not isinstance(error, ManifestError):  # of a manifest, and no verb's flags
                kind = InvalidManifest if isinstance(error, UsageFault) else type(error)
                error = kind(f"{item.where}: {error.message}", hint=error.hint)
            refused[item.ref] = error
            continue
        owners |= {each.ref: each.owner for each in made}
        found += [*made, item]
    return found


def _with_owner(item: Wanted, known: Mapping[str, StoredObject], replacing: Sequence[str]) -> Wanted:
    """Return the manifest of an object that a job created, as ``areal get -o manifest`` writes it, with the job as its
    owner."""
    earlier = known.get(item.ref)
    owner = known.get((earlier.owner if earlier is not None and item.owner is None else None) or "")
    if owner is None:
        return item
    job = owner.owner or str(owner.ref)
    return replace(item, owner=str(owner.ref)) if job.startswith(f"{TRAIN_JOB}/") and job not in replacing else item


def _with_model_of_agents(job: Wanted, specs: Mapping[str, Mapping[str, Any]]) -> Wanted:
    """Return a job whose episodes an AgentService runs with that service's model to sample from. Raises
    InvalidManifest."""
    rollout = job.spec.get("rollout") or {}
    if (agents := rollout.get("agents")) is None or (ref := f"{AGENT_SERVICE}/{agents}") not in specs:
        return job  # what is not there is reported with the other references
    inference = specs[ref].get("inference")
    if inference is None:
        raise InvalidManifest(
            f"{job.ref}: spec.rollout.agents: {ref} has no spec.inference, so its model calls are not recorded",
            hint=f"give {ref} `inference: {{service: ..., model: ...}}`",
        )
    theirs = {"service": inference.get("service", "default"), "model": inference.get("model")}
    for name, value in theirs.items():
        if rollout.get(name, value) != value:
            raise InvalidManifest(
                f"{job.ref}: spec.rollout.{name} is {rollout[name]!r}, and that of {ref} is {value!r}"
            )
    known = {name: value for name, value in theirs.items() if value is not None}
    return replace(job, spec={**job.spec, "rollout": {**rollout, **known}})


def _expand(
    job: Wanted,
    known: Mapping[str, StoredObject],
    owners: Mapping[str, str | None],
    specs: Mapping[str, Mapping[str, Any]],
    *,
    recreate: bool,
) -> list[Wanted]:
    earlier = known.get(job.ref)
    if earlier is not None and not recreate:
        job = _with_recorded_fields(job, earlier)
        rollout = job.spec.get("rollout")
        if rollout is None:
            return [job]
        created = is_derived(earlier, ("rollout",), unnoted=True) and rollout.get("service") == job.name
        refs = (f"{INFERENCE_SERVICE}/{rollout.get('service')}", f"{MODEL}/{rollout.get('model')}")
        kept = [known[ref] for ref in refs if ref in known and (created or _is_of(known[ref], job, known))]
        return [*map(_as_recorded, kept), job]
    config = JobConfig.of(job)
    job = expand_job(job, config)
    require_runnable(job, config)
    owned = _owned_service(job, config) if not job.spec.get("rollout") else None
    ref = f"{MODEL}/{(job.spec.get('rollout') or {}).get('model')}"
    _require_images(job, config, owned[1].spec if owned is not None else specs.get(ref, {}))
    job = _place_job(job, config)
    if owned is None:
        return [job]
    service, model = _claim_names(job, owned, known, owners)
    return [service, model, replace(job, spec={**job.spec, "rollout": {"service": service.name, "model": model.name}})]


def _require_images(job: Wanted, config: JobConfig, model: Mapping[str, Any]) -> None:
    """Raise InvalidManifest if the job's workflow sends images to a model whose engine gets token ids alone."""
    backend = str(model.get("backend", ""))
    if config.uses_images() and backend.startswith(("sglang", "vllm")):
        raise InvalidManifest(
            f"{job.ref}: its workflow sends images, and its model has the backend {backend}, which gets none",
            hint="backend: embedded:d1",
        )


def _with_recorded_fields(job: Wanted, earlier: StoredObject) -> Wanted:
    """Keep the fields that were derived from the job's configuration: they are constant for the life of a job."""
    spec: Mapping[str, object] = job.spec
    for path in _DERIVED:
        if get_path(spec, path) is ABSENT and is_derived(earlier, path, unnoted=True):
            spec = set_path(spec, path, get_path(earlier.spec, path))
    return _place_job(replace(job, spec=spec))


def _place_job(job: Wanted, config: JobConfig | None = None) -> Wanted:
    """Add the cluster resources that the configuration's ``scheduling_spec`` requests. On this machine they are not
    read. Raises InvalidManifest."""
    scheduler = job.spec.get("scheduler") or {}
    if scheduler.get("type") not in CLUSTERS:
        return job
    placement = (config or JobConfig.of(job)).placement_of("training", scheduler)
    return replace(job, spec=with_placement(job.spec, placement))


def _claim_names(
    job: Wanted, owned: tuple[Wanted, Wanted], known: Mapping[str, StoredObject], owners: Mapping[str, str | None]
) -> tuple[Wanted, Wanted]:
    """Return the service and model under names that are free or already the job's; the service keeps its port.
    ``owners``: by reference, of recorded and declared objects. Raises Conflict."""

    def is_taken(item: Wanted) -> bool:
        return owners.get(item.ref, item.owner) != item.owner

    service, model = owned
    if is_taken(model):  # by another job of the same configuration, say: the driver gets the name
        model = replace(model, ref=f"{MODEL}/{job.name}", name=job.name)
    for item in (service, model):
        if is_taken(item):
            raise Conflict(
                f"{job.ref} would create {item.ref}, which exists and belongs to another owner; nothing was changed",
                hint="give the job `rollout: {service: ..., model: ...}` to sample from it, or another name",
            )
    earlier = known.get(service.ref)
    port = (earlier.spec.get("gateway") or {}).get("port") if earlier is not None else None
    service = replace(service, spec={**service.spec, "gateway": {"port": port or free_port()}})
    return replace(service, fresh=True), replace(model, fresh=True)


def _is_of(item: StoredObject, job: Wanted, known: Mapping[str, StoredObject]) -> bool:
    """Return whether an object belongs to the job, or to a service that does."""
    owner = known.get(item.owner or "")
    return item.owner == job.ref or (owner is not None and owner.kind == INFERENCE_SERVICE and owner.owner == job.ref)


def _as_recorded(item: StoredObject) -> Wanted:
    """Return the recorded manifest of an object: applying it changes nothing."""
    layer = item.applied
    return Wanted(
        ref=str(item.ref),
        kind=item.kind,
        name=item.name,
        spec=dict(layer.spec) if layer is not None else {},
        labels=item.labels,
        annotations=item.annotations,
        depends_on=tuple(item.depends_on),
        owner=item.owner,
        source=layer.source if layer is not None else None,
    )


def _owned_service(job: Wanted, config: JobConfig) -> tuple[Wanted, Wanted] | None:
    """Return the service, without a port, and the model that the configuration lays out; None if it lays out no engine.
    Raises UsageFault."""
    part = config.inference()
    if part is None:
        return None
    path = config.text("actor.path")
    if not path:
        raise UsageFault(
            f"{job.ref} starts its own {part.engine} engine, but its configuration names no model",
            hint="actor.path=...",
        )
    name = config.text("rollout.model") or job.name
    if name_problem(name) is not None:
        raise UsageFault(f"{job.ref}: rollout.model {name!r} cannot name a Model: {name_problem(name)}")
    stays = config.get("shutdown_server_on_exit", config.get("rollout.shutdown_server_on_exit")) is False
    placement = config.placement_of("rollout", job.spec.get("scheduler") or {})
    placed = {"scheduler": job.spec["scheduler"]} if job.spec.get("scheduler") else {}
    placed = with_placement(placed, replace(placement, resources={}, env={}))
    service = _wanted(job, INFERENCE_SERVICE, job.name, placed, None if stays else job.ref)
    threads = (job.spec.get("env") or {}).get("OMP_NUM_THREADS")
    spec: dict[str, Any] = {"service": job.name, "backend": str(part), "path": config.absolute(path)}
    if tokenizer := config.text("tokenizer_path"):
        spec["tokenizerPath"] = config.absolute(tokenizer)
    if arguments := config.engine_arguments(part.engine):
        spec["engineArgs"] = arguments
    if threads:
        spec["env"] = {"OMP_NUM_THREADS": str(threads)}
    spec = with_placement(spec, replace(placement, settings={}))
    return service, _wanted(job, MODEL, name, spec, service.ref)


def _wanted(job: Wanted, kind: str, name: str, spec: Mapping[str, object], owner: str | None) -> Wanted:
    return Wanted(f"{kind}/{name}", kind, name, spec, job.labels, {}, (), owner, job.source, job.where)


def following_jobs(
    targets: Sequence[Target], stored: Iterable[StoredObject], states: Iterable[RunState]
) -> tuple[Target, ...]:
    """Return ``targets``, suspended while they wait for a job, and the services that their jobs own, suspended while
    the job is at rest."""
    runs, stored = list(states), list(stored)
    chosen = {target.ref: target for target in _awaiting_jobs(targets, stored, runs)}
    known = {str(item.ref): item for item in stored} | {ref: target.object for ref, target in chosen.items()}
    for ref, item in known.items():
        job = known.get(item.owner or "")
        if item.kind != INFERENCE_SERVICE or job is None or job.kind != TRAIN_JOB:
            continue
        asked, mine = chosen.get(str(job.ref)), chosen.get(ref)
        if (asked is None and mine is None) or (asked is not None and asked.is_deleted):
            continue
        if mine is not None and mine.action not in ("unchanged", "create"):
            continue
        resting = at_rest(asked or Target(job, "unchanged"), runs)
        if resting == any(layer.manager == JOB for layer in item.layers):
            chosen[ref] = mine or Target(item, "unchanged")
        else:
            cause = f"{job.ref} is {'at rest' if resting else 'to run'}"
            layered = with_layer(item, JOB, {"suspend": True} if resting else {}, cause)
            chosen[ref] = replace(layered, action="create") if mine is not None and mine.action == "create" else layered
    return tuple(chosen.values())


def _awaiting_jobs(
    targets: Sequence[Target], stored: Sequence[StoredObject], states: Sequence[RunState]
) -> tuple[Target, ...]:
    """Return ``targets``, each with or without the layer that suspends it while it waits for a job."""
    chosen = {target.ref: target for target in targets}
    known = {str(item.ref): Target(item, "unchanged") for item in stored} | chosen
    if not any(
        target.object.awaits or any(need.startswith(f"{TRAIN_JOB}/") for need in target.object.depends_on)
        for target in known.values()
    ):
        return tuple(targets)
    runs: dict[str, list[ObservedRun]] = {}
    for state in states:
        runs.setdefault(state.spec.owner, []).append(ObservedRun(state))

    def awaited(ref: str, above: frozenset[str] = frozenset()) -> str:
        """Return the job that has to end first, or ""."""
        target = known.get(ref)
        if target is None or ref in above or target.is_deleted:
            return ""
        is_new = target.action in ("create", "replace")
        if not is_new and ref in runs:
            return ""
        item, above = target.object, above | {ref}
        for need in item.depends_on:
            if need.startswith(f"{TRAIN_JOB}/") and end_of(need) is not JobPhase.SUCCEEDED:
                return awaited(need, above) or need
        return next(filter(None, (awaited(need, above) for need in needs_of(item))), "")

    def end_of(ref: str) -> JobPhase | None:
        target = known.get(ref)
        if target is None or target.action in ("create", "replace"):
            return None
        now = job_status(runs.get(ref, ()), suspended=False)
        ended = has_ended(now, target.object.spec) and not _restart_requested(target.object, now)
        return now.phase if ended else None

    return tuple(
        target if target.is_deleted else _with_awaited(target, awaited(target.ref), end_of) for target in targets
    )


def _with_awaited(target: Target, job: str, end_of: Callable[[str], JobPhase | None]) -> Target:
    """Return ``target``, suspended until ``job`` has succeeded; "" lets it start. ``end_of`` returns the phase in which
    a job ended, or None."""
    item = target.object
    held = next((layer for layer in item.layers if layer.manager == AWAITING), None)
    had = (held.source or {}).get("job", "") if held is not None else ""
    if job:
        cause = f"waits for {job}{', which has failed' if end_of(job) is not None else ''}"
    else:  # a person may have resumed it, or its manifest names the job no longer
        cause = f"{had} has succeeded" if end_of(had) is JobPhase.SUCCEEDED else f"waits for {had} no longer"
    if job == had:
        return replace(target, cause=cause) if job and item.awaits and not target.cause else target
    layer = Layer(AWAITING, {"suspend": True}, {"job": job}, "", 0.0)
    others = [each for each in item.layers if each is not held]
    layers = tuple(layer if each is held else each for each in item.layers) if job and held else (*others, layer)
    after = replace(item, layers=layers if job else tuple(others))
    if target.action == "unchanged":
        return replace(compared(item, after), cause=cause)
    return replace(target, object=after, cause=target.cause or cause)


def at_rest(job: Target, runs: Iterable[RunState]) -> bool:
    """Return whether no driver runs and none will be started."""
    if job.action in ("create", "replace"):
        return bool(job.object.spec.get("suspend"))
    mine = [ObservedRun(state) for state in runs if state.spec.owner == job.ref]
    now = job_status(mine, suspended=bool(job.object.spec.get("suspend")))
    if job.object.spec.get("suspend"):
        return now.run is None or not now.run.may_live
    return has_ended(now, job.object.spec) and not _restart_requested(job.object, now)


_MODELS = ("actor", "critic", "ref", "teacher", "model")
_DATASETS = ("train_dataset", "valid_dataset")


def require_job_ids(jobs: Mapping[str, StoredObject], report: StageReporter) -> None:
    """Raise NotFound or ArealError for an id that neither the cache nor the hub has, of a job that a built-in driver
    runs on this machine. Any commit in the cache will do, since a Model that the job trains may pin one."""
    wanted = []
    for ref, stored in jobs.items():
        spec: TrainJobSpec = effective(TRAIN_JOB, stored.spec)
        if spec.scheduler.type == LOCAL and not any(each.startswith(f"{TRAIN_JOB}/") for each in stored.depends_on):
            hub = hub_of(stored, spec)
            wanted += [(ref, hub, each) for each in _job_ids(stored) if not hub.has(each.id, each.kind, each.only)]
    require_ids(wanted, report)


def _job_ids(stored: StoredObject) -> Iterator[HubModel]:
    config = JobConfig.of(replace(_as_recorded(stored), spec=stored.spec))
    driver = stored.spec.get("driver") or config.get("driver")
    if driver and str(driver).replace(".", ":") not in {known.replace(".", ":") for known in BUILT_IN.values()}:
        return
    paths: dict[str, HubModel] = {}
    for section in _MODELS:
        path = config.text(f"{section}.path")
        paths.setdefault(path, HubModel(path))
    for section in _DATASETS:
        path = config.text(f"{section}.path")
        if "/" in path:  # otherwise it may be a registered name
            paths[path] = HubModel(path.partition(":")[0], kind="dataset")
    tokenizer = config.text("tokenizer_path")
    paths.setdefault(tokenizer, HubModel(tokenizer, only=TOKENIZER_FILES))
    for path, model in paths.items():
        if is_id(model.id) and not Path(config.absolute(path)).exists():
            yield model
