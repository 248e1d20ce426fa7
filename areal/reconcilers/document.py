"""An object as one typed document, the same in JSON, YAML and JSONPath. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from areal.resources.kinds import API_VERSION

if TYPE_CHECKING:
    from areal.reconcilers.status import ObjectStatus
    from areal.state.records import StoredObject


def object_document(
    found: StoredObject, status: ObjectStatus, *, spec: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """``apiVersion, kind, metadata, spec, status``; ``spec`` as the user set it unless another is given."""
    metadata: dict[str, Any] = {
        "name": found.name,
        "uid": found.uid,
        "generation": found.generation,
        "revision": found.revision,
        "createdAt": iso(found.created_at),
        "labels": dict(found.labels),
        "annotations": dict(found.annotations),
        "dependsOn": list(found.depends_on),
    }
    optional = {"owner": found.owner, "set": found.set_name, "protected": found.protected or None}
    metadata.update({key: value for key, value in optional.items() if value is not None})
    return {
        "apiVersion": API_VERSION,
        "kind": found.kind,
        "metadata": metadata,
        "spec": dict(found.spec if spec is None else spec),
        "status": status_document(found, status),
    }


def status_document(found: StoredObject, status: ObjectStatus) -> dict[str, Any]:
    shown: dict[str, Any] = {
        **found.status,
        "phase": status.phase,
        "ready": status.ready,
        "desiredReplicas": status.desired,
        "readyReplicas": status.ready_replicas,
        "address": status.address or None,
        "message": status.message,
        "conditions": [condition.to_json() for condition in status.conditions],
    }
    return {key: value for key, value in shown.items() if value is not None}


def iso(at: float) -> str | None:
    """Seconds since the epoch as RFC 3339 in UTC; None for 0."""
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ") if at else None
