"""The inference service that a job brings: what of it a manifest that names none stands for, and how long it runs.

A TrainJob without ``rollout`` whose configuration lays out an inference engine (``rollout.backend``, or the first part
of ``allocation_mode``) stands for three objects: itself, an InferenceService of its name, and a Model in that. The
service is owned by the job: it is deleted with it, and has processes for as long as the job may start its driver. With
``shutdown_server_on_exit: false`` it is nobody's, and outlives the job. What exists under these names and is not the
job's is never touched.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import replace
from typing import Any

from areal.errors import ArealError, Conflict, UsageFault
from areal.reconcilers.desired import APPLY, Target, Wanted, with_layer
from areal.reconcilers.job_checks import require_runnable
from areal.reconcilers.job_config import JobConfig
from areal.reconcilers.job_layout import PROCESSES, laid_out
from areal.reconcilers.job_phase import JobPhase, standing
from areal.reconcilers.observed import ObservedRun
from areal.resources.kinds import name_problem
from areal.runtime.backends.base import RunState
from areal.state.records import StoredObject

LAYER = "job"  # of a service: its job is at rest
_JOB, _SERVICE, _MODEL = "TrainJob", "InferenceService", "Model"


def with_services(
    wanted: Sequence[Wanted],
    stored: Sequence[StoredObject],
    replacing: Sequence[str],
    refused: MutableMapping[str, ArealError] | None = None,
) -> list[Wanted]:
    """``wanted``, and what its jobs bring. ``replacing``: references of jobs that begin anew. ``refused`` collects why
    a job cannot be, and the job is left out; without it ArealError is raised."""
    known = {str(item.ref): item for item in stored}
    owners = {ref: item.owner for ref, item in known.items()} | {item.ref: item.owner for item in wanted}
    found: list[Wanted] = []
    for item in wanted:
        try:
            made = _expanded(item, known, owners, anew=item.ref in replacing) if item.kind == _JOB else [item]
        except ArealError as error:
            if refused is None:
                raise
            refused[item.ref] = error
            continue
        owners |= {each.ref: each.owner for each in made}
        found += made
    return found


def _expanded(
    job: Wanted, known: Mapping[str, StoredObject], owners: Mapping[str, str | None], *, anew: bool
) -> list[Wanted]:
    earlier = known.get(job.ref)
    if earlier is not None and not anew:
        job = _as_it_was(job, earlier)
        rollout = job.spec.get("rollout")
        if rollout is None:
            return [job]
        refs = (f"{_SERVICE}/{rollout.get('service')}", f"{_MODEL}/{rollout.get('model')}")
        kept = [_as_recorded(known[ref]) for ref in refs if ref in known and _is_of(known[ref], job, known)]
        return [*kept, job]
    config = JobConfig.of(job)
    require_runnable(job, config)
    job = laid_out(job, config)
    brought = _brought(job, config) if not job.spec.get("rollout") else None
    if brought is None:
        return [job]
    service, model = _claimed(job, brought, known, owners)
    return [service, model, replace(job, spec={**job.spec, "rollout": {"service": service.name, "model": model.name}})]


def _as_it_was(job: Wanted, earlier: StoredObject) -> Wanted:
    """With what was made of its configuration then: that does not change while it is the same job."""
    spec = dict(job.spec)
    if earlier.spec.get("rollout") is not None:
        spec.setdefault("rollout", earlier.spec["rollout"])
    if (processes := (earlier.spec.get("resources") or {}).get(PROCESSES)) is not None:
        spec["resources"] = {PROCESSES: processes, **(spec.get("resources") or {})}
    return replace(job, spec=spec)


def _claimed(
    job: Wanted, brought: tuple[Wanted, Wanted], known: Mapping[str, StoredObject], owners: Mapping[str, str | None]
) -> tuple[Wanted, Wanted]:
    """The names are free, or the job's already. Then the service keeps its port. ``owners``: of all there is and is to
    be. Raises Conflict."""

    def is_taken(item: Wanted) -> bool:
        return owners.get(item.ref, item.owner) != item.owner

    service, model = brought
    if is_taken(model):  # by another job of the same configuration, say: the driver is told
        model = replace(model, ref=f"{_MODEL}/{job.name}", name=job.name)
    for item in (service, model):
        if is_taken(item):
            raise Conflict(
                f"{job.ref} would bring {item.ref}, which is there and is not its own; nothing was changed",
                hint="give the job `rollout: {service: ..., model: ...}` to sample from it, or another name",
            )
    earlier = known.get(service.ref)
    port = (earlier.spec.get("gateway") or {}).get("port") if earlier is not None else None
    service = replace(service, spec={**service.spec, "gateway": {"port": port or _free_port()}})
    return replace(service, fresh=True), replace(model, fresh=True)


def _is_of(item: StoredObject, job: Wanted, known: Mapping[str, StoredObject]) -> bool:
    """Whether it belongs to the job, or to a service that does."""
    owner = known.get(item.owner or "")
    return item.owner == job.ref or (owner is not None and owner.kind == _SERVICE and owner.owner == job.ref)


def _as_recorded(item: StoredObject) -> Wanted:
    """What changes nothing when it is applied."""
    layer = next((each for each in item.layers if each.manager == APPLY), None)
    return Wanted(
        ref=str(item.ref),
        kind=item.kind,
        name=item.name,
        spec=dict(layer.spec) if layer is not None else {},
        labels=item.labels,
        annotations=item.annotations,
        depends_on=tuple(item.depends_on),
        owner=item.owner,
        source=dict(layer.source) if layer is not None and layer.source else None,
    )


# -- what the configuration says


def _brought(job: Wanted, config: JobConfig) -> tuple[Wanted, Wanted] | None:
    """Service and model, without a port; None where the job samples from nothing, or from what its configuration or its
    driver names. Raises UsageFault."""
    part = config.inference()
    if part is None:
        return None
    path = config.text("actor.path")
    if not path:
        raise UsageFault(
            f"{job.ref} brings its own {part.engine} engine, and nothing says of which model", hint="actor.path=..."
        )
    name = config.text("rollout.model") or job.name
    if name_problem(name) is not None:
        raise UsageFault(f"{job.ref}: rollout.model {name!r} cannot name a Model: {name_problem(name)}")
    stays = config.get("shutdown_server_on_exit", config.get("rollout.shutdown_server_on_exit")) is False
    service = _wanted(job, _SERVICE, job.name, {}, None if stays else job.ref)
    threads = (job.spec.get("env") or {}).get("OMP_NUM_THREADS")
    spec: dict[str, Any] = {"service": job.name, "backend": str(part), "path": config.absolute(path)}
    if tokenizer := config.text("tokenizer_path"):
        spec["tokenizerPath"] = config.absolute(tokenizer)
    if arguments := config.engine_arguments(part.engine):
        spec["engineArgs"] = arguments
    if threads:
        spec["env"] = {"OMP_NUM_THREADS": str(threads)}
    return service, _wanted(job, _MODEL, name, spec, service.ref)


def _wanted(job: Wanted, kind: str, name: str, spec: Mapping[str, Any], owner: str | None) -> Wanted:
    return Wanted(f"{kind}/{name}", kind, name, spec, job.labels, {}, (), owner, job.source, job.where)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


# -- how long it runs


def following_jobs(
    targets: Sequence[Target], stored: Iterable[StoredObject], states: Iterable[RunState]
) -> tuple[Target, ...]:
    """``targets``, with the services that jobs among them own, and each of those suspended where its job is at rest."""
    chosen = {target.ref: target for target in targets}
    known = {str(item.ref): item for item in stored} | {ref: target.object for ref, target in chosen.items()}
    runs = list(states)
    for ref, item in known.items():
        job = known.get(item.owner or "")
        if item.kind != _SERVICE or job is None or job.kind != _JOB:
            continue
        asked, mine = chosen.get(str(job.ref)), chosen.get(ref)
        if (asked is None and mine is None) or (asked is not None and asked.gone):
            continue
        if mine is not None and mine.action != "unchanged":
            continue
        chosen[ref] = _following(item, asked or Target(job, "unchanged"), runs)
    return tuple(chosen.values())


def _following(service: StoredObject, job: Target, runs: Iterable[RunState]) -> Target:
    resting = at_rest(job, runs)
    if resting == any(layer.manager == LAYER for layer in service.layers):
        return Target(service, "unchanged")
    said = f"{job.ref} is at rest" if resting else f"{job.ref} is to run"
    return with_layer(service, LAYER, {"suspend": True} if resting else {}, said)


def at_rest(job: Target, runs: Iterable[RunState]) -> bool:
    """Whether no driver runs and none is to be started."""
    if job.action in ("create", "replace"):
        return False
    mine = [ObservedRun(state) for state in runs if state.spec.owner == job.ref]
    now = standing(mine, suspended=bool(job.object.spec.get("suspend")))
    if job.object.spec.get("suspend"):
        return now.run is None or not now.run.may_live
    asked = str(job.object.status.get("restartedAt", ""))
    told = str(now.run.state.spec.inputs.get("restartedAt", "")) if now.run is not None else asked
    return asked == told and now.phase in (JobPhase.SUCCEEDED, JobPhase.FAILED)


def services_of(stored: Iterable[StoredObject], job: str) -> Iterator[StoredObject]:
    return (item for item in stored if item.kind == _SERVICE and item.owner == job)
