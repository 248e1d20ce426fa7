"""How a gateway elsewhere and its models are doing, by what it and its router have told. Pure.

Ready is only what was asked and has answered, as in the views of this machine: the gateway by ``GET /ready``, its
router and each worker by ``GET /workers``, which needs the admin key. A model that is only listed is Unknown: a
gateway lists a model while its workers are dead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from areal.cli.remote import KeyRefused
from areal.errors import ArealError
from areal.reconcilers.health import Health

_STATES = ("dead", "draining", "cordoned")  # of workers that get no new calls
_COMPONENTS = 2  # of a service: the router, the gateway


@dataclass(frozen=True)
class Told:
    """What one gateway answered to questions that were asked together; an error in the place of an answer.

    ``ready`` is the status and the body of /ready, ``listed`` the entries of /v1/models, ``workers`` the body of
    /workers.
    """

    ready: tuple[int, Any] | ArealError
    listed: Sequence[Mapping[str, Any]] | ArealError
    workers: Mapping[str, Any] | ArealError

    @property
    def worker_rows(self) -> list[Mapping[str, Any]]:
        rows = [] if isinstance(self.workers, ArealError) else self.workers.get("workers")
        return [row for row in rows if isinstance(row, Mapping)] if isinstance(rows, list) else []


def service_health(told: Told) -> Health:
    """Of the gateway and its router. A key that may not ask the router knows nothing of it."""
    if isinstance(told.ready, ArealError):
        return Health("Unknown", 0, _COMPONENTS, "NoAnswer", told.ready.message)
    status, body = told.ready
    reason = body.get("reason") if isinstance(body, Mapping) else None
    if status == 503:
        return Health("Progressing", 0, _COMPONENTS, "NotReady", f"the gateway is not ready: {reason or 'it says 503'}")
    if status != 200:
        return Health("Unknown", 0, _COMPONENTS, "NoAnswer", f"the gateway answers {status} to GET /ready")
    if isinstance(told.workers, ArealError):
        phase = "Unknown" if isinstance(told.workers, KeyRefused) else "Degraded"
        return Health(phase, 1, _COMPONENTS, "RouterNotSeen", f"the router was not seen: {_whole(told.workers)}")
    return Health("Ready", _COMPONENTS, _COMPONENTS, "AllReady")


def model_healths(told: Told) -> dict[str, Health]:
    """Of each model that is listed, or has a worker, or is declared at the router; an adapter is as its model is."""
    listed = [] if isinstance(told.listed, ArealError) else told.listed
    parents = {str(item.get("id")): str(item.get("parent") or item.get("id")) for item in listed}
    if isinstance(told.workers, ArealError):
        why = f"its workers were not seen: {_whole(told.workers)}"
        return {name: Health("Unknown", 0, 0, "WorkersNotSeen", why) for name in parents}
    declared = told.workers.get("models")
    expected = {
        name: entry.get("expected")
        for name, entry in (declared.items() if isinstance(declared, Mapping) else ())
        if isinstance(entry, Mapping)
    }
    of_model: dict[str, list[Mapping[str, Any]]] = {}
    for row in told.worker_rows:
        if row.get("model"):
            of_model.setdefault(str(row["model"]), []).append(row)
    known = dict.fromkeys((*parents.values(), *of_model, *(name for name, count in expected.items() if count)))
    healths = {
        name: _model_health(of_model.get(name, ()), expected.get(name), name in parents, told.listed) for name in known
    }
    return {name: healths[base] for name, base in parents.items()} | healths


def _model_health(
    workers: Sequence[Mapping[str, Any]], expected: Any, listed: bool, listing: Sequence[Any] | ArealError
) -> Health:
    ready = [row for row in workers if row.get("state") == "ready"]
    dead = [row for row in workers if row.get("state") == "dead"]
    desired = expected if type(expected) is int else max(1, len(ready) + len(dead))
    count = min(len(ready), desired)
    message = f"{len(ready)} of {desired} replicas are ready"
    others = [
        f"{row.get('worker_id')} is {row['state']}{_fault(row)}" for row in workers if row.get("state") in _STATES
    ]
    if others:
        message += f": {', '.join(others)}"
    if len(ready) < desired:
        return Health("Degraded" if listed else "Progressing", count, desired, "NotReady", message)
    if isinstance(listing, ArealError):
        return Health("Unknown", 0, desired, "GatewayNotSeen", f"the workers are ready, but {listing.message}")
    if not listed:
        return Health("Progressing", count, desired, "NotListed", "the gateway does not list it yet")
    return Health("Ready", count, desired, "AllReady")


def _fault(row: Mapping[str, Any]) -> str:
    return f" ({row['fault']})" if row.get("fault") else ""


def _whole(error: ArealError) -> str:
    return f"{error.message}: {error.detail}" if error.detail else error.message
