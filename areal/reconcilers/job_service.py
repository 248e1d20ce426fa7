"""The inference service that a job brings: what of it a manifest that names none stands for, and how long it runs.

A TrainJob without ``rollout`` whose configuration lays out an inference engine (``rollout.backend``, or the first part
of ``allocation_mode``) stands for three objects: itself, an InferenceService of its name, and a Model in that. The
service is owned by the job: it is deleted with it, and has processes for as long as the job may start its driver. With
``shutdown_server_on_exit: false`` it is nobody's, and outlives the job. What exists under these names and is not the
job's is never touched.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from areal.errors import Conflict, UsageFault
from areal.reconcilers.desired import APPLY, Target, Wanted, with_layer
from areal.reconcilers.driver_choice import read_config
from areal.reconcilers.job_phase import JobPhase, standing
from areal.reconcilers.observed import ObservedRun
from areal.resources.backend_grammar import BackendError, Part, parse_backend
from areal.resources.engine_flags import areal_sets
from areal.resources.kinds import name_problem
from areal.resources.paths import looks_local
from areal.runtime.backends.base import RunState
from areal.state.records import StoredObject

LAYER = "job"  # of a service: its job is at rest
_JOB, _SERVICE, _MODEL = "TrainJob", "InferenceService", "Model"
_OFFLINE = ("sft", "rw", "dpo")
_REFERENCE = re.compile(r"\$\{([A-Za-z_][\w.]*)\}")
_DEEPEST = 10


def with_services(wanted: Sequence[Wanted], stored: Sequence[StoredObject], replacing: Sequence[str]) -> list[Wanted]:
    """``wanted``, and what its jobs bring. ``replacing``: references of jobs that begin anew. Raises UsageFault,
    Conflict."""
    known = {str(item.ref): item for item in stored}
    found: list[Wanted] = []
    for item in wanted:
        if item.kind == _JOB and not item.spec.get("rollout"):
            found += _expanded(item, known, anew=item.ref in replacing)
        else:
            found.append(item)
    return found


def _expanded(job: Wanted, known: Mapping[str, StoredObject], *, anew: bool) -> list[Wanted]:
    earlier = known.get(job.ref)
    if earlier is not None and not anew:
        rollout = earlier.spec.get("rollout")
        if rollout is None:
            return [job]
        refs = (f"{_SERVICE}/{rollout['service']}", f"{_MODEL}/{rollout['model']}")
        kept = [_as_recorded(known[ref]) for ref in refs if ref in known and _is_of(known[ref], job, known)]
        return [*kept, replace(job, spec={**job.spec, "rollout": rollout})]
    brought = _brought(job)
    if brought is None:
        return [job]
    service, model = _claimed(job, brought, known)
    return [service, model, replace(job, spec={**job.spec, "rollout": {"service": service.name, "model": model.name}})]


def _claimed(job: Wanted, brought: tuple[Wanted, Wanted], known: Mapping[str, StoredObject]) -> tuple[Wanted, Wanted]:
    """The names are free, or the job's already. Then the service keeps its port. Raises Conflict."""
    service, model = brought
    for item in brought:
        found = known.get(item.ref)
        if found is not None and found.owner != item.owner:
            raise Conflict(
                f"{job.ref} would bring {item.ref}, which is there and is not its own; nothing was changed",
                hint="give the job `rollout: {service: ..., model: ...}` to sample from it, or another name",
            )
    earlier = known.get(service.ref)
    port = (earlier.spec.get("gateway") or {}).get("port") if earlier is not None else None
    return replace(service, spec={**service.spec, "gateway": {"port": port or _free_port()}}), model


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


def _brought(job: Wanted) -> tuple[Wanted, Wanted] | None:
    """Service and model, without a port; None where the job samples from nothing, or from what its configuration or its
    driver names. Raises UsageFault."""
    config = _Config.of(job)
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


class _Config:
    """A job's configuration as it is written, with its overrides."""

    def __init__(self, job: Wanted, tree: dict[str, Any], folder: Path) -> None:
        self._job = job
        self._tree = tree
        self._folder = folder

    @classmethod
    def of(cls, job: Wanted) -> _Config:
        """Raises UsageFault. One that is not found is left to the driver's start, which says where it looked."""
        given, folder = job.spec.get("config"), Path(job.spec.get("workingDir") or Path.cwd())
        if isinstance(given, str):
            bases = [folder, *([Path(job.source["file"]).parent] if job.source and job.source.get("file") else [])]
            file = next((base / given for base in bases if (base / given).is_file()), None)
            tree = read_config(file) if file is not None else {}
        else:
            tree = _copied(given or {})
        for text in job.spec.get("overrides") or ():
            _override(tree, str(text))
        return cls(job, tree, folder)

    def get(self, key: str, default: Any = None, depth: int = 0) -> Any:
        """The value of a dotted key; ``${another.key}`` is looked up."""
        node: Any = self._tree
        for part in key.split("."):
            if not isinstance(node, Mapping) or part not in node:
                return default
            node = node[part]
        while isinstance(node, str) and (match := _REFERENCE.search(node)) and depth < _DEEPEST:
            depth += 1
            inner = self.get(match[1], None, depth)
            if inner is None:
                return default
            node = inner if match[0] == node else node.replace(match[0], str(inner))
        return node

    def text(self, key: str) -> str:
        value = self.get(key)
        return value if isinstance(value, str) else ""

    def inference(self) -> Part | None:
        """How its own engines are laid out. Raises UsageFault."""
        online = isinstance(self.get("rollout"), Mapping) and self.get("trainer.type") not in _OFFLINE
        if not online or self.get("rollout.gateway_addr"):
            return None
        for key in ("rollout.backend", "allocation_mode"):
            if said := self.text(key):
                try:
                    part = parse_backend(said).inference
                except BackendError as error:
                    raise UsageFault(f"{self._job.ref}: {key} {said!r}: {error}") from error
                return part if part is None or part.engine != "external" else None
        return None

    def absolute(self, path: str) -> str:
        """A folder of the driver's working folder; a name on a hub as it is."""
        local = self._folder / Path(path).expanduser()
        return str(local) if local.exists() or looks_local(path) else path

    def engine_arguments(self, engine: str) -> dict[str, Any]:
        """The configuration's section for the engine, without what says nothing and what areal sets itself."""
        section = self.get(engine)
        given = {**section} if isinstance(section, Mapping) else {}
        if engine == "embedded" and self.text("actor.dtype"):
            given.setdefault("dtype", self.text("actor.dtype"))
        return {
            str(name): value
            for name, value in given.items()
            if value not in (None, "", [], {}) and not areal_sets(engine, str(name))
        }


def _override(tree: dict[str, Any], text: str) -> None:
    """``key=value``, with or without ``+``. What is wrong with it the driver says."""
    import yaml

    key, sign, value = text.lstrip("+").partition("=")
    *way, last = key.split(".")
    node = tree
    for part in way:
        below = node.setdefault(part, {})
        if not isinstance(below, dict):
            return
        node = below
    if sign and not key.startswith("~"):
        with suppress(yaml.YAMLError):
            node[last] = yaml.safe_load(value)


def _copied(tree: Any) -> Any:
    if isinstance(tree, Mapping):
        return {str(key): _copied(value) for key, value in tree.items()}
    return [_copied(item) for item in tree] if isinstance(tree, list) else tree


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
