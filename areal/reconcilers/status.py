"""Objects' statuses as a reader sees them: recomputed from what is there, never only from what was written down.

Every verb that prints a status comes here, with one look at all processes that it needs. Nothing heavy is imported:
``areal get`` lives here.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from areal.reconcilers.health import Condition, Health, assess, conditions_of
from areal.reconcilers.observe import look
from areal.reconcilers.observed import Observed, ObservedRun
from areal.resources.kinds import Ref

if TYPE_CHECKING:
    from areal.runtime.backends.base import RunState
    from areal.state.home import Home
    from areal.state.objects import StoredObject

_TIMEOUT_S = 1.5  # for all probes together: whoever asks for a status waits for it

Runs = Mapping[str, "RunState"]


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


def statuses(home: Home, objects: Iterable[StoredObject], runs: Runs) -> dict[str, ObjectStatus]:
    """The status of each object, by its reference. ``runs`` may be those of every object: what is needed is picked
    out, the processes of the models' services too."""
    mine = list(objects)
    services = _services(home, mine)
    owners = {str(item.ref) for item in mine} | set(services)
    seen = look([state for state in runs.values() if state.spec.owner in owners], _TIMEOUT_S)
    return {str(item.ref): _status(item, seen, services) for item in mine}


def object_status(home: Home, obj: StoredObject, runs: Runs) -> ObjectStatus:
    return statuses(home, [obj], runs)[str(obj.ref)]


def gateway_address(service: str, states: Iterable[RunState]) -> str:
    """Where the gateway of ``InferenceService/NAME`` listens, from its record; "" when none lives."""
    runs = (ObservedRun(s) for s in states if s.spec.owner == service and s.spec.component == "gateway")
    return next((run.url for run in runs if run.is_live), "")


def health_of(obj: StoredObject, seen: Observed, services: Mapping[str, StoredObject]) -> Health:
    """``services`` are the recorded ones, by reference."""
    service = services.get(service_ref(obj)) if obj.kind == "Model" else None
    return assess(str(obj.ref), obj.spec, seen, service.spec if service is not None else None)


def service_ref(model: StoredObject) -> str:
    return f"InferenceService/{model.spec.get('service', 'default')}"


def _services(home: Home, objects: Sequence[StoredObject]) -> dict[str, StoredObject]:
    """The recorded services of the models among ``objects``."""
    from areal.state.objects import ObjectStore

    known = {str(item.ref): item for item in objects if item.kind == "InferenceService"}
    missing = {service_ref(item) for item in objects if item.kind == "Model"} - known.keys()
    store = ObjectStore(home)
    found = (store.get(Ref("InferenceService", ref.partition("/")[2])) for ref in sorted(missing))
    return known | {str(item.ref): item for item in found if item is not None}


def _status(obj: StoredObject, seen: Observed, services: Mapping[str, StoredObject]) -> ObjectStatus:
    now = time.time()
    health = health_of(obj, seen, services)
    previous: Sequence[Mapping[str, Any]] = obj.status.get("conditions", [])
    failure = _stored_failure(obj, previous)
    ref = str(obj.ref)
    return ObjectStatus(
        ref,
        "Degraded" if failure and health.phase == "Ready" else health.phase,  # the old version serves on
        health.fraction,
        health.desired,
        health.ready,
        conditions_of(health, obj.generation, failure, previous, now),
        gateway_address(ref, [run.state for run in seen.of(ref)]),
        failure or health.message,
        max(0.0, now - obj.created_at) if obj.created_at else 0.0,
    )


def _stored_failure(obj: StoredObject, previous: Sequence[Mapping[str, Any]]) -> str | None:
    """Why the last rollout failed, while it is about this generation; a later one that succeeds takes it back."""
    for condition in previous:
        current = condition.get("observedGeneration") == obj.generation
        if condition.get("type") == "Degraded" and condition.get("reason") == "RolloutFailed" and current:
            return str(condition.get("message", "")) or None
    return None
