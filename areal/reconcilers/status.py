"""One object's status as a reader sees it: recomputed from what is there, never only from what was written down.

With ``probe`` False nothing but state and /proc is read, and nothing heavy is imported: ``areal get`` lives here.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from areal.reconcilers.health import Condition, Health, assess, conditions_of, unrouted
from areal.reconcilers.observed import ObservedRun, Seen

if TYPE_CHECKING:
    from areal.runtime.backends.base import RunState
    from areal.state.home import Home
    from areal.state.objects import StoredObject


@dataclass(frozen=True)
class ObjectStatus:
    ref: str
    phase: str
    ready: str  # "1/2"
    desired: int
    ready_replicas: int
    conditions: tuple[Condition, ...]
    address: str
    message: str
    age_s: float


def object_status(
    home: Home, obj: StoredObject, runs: Mapping[str, RunState] | Sequence[RunState], probe: bool = False
) -> ObjectStatus:
    """``runs`` may be those of every object: the object's own are picked out."""
    states = list(runs.values() if isinstance(runs, Mapping) else runs)
    mine = [state for state in states if state.spec.owner == str(obj.ref)]
    seen = _probed(mine) if probe else [ObservedRun(state) for state in mine]
    now = time.time()
    health = assess(obj.kind, obj.spec, seen)
    if health.phase in ("Missing", "Failed") and obj.kind == "Model" and service_is_suspended(home, obj):
        health = assess(obj.kind, obj.spec, seen, service_suspended=True)
    if probe and obj.kind == "Model" and health.phase == "Ready":
        health = _as_routed(home, obj, states, seen, health)
    previous: Sequence[Mapping[str, Any]] = obj.status.get("conditions", [])
    failure = _stored_failure(obj, previous)
    conditions = conditions_of(health, obj.generation, failure, previous, now)
    address = next((run.url for run in seen if run.state.spec.component == "gateway" and run.is_live), "")
    message = failure or health.message
    return ObjectStatus(
        str(obj.ref),
        "Degraded" if failure and health.phase == "Ready" else health.phase,  # the old version serves on
        health.fraction,
        health.desired,
        health.ready,
        conditions,
        address,
        message,
        max(0.0, now - obj.created_at) if obj.created_at else 0.0,
    )


def _probed(states: Sequence[RunState]) -> list[ObservedRun]:
    from areal.reconcilers.observe import probe_all

    return probe_all(states)


def _as_routed(
    home: Home, obj: StoredObject, states: Sequence[RunState], seen: Sequence[ObservedRun], health: Health
) -> Health:
    """Ready means that users' requests arrive: the router sends them. A router that does not answer is its service's
    trouble; the gateways go by what it said last."""
    from areal.reconcilers.observe import probe_all, read_table

    service = _service(home, obj)
    owner = f"InferenceService/{obj.spec.get('service', 'default')}"
    routers = [state for state in states if state.spec.owner == owner and state.spec.component == "router"]
    for router in probe_all(routers):
        table = read_table(home, router, service) if service is not None and router.seen is Seen.READY else ""
        if not isinstance(table, str):
            proxies = {run.uid for run in seen if run.state.spec.component == "data-proxy" and run.is_live}
            picked = [uid for uid, _, state in table.models.get(obj.name, ()) if state == "ready" and uid in proxies]
            return health if len(picked) >= health.desired else unrouted(health, len(picked))
    return health


def _service(home: Home, obj: StoredObject) -> StoredObject | None:
    from areal.resources.kinds import Ref
    from areal.state.objects import ObjectStore

    return ObjectStore(home).get(Ref("InferenceService", str(obj.spec.get("service", "default"))))


def service_is_suspended(home: Home, obj: StoredObject) -> bool:
    service = _service(home, obj)
    return service is not None and bool(service.spec.get("suspend"))


def _stored_failure(obj: StoredObject, previous: Sequence[Mapping[str, Any]]) -> str | None:
    """Why the last rollout failed, while it is about this generation; a later one that succeeds takes it back."""
    for condition in previous:
        current = condition.get("observedGeneration") == obj.generation
        if condition.get("type") == "Degraded" and condition.get("reason") == "RolloutFailed" and current:
            return str(condition.get("message", "")) or None
    return None
