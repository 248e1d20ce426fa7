"""Objects and processes as documents, for ``get``, ``describe`` and the shortcuts. Reads state and /proc only.

A document is a typed tree, the same in JSON, YAML and JSONPath; tables pick from it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from areal.cli.table import Column, age, field, iso
from areal.resources.kinds import API_VERSION, KINDS, Ref

if TYPE_CHECKING:
    from areal.reconcilers.kinds.job_status import JobStatus
    from areal.reconcilers.status import ObjectStatus
    from areal.resources.resource import Resource
    from areal.runtime.backends.base import RunState
    from areal.state.home import Home
    from areal.state.records import Listing, StoredObject


class HomeView:
    """A home at one moment: its objects and processes, each read when it is first needed."""

    def __init__(self, home: Home) -> None:
        self.home = home

    @cached_property
    def objects(self) -> Listing[StoredObject]:
        from areal.state.objects import ObjectStore

        return ObjectStore(self.home).list()

    @cached_property
    def runs(self) -> Mapping[str, RunState]:
        from areal.runtime.backends import Backends

        return Backends(self.home.root).observe()

    def of_kind(self, kind: str) -> list[StoredObject]:
        from areal.state.objects import ObjectStore

        return list(ObjectStore(self.home).list(kind))

    def statuses(self, objects: Sequence[StoredObject], *, probe: bool = True) -> dict[str, ObjectStatus]:
        from areal.reconcilers.status import statuses

        return statuses(self.home, objects, self.runs if objects and probe else {})

    def states(self, refs: Iterable[Ref] | None = None) -> list[RunState]:
        """The processes of ``refs``, or all; by owner, component and replica, the newest of a slot last."""
        owners = {str(ref) for ref in refs} if refs is not None else None
        found = [state for state in self.runs.values() if owners is None or state.spec.owner in owners]
        return sorted(found, key=lambda state: (*_slot(state), state.started_at or 0.0))

    def family(self, ref: Ref) -> list[Ref]:
        """The object, the objects that it owns, and those that are attached to it, as models are to a service."""
        from areal.reconcilers.kinds import host_of

        return [ref, *(found.ref for found in self.objects if str(ref) in (found.owner, host_of(found)))]

    def ended(self) -> set[str]:
        """Objects that have ended for good, as a job that has succeeded or failed, and the objects that they own."""
        from areal.reconcilers.kinds import controller_of
        from areal.reconcilers.observe import ObservedRun

        ended = set()
        for item in self.objects:
            controller = controller_of(item.kind)
            if controller.runs_to_completion:
                runs = [ObservedRun(state) for state in self.states([item.ref])]
                if controller.finished(item.spec, runs):
                    ended.add(str(item.ref))
        while more := {str(item.ref) for item in self.objects if item.owner in ended} - ended:
            ended |= more
        return ended

    def job_status(self, job: StoredObject) -> JobStatus:
        from areal.reconcilers.kinds.job_status import job_status
        from areal.reconcilers.observe import ObservedRun

        runs = [ObservedRun(state) for state in self.states([job.ref])]
        return job_status(runs, suspended=bool(job.spec.get("suspend")))

    def address(self, ref: Ref) -> str:
        """The URL of a service's gateway; "" when none lives."""
        from areal.reconcilers.status import gateway_address

        return gateway_address(str(ref), self.runs.values())


def service_of(found: StoredObject) -> str | None:
    """The name of the service that a model is attached to; None of an object that is attached to nothing."""
    from areal.reconcilers.kinds import host_of

    host = host_of(found)
    return host.partition("/")[2] if host is not None else None


def _slot(state: RunState) -> tuple[str, str, int]:
    return state.spec.owner, state.spec.component, state.spec.replica


def replaced(states: Iterable[RunState]) -> set[str]:
    """The uids of exited processes whose slot (owner, component, replica) a living one has taken."""
    alive = {_slot(state) for state in states if state.pid}
    return {state.spec.uid for state in states if not state.pid and _slot(state) in alive}


# -- objects


def columns_for(kinds: Iterable[str]) -> tuple[Column, ...]:
    """Of one kind: its own columns too. Of several: the common columns, objects named KIND/NAME."""
    from areal.reconcilers.kinds import controller_of

    one, *more = dict.fromkeys(kinds) or KINDS
    own = (("ADDRESS", ("status", "address"), False),) if more else controller_of(one).columns
    return (
        Column("NAME", document_name) if more else field("NAME", "metadata", "name"),
        field("READY", "status", "ready"),
        field("STATUS", "status", "phase", state=True),
        *(field(title, *path, wide=wide) for title, path, wide in own),
        Column("AGE", _age, right=True),
        field("GENERATION", "metadata", "generation", wide=True, right=True),
        field("SET", "metadata", "set", wide=True),
        field("LABELS", "metadata", "labels", wide=True),
        field("MESSAGE", "status", "message", wide=True),
    )


def _age(document: Mapping[str, Any]) -> str:
    created = document["metadata"].get("createdAt")
    if not created:
        return "-"
    import calendar

    return age(time.time() - calendar.timegm(time.strptime(str(created), "%Y-%m-%dT%H:%M:%SZ")))


def document_name(document: Mapping[str, Any]) -> str:
    return f"{document['kind'].lower()}/{document['metadata']['name']}"


def document_of(found: StoredObject, status: ObjectStatus, *, defaults: bool = False) -> dict[str, Any]:
    """``apiVersion, kind, metadata, spec, status``; ``spec`` as the user set it, or with defaults filled in."""
    from areal.reconcilers.status import object_document

    return object_document(found, status, spec=with_defaults(found) if defaults else None)


def manifest(item: StoredObject | Resource) -> dict[str, Any]:
    """The fields that the user has set: applying it changes nothing."""
    metadata: dict[str, Any] = {"name": item.name}
    if item.labels:
        metadata["labels"] = dict(item.labels)
    if item.annotations:
        metadata["annotations"] = dict(item.annotations)
    if item.depends_on:
        metadata["dependsOn"] = [str(ref) for ref in item.depends_on]
    return {"apiVersion": API_VERSION, "kind": item.kind, "metadata": metadata, "spec": dict(item.spec)}


def with_defaults(found: StoredObject) -> dict[str, Any]:
    """The spec that is in force. Validates, so this is the slow path."""
    from areal.resources.validation import effective

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


def json_text(value: Any) -> str:
    import json

    return json.dumps(value, ensure_ascii=False)


ORIGIN_COLUMNS = (
    field("FIELD", "path"),
    Column("VALUE", lambda row: json_text(row["value"])),
    field("ORIGIN", "origin"),
    field("WHO", "actor"),
    field("SOURCE", "source"),
)


def source_text(source: Mapping[str, Any] | None) -> str | None:
    """``file:line`` of a manifest, None when there was no file."""
    if not source or not source.get("file"):
        return None
    return f"{source['file']}:{source['line']}" if source.get("line") else str(source["file"])


# -- processes


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
        **({"node": state.node} if state.node else {}),
        **({"jobId": state.job_id} if state.job_id else {}),
    }


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
