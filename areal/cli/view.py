"""Objects and processes as documents: what ``get``, ``describe`` and the shortcuts print. Reads state and /proc only.

A document is a typed tree, the same in JSON, YAML and JSONPath; tables pick from it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from areal.cli.output.table import Column, field
from areal.cli.output.units import age, iso
from areal.resources.kinds import API_VERSION, Ref

if TYPE_CHECKING:
    from areal.reconcilers.status import ObjectStatus
    from areal.runtime.backends.base import RunState
    from areal.state.home import Home
    from areal.state.records import StoredObject

Runs = Mapping[str, "RunState"]

_NAME = field("NAME", "metadata", "name")
_REF = Column("NAME", lambda row: f"{row['kind'].lower()}/{row['metadata']['name']}")
_AGE = Column("AGE", lambda row: _age(row["metadata"].get("createdAt")), right=True)
_COMMON = (
    field("READY", "status", "ready"),
    field("STATUS", "status", "phase", state=True),
)
_TAIL = (
    _AGE,
    field("GENERATION", "metadata", "generation", wide=True, right=True),
    field("SET", "metadata", "set", wide=True),
    field("LABELS", "metadata", "labels", wide=True),
    field("MESSAGE", "status", "message", wide=True),
)
_OWN = {
    "InferenceService": (field("ADDRESS", "status", "address"),),
    "Model": (field("SERVICE", "spec", "service"), field("BACKEND", "spec", "backend")),
    "AgentService": (field("ADDRESS", "status", "address"), field("AGENT", "spec", "agent", wide=True)),
    "TrainJob": (field("DRIVER", "spec", "driver", wide=True),),
}


def columns_for(kinds: Iterable[str]) -> tuple[Column, ...]:
    """One kind: its own columns too. Several: what all have, named KIND/NAME."""
    different = set(kinds)
    if len(different) == 1:
        return (_NAME, *_COMMON, *_OWN.get(different.pop(), ()), *_TAIL)
    return (_REF, *_COMMON, field("ADDRESS", "status", "address"), *_TAIL)


def document_name(document: Mapping[str, Any]) -> str:
    return f"{document['kind'].lower()}/{document['metadata']['name']}"


def document_of(found: StoredObject, status: ObjectStatus, *, defaults: bool = False) -> dict[str, Any]:
    """``apiVersion, kind, metadata, spec, status``; ``spec`` as the user set it, or with defaults filled in."""
    from areal.reconcilers.document import object_document

    return object_document(found, status, spec=with_defaults(found) if defaults else None)


def manifest(found: StoredObject) -> dict[str, Any]:
    """What the user has set and nothing else: applying it changes nothing."""
    metadata: dict[str, Any] = {"name": found.name}
    if found.labels:
        metadata["labels"] = dict(found.labels)
    if found.annotations:
        metadata["annotations"] = dict(found.annotations)
    if found.depends_on:
        metadata["dependsOn"] = list(found.depends_on)
    return {"apiVersion": API_VERSION, "kind": found.kind, "metadata": metadata, "spec": dict(found.spec)}


def with_defaults(found: StoredObject) -> dict[str, Any]:
    """The spec that is in force. Validates, so this is the slow path."""
    from areal.resources.registry import effective

    dumped: dict[str, Any] = effective(found.kind, found.spec).model_dump(mode="json", by_alias=True)
    return dumped


def origin_rows(found: StoredObject, *, defaults: bool = False) -> list[dict[str, Any]]:
    """One row a field: its value, the layer that set it, who, when, from which file."""
    from areal.resources.tree import leaves, path_text
    from areal.state.layers import origins

    by_path = {path_text(path): layer for path, layer in origins(found.layers).items()}
    rows = []
    for path, value in leaves(with_defaults(found) if defaults else found.spec).items():
        layer = by_path.get(path_text(path))
        row: dict[str, Any] = {"path": f"spec.{path_text(path)}", "value": value, "origin": "default"}
        if layer is not None:
            row.update(origin=layer.manager, actor=layer.actor, at=layer.at, source=source_text(layer.source))
        rows.append(row)
    return rows


ORIGIN_COLUMNS = (
    field("FIELD", "path"),
    Column("VALUE", lambda row: _compact(row["value"])),
    field("ORIGIN", "origin"),
    field("WHO", "actor"),
    field("SOURCE", "source"),
)


def source_text(source: Mapping[str, Any] | None) -> str | None:
    """``file:line`` of a manifest, None when there was no file."""
    if not source or not source.get("file"):
        return None
    return f"{source['file']}:{source['line']}" if source.get("line") else str(source["file"])


def read_runs(home: Home) -> dict[str, RunState]:
    from areal.runtime.backends import open_backend

    return dict(open_backend("local", home.root).observe())


def runs_of(runs: Runs, refs: Iterable[Ref]) -> list[RunState]:
    wanted = {str(ref) for ref in refs}
    return sorted((state for state in runs.values() if state.spec.owner in wanted), key=run_order)


def run_order(state: RunState) -> tuple[str, str, int, float]:
    """The newest of a slot last."""
    return state.spec.owner, state.spec.component, state.spec.replica, state.started_at or 0.0


def process_row(state: RunState) -> dict[str, Any]:
    """One process, typed."""
    last = state.last_exit
    return {
        "uid": state.spec.uid,
        "owner": state.spec.owner,
        "component": state.spec.component,
        "replica": state.spec.replica,
        "state": "halted" if state.halted else state.phase.value,  # by a signal: it lives, and does nothing
        "pid": state.pid,
        "shimPid": state.shim_pid,
        "gpus": list(state.spec.gpus),
        "ports": [*state.spec.ports, *state.spec.shared_ports],
        "url": state.spec.url,
        "startedAt": iso(state.started_at),
        "uptimeSeconds": None if state.started_at is None else round(max(0.0, time.time() - state.started_at), 1),
        "restarts": state.restarts,
        "lastExit": None
        if last is None
        else {"code": last.code, "signal": last.signal, "at": iso(last.at), "reason": last.reason},
        "reason": state.reason,
        "generation": state.spec.generation,
    }


def process_name(row: Mapping[str, Any]) -> str:
    return f"process/{row['uid']}"


PROCESS_COLUMNS = (
    field("OWNER", "owner"),
    field("COMPONENT", "component"),
    field("REPLICA", "replica", right=True),
    field("PID", "pid", right=True),
    field("GPU", "gpus"),
    field("PORT", "ports"),
    field("STATE", "state", state=True),
    field("RESTARTS", "restarts", right=True),
    Column("UPTIME", lambda row: age(row["uptimeSeconds"]), right=True),
    field("URL", "url", wide=True),
    field("UID", "uid", wide=True),
    field("REASON", "reason", wide=True),
)


def service_of(found: StoredObject) -> str | None:
    """The service that a model is attached to; None of another kind."""
    return str(found.spec.get("service", "default")) if found.kind == "Model" else None


def family(objects: Sequence[StoredObject], ref: Ref) -> list[Ref]:
    """The object, what it owns, and for a service every model attached to it: whose processes are its."""
    attached = [
        found.ref
        for found in objects
        if found.owner == str(ref) or (ref.kind == "InferenceService" and service_of(found) == ref.name)
    ]
    return list(dict.fromkeys([ref, *attached]))


def _age(created: Any) -> str:
    if not created:
        return "-"
    import calendar

    return age(time.time() - calendar.timegm(time.strptime(str(created), "%Y-%m-%dT%H:%M:%SZ")))


def _compact(value: Any) -> str:
    import json

    return json.dumps(value, ensure_ascii=False)
