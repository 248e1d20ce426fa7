"""Small worlds for planning tests: what is recorded, what runs, what is routed. Values only, no process."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import starmap
from types import MappingProxyType
from typing import Any

from areal.reconcilers.desired import Target, Wanted, target_for
from areal.reconcilers.kinds import controller_of
from areal.reconcilers.kinds.model_plan import gpus_per_replica
from areal.reconcilers.observe import Health, Observed, ObservedRun, Seen
from areal.resources.validation import effective
from areal.runtime.backends.base import Capacity, LastExit, Phase, RunSpec, RunState
from areal.state.records import Layer, StoredObject
from areal.wire.routing import DEFAULT_READINESS, ModelEntry, Readiness, Snapshot, WorkerEntry

SERVICE = "InferenceService/default"
MODEL = "Model/qwen"
LIMITS = {"max_body_bytes": 64 * 2**20, "request_timeout_seconds": 3600.0, "max_queued_requests": 4096}


def stored(kind: str, name: str, spec: Mapping[str, Any], **fields: Any) -> StoredObject:
    layer = Layer("apply", dict(spec), None, "alice@box", 1.0)
    return StoredObject(kind, name, uid=f"uid-{name}", layers=(layer,), created_at=1.0, revision=1, **fields)


def service(spec: Mapping[str, Any] | None = None, **fields: Any) -> StoredObject:
    return stored("InferenceService", "default", spec or {}, **fields)


def model(spec: Mapping[str, Any] | None = None, name: str = "qwen", **fields: Any) -> StoredObject:
    base = {"service": "default", "backend": "embedded:d1", "path": "models/qwen"}
    return stored("Model", name, {**base, **(spec or {})}, **fields)


def unchanged(item: StoredObject) -> Target:
    return Target(item, "unchanged")


def wish(kind: str, name: str, spec: Mapping[str, Any], **fields: Any) -> Wanted:
    return Wanted(f"{kind}/{name}", kind, name, dict(spec), labels={}, annotations={}, **fields)


def changed(item: StoredObject, spec: Mapping[str, Any], **options: Any) -> Target:
    """The target of re-applying ``item`` with another spec."""
    defaults = {"set_name": None, "force_conflicts": False, "replace_it": False}
    return target_for(wish(item.kind, item.name, spec), item, **{**defaults, **options})


def created(kind: str, name: str, spec: Mapping[str, Any]) -> Target:
    return target_for(wish(kind, name, spec), None, set_name=None, force_conflicts=False, replace_it=False)


def gpus_of(item: StoredObject) -> int:
    """GPUs of one replica of a model."""
    return gpus_per_replica(effective("Model", item.spec))


def run(
    item: StoredObject,
    component: str,
    replica: int = 0,
    phase: Phase = Phase.RUNNING,
    seen: Seen = Seen.READY,
    uid: str = "",
    **inputs: Any,
) -> ObservedRun:
    ports = {"router": 20001, "gateway": 8080, "engine": 21000, "worker": 21000, "data-proxy": 22000, "speaker": 23000}
    port = ports[component] + replica
    uid = uid or f"{item.name}-{component}-{replica}"
    spec = RunSpec(
        uid=uid,
        owner=str(item.ref),
        component=component,
        replica=replica,
        argv=("true",),
        ports=(port,),
        gpus=tuple(f"GPU-of-{uid}-{index}" for index in range(gpus_of(item) if component == "engine" else 0)),
        url=f"http://127.0.0.1:{port}",
        spec=item.spec,
        inputs=inputs,
    )
    died = phase in (Phase.BACKOFF, Phase.EXITED, Phase.DEAD, Phase.CRASHLOOP)
    last = LastExit(None, 9, 5.0, "killed by SIGKILL") if died else None
    return ObservedRun(RunState(spec, phase, pid=100, shim_pid=99, last_exit=last), Seen.UNSEEN if died else seen)


def replica(item: StoredObject, index: int = 0, *, suffix: str = "") -> list[ObservedRun]:
    engine = run(item, "engine", index, uid=f"{item.name}-engine-{index}{suffix}")
    proxy = run(item, "data-proxy", index, uid=f"{item.name}-data-proxy-{index}{suffix}", engineUrl=engine.url)
    return [engine, proxy]


def front(item: StoredObject) -> list[ObservedRun]:
    router = run(item, "router")
    return [router, run(item, "gateway", routerUrl=router.url)]


def table(
    routes: Mapping[str, Sequence[ObservedRun]], *, synced: bool = True, readiness: Readiness = DEFAULT_READINESS
) -> Snapshot:
    workers = {name: [(r.uid, r.url, "ready") for r in runs] for name, runs in routes.items()}
    return snapshot(workers, synced=synced, readiness=readiness)


def snapshot(
    workers: Mapping[str, Iterable[tuple[str, str, str]]] = MappingProxyType({}),
    strategy: str = "auto",
    *,
    synced: bool = True,
    readiness: Readiness = DEFAULT_READINESS,
) -> Snapshot:
    """A router's table. ``workers``: id, address and state of each, by model."""
    models = {
        name: ModelEntry(name, tuple(starmap(WorkerEntry, each)), readiness=readiness) for name, each in workers.items()
    }
    return Snapshot("epoch", 1, synced, strategy, LIMITS, models)


def world(
    runs: Sequence[ObservedRun], routes: Snapshot | str | None = None, gpus: int = 0, service: str = SERVICE
) -> Observed:
    grouped: dict[str, tuple[ObservedRun, ...]] = {}
    for item in runs:
        owner = item.state.spec.owner
        grouped[owner] = (*grouped.get(owner, ()), item)
    return Observed(
        grouped,
        {} if routes is None else {service: routes},
        Capacity(gpus=tuple(f"GPU-{index}" for index in range(gpus))),
    )


def steady(count: int = 1, spec: Mapping[str, Any] | None = None) -> tuple[StoredObject, StoredObject, Observed]:
    """A service with one model that is exactly as recorded."""
    home = service()
    item = model({"replicas": count, **(spec or {})})
    proxies = [pair for index in range(count) for pair in replica(item, index)]
    routed = [one for one in proxies if one.state.spec.component == "data-proxy"]
    return home, item, world([*front(home), *proxies], table({item.name: routed}))


def without(observed: Observed, uid: str, phase: Phase = Phase.BACKOFF) -> Observed:
    """The same world after ``uid`` died."""
    died = LastExit(None, 9, 5.0, "killed by SIGKILL")
    runs = {
        ref: tuple(
            replace(one, state=replace(one.state, phase=phase, pid=None, last_exit=died), seen=Seen.UNSEEN)
            if one.uid == uid
            else one
            for one in items
        )
        for ref, items in observed.runs.items()
    }
    return replace(observed, runs=runs)


def assess(ref: str, spec: Mapping[str, Any], seen: Observed, host: Mapping[str, Any] | None = None) -> Health:
    return controller_of(ref.partition("/")[0]).health(ref, spec, seen, host)
