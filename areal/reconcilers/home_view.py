"""A snapshot of a home, and its objects and processes as documents, for every reading verb and the web page.

A document is a typed tree, the same in JSON, YAML and JSONPath. Each part is read on first use.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from areal.dataclasses import asdict
from areal.numbers import iso
from areal.resources.kinds import API_VERSION, Ref

if TYPE_CHECKING:
    from areal.reconcilers.kinds.job_status import JobStatus
    from areal.reconcilers.observe import ObservedRun
    from areal.reconcilers.status import ObjectStatus
    from areal.resources.resource import Resource
    from areal.runtime.backends.base import RunState
    from areal.state.events import Event
    from areal.state.home import Home
    from areal.state.records import LayerSource, Listing, StoredObject

_EVENTS = 10  # of a description
_LOG_LINES = 8  # of a process that failed


class HomeView:
    """A snapshot of a home: its objects and processes, each read on first use."""

    def __init__(self, home: Home) -> None:
        self.home = home

    @cached_property
    def objects(self) -> Listing[StoredObject]:
        from areal.state.objects import ObjectStore

        return ObjectStore(self.home).list()

    @cached_property
    def _by_ref(self) -> dict[str, StoredObject]:
        return {str(item.ref): item for item in self.objects}

    @cached_property
    def runs(self) -> Mapping[str, RunState]:
        from areal.runtime.backends import Backends

        return Backends(self.home.root).observe()

    def of_kind(self, kind: str) -> Listing[StoredObject]:
        from areal.state.objects import ObjectStore

        return ObjectStore(self.home).list(kind)

    def statuses(self, objects: Sequence[StoredObject], *, probe: bool = True) -> dict[str, ObjectStatus]:
        from areal.reconcilers.status import statuses

        return statuses(self.home, objects, self.runs if objects and probe else {})

    def states(self, refs: Iterable[Ref] | None = None) -> list[RunState]:
        """Return the processes of ``refs``, or all, sorted by slot (owner, component, replica), then by start time."""
        owners = {str(ref) for ref in refs} if refs is not None else None
        found = [state for state in self.runs.values() if owners is None or state.spec.owner in owners]
        return sorted(found, key=lambda state: (*_slot(state), state.started_at or 0.0))

    def stage(self, state: RunState) -> str | None:
        """Return what a starting process is doing, as it reports itself."""
        from areal.runtime.backends import Backends

        found = Backends(self.home.root).stage(state.spec.uid)
        return found.stage if found is not None else None

    def is_removed(self, state: RunState) -> bool:
        """Return whether a process has ended with a replica that its object no longer has."""
        from areal.reconcilers.kinds import controller_of, host_of
        from areal.runtime.backends.base import ENDED

        owner = self._by_ref.get(state.spec.owner)
        if owner is None or state.phase not in ENDED or state.pid:
            return False
        host = self._by_ref.get(host_of(owner) or "")
        slots = controller_of(owner.kind).slots(owner.spec, host.spec if host is not None else None)
        return slots is not None and state.spec.replica >= slots.get(state.spec.component, 0)

    def gone(self, states: Sequence[RunState], *, failed: bool = True) -> set[str]:
        """Return the uids of processes that are gone: of removed replicas, of slots (owner, component, replica) that a
        successor has taken, and background commands that succeeded. ``failed`` False excludes processes that were
        replaced because they failed."""
        from areal.reconcilers.observe import ObservedRun
        from areal.runtime.backends.base import ENDED

        last: dict[tuple[str, str, int], RunState] = {}
        for state in sorted(states, key=lambda each: ObservedRun(each).ended_at):
            if state.phase not in ENDED or last.get(_slot(state), state).phase in ENDED:
                last[_slot(state)] = state

        def is_gone(state: RunState) -> bool:
            if not state.spec.owner:
                return not state.pid and state.last_exit is not None and state.last_exit.code == 0
            replaced = state.phase in ENDED and not state.pid and last[_slot(state)] is not state
            return self.is_removed(state) or (replaced and (failed or not has_failed(state)))

        return {state.spec.uid for state in states if is_gone(state)}

    def family(self, ref: Ref) -> list[Ref]:
        """Return the object, the objects that it owns, and the objects attached to it, as models to a service."""
        from areal.reconcilers.kinds import host_of

        return [ref, *(found.ref for found in self.objects if str(ref) in (found.owner, host_of(found)))]

    def logged(self, ref: Ref, component: str | None = None, replica: int | None = None) -> list[RunState]:
        """Return the processes of an object and its family whose logs are shown. Without ``replica``, processes of
        removed replicas are left out unless there are no others."""
        found = [
            state
            for state in self.states(self.family(ref))
            if component in (None, state.spec.component) and replica in (None, state.spec.replica)
        ]
        if replica is not None:
            return found
        return [state for state in found if not self.is_removed(state)] or found

    def ended(self) -> set[str]:
        """Return the objects that have completed, such as succeeded or failed jobs, and the objects that they own."""
        from areal.reconcilers.kinds import controller_of

        ended = set()
        for item in self.objects:
            controller = controller_of(item.kind)
            if controller.runs_to_completion and controller.completion(item.spec, self._observed(item.ref)).ended:
                ended.add(str(item.ref))
        while more := {str(item.ref) for item in self.objects if item.owner in ended} - ended:
            ended |= more
        return ended

    def job_status(self, job: StoredObject) -> JobStatus:
        from areal.reconcilers.kinds.job_status import job_status

        return job_status(self._observed(job.ref), suspended=bool(job.spec.get("suspend")) and not job.awaits)

    def _observed(self, ref: Ref) -> list[ObservedRun]:
        from areal.reconcilers.observe import ObservedRun

        return [ObservedRun(state) for state in self.states([ref])]

    def address(self, ref: Ref) -> str:
        """Return the URL of a service's gateway; "" if none runs."""
        from areal.reconcilers.kinds import controller_of

        return controller_of(ref.kind).address(self._observed(ref))


def service_of(found: StoredObject) -> str | None:
    """Return the name of the service that a model is attached to; None for an object without one."""
    from areal.reconcilers.kinds import host_of

    host = host_of(found)
    return host.partition("/")[2] if host is not None else None


def _slot(state: RunState) -> tuple[str, str, int]:
    return state.spec.owner, state.spec.component, state.spec.replica


def has_failed(state: RunState) -> bool:
    return state.last_exit is not None and state.last_exit.reason != "stopped"


def fields_document(value: Any) -> dict[str, object]:
    """Return the fields of a dataclass, with keys as in all documents: ``first_at`` is ``firstAt``."""
    return {
        re.sub("_([a-z])", lambda found: found[1].upper(), name): list(held) if isinstance(held, tuple) else held
        for name, held in asdict(value).items()
    }


def document_name(document: Mapping[str, Any]) -> str:
    return f"{document['kind'].lower()}/{document['metadata']['name']}"


def document_of(found: StoredObject, status: ObjectStatus, *, defaults: bool = False) -> dict[str, object]:
    """Return ``apiVersion, kind, metadata, spec, status``; ``spec`` as the user set it, or with defaults."""
    from areal.reconcilers.status import object_document

    return object_document(found, status, spec=with_defaults(found) if defaults else None)


def manifest(item: StoredObject | Resource) -> dict[str, Any]:
    """Return the manifest with the fields that the user has set. Applying it changes nothing."""
    from areal.state.records import AWAITING, JOB, StoredObject, effective

    asked = item.spec
    if isinstance(item, StoredObject):  # without what a job at rest, or one to wait for, has set
        asked = effective(tuple(layer for layer in item.layers if layer.manager not in (JOB, AWAITING)))
    metadata: dict[str, Any] = {"name": item.name}
    if item.labels:
        metadata["labels"] = dict(item.labels)
    if item.annotations:
        metadata["annotations"] = dict(item.annotations)
    if item.depends_on:
        metadata["dependsOn"] = [str(ref) for ref in item.depends_on]
    return {"apiVersion": API_VERSION, "kind": item.kind, "metadata": metadata, "spec": dict(asked)}


def with_defaults(found: StoredObject) -> dict[str, object]:
    """Return the spec with defaults. Slow, because it validates the spec."""
    from areal.resources.validation import effective

    dumped: dict[str, object] = effective(found.kind, found.spec).model_dump(mode="json", by_alias=True)
    return dumped


def origin_rows(found: StoredObject, *, defaults: bool = False) -> list[dict[str, Any]]:
    """Return a row per field: its value, the layer that set it, the actor, the time and the source file."""
    from areal.resources.tree import leaves, path_text
    from areal.state.records import origins

    by_path = {path_text(path): layer for path, layer in origins(found.layers).items()}
    rows = []
    for path, value in leaves(with_defaults(found) if defaults else found.spec).items():
        layer = by_path.get(path_text(path))
        row: dict[str, Any] = {"path": f"spec.{path_text(path)}", "value": value, "origin": "default"}
        if layer is not None:
            row.update(origin=layer.manager, actor=layer.actor, at=layer.at, source=source_text(layer.source))
        rows.append(row)
    return rows


def revision_rows(home: Home, ref: Ref) -> list[dict[str, Any]]:
    """Return the documents of an object's revisions, oldest first. ``changes``: the leaves that differ from the
    revision before it; empty for the first that is kept. Raises NotFound."""
    from areal.resources.tree import ABSENT, changes, path_text
    from areal.state.objects import ObjectStore

    def asked(item: StoredObject) -> dict[str, object]:
        return {"metadata": manifest(item)["metadata"], "spec": item.spec}

    def given(value: Any) -> Any:
        return None if value is ABSENT else value

    store = ObjectStore(home)
    current = store.expect(ref)
    before: StoredObject | None = None
    rows: list[dict[str, Any]] = []
    for item in store.revisions(ref):
        found = changes(asked(before), asked(item.object)) if before is not None else ()
        row: dict[str, Any] = {"revision": item.number, "at": item.at, "time": iso(item.at), "actor": item.actor}
        row |= {"source": source_text(item.source), "current": item.number == current.revision, "spec": item.spec}
        row["changes"] = [
            {"path": path_text(each.path), "old": given(each.old), "new": given(each.new)} for each in found
        ]
        rows.append(row)
        before = item.object
    return rows


def source_text(source: LayerSource | None) -> str | None:
    """Return ``file:line`` of a manifest; None if there was no file."""
    if not source or not source.get("file"):
        return None
    return f"{source['file']}:{source['line']}" if source.get("line") else source["file"]


def weights_text(status: Mapping[str, Any]) -> str:
    """Return ``version 353 of TrainJob/x, /path``: the weights that a model serves, from its status or row."""
    weights = status.get("weights") or {}
    version, writer = weights.get("version"), weights.get("writer")
    if version is None:
        return str(weights.get("path") or "")
    text = (
        f"version {version}" + (f" of {writer}" if writer else "") + (f", {weights['path']}" if weights["path"] else "")
    )
    return text + (f" (other replicas: {', '.join(map(str, weights['others']))})" if weights.get("others") else "")


def process_row(state: RunState) -> dict[str, object]:
    """Return the document of a process."""
    from areal.runtime.runs import is_placed

    last = state.last_exit
    return {
        "uid": state.spec.uid,
        "owner": state.spec.owner,
        "component": state.spec.component,
        "replica": state.spec.replica,
        "state": "halted" if state.halted else state.phase.value,  # halted: alive, but stopped by a signal or debugger
        "pid": state.pid,
        "shimPid": state.shim_pid,
        "gpus": list(state.gpus or state.spec.gpus),
        "ports": [*state.spec.ports, *state.spec.shared_ports],
        "url": state.spec.url if is_placed(state.spec) else None,
        "startedAt": iso(state.started_at),
        "uptimeSeconds": None
        if state.started_at is None or not state.pid
        else round(max(0.0, time.time() - state.started_at), 1),
        "restarts": state.restarts,
        "lastExit": None
        if last is None
        else {"code": last.code, "signal": last.signal, "at": iso(last.at), "reason": last.reason},
        "reason": last.reason if state.cause and last is not None else state.reason,
        "generation": state.spec.generation,
        **({"node": state.node} if state.node else {}),
        **({"jobId": state.job_id} if state.job_id else {}),
        **({"cause": str(state.cause)} if state.cause else {}),
        **({"queuedAt": iso(state.queued_at)} if state.job_id and state.queued_at else {}),
    }


def failed_process_row(home: Home, state: RunState) -> dict[str, object]:
    """Return the document of a process; if it failed, with its first exception and last log lines."""
    row = process_row(state)
    if has_failed(state):
        from areal.runtime.backends import Backends
        from areal.runtime.causes import first_exception
        from areal.runtime.logs import tail

        paths = Backends(home.root).log_paths(state.spec.uid)
        row["firstException"] = first_exception(paths)
        row["lastLines"] = tail(paths, _LOG_LINES)
    return row


def event_row(event: Event) -> dict[str, object]:
    """Return the document of an event."""
    return {**fields_document(event), "time": iso(event.at)}


def description(home: Home, ref: Ref) -> dict[str, object]:
    """Return everything known about an object: its document, the origin of its fields, its processes, objects that
    belong to it, and its last events. Raises NotFound and UnreadableFile."""
    from areal.state.events import EventLog
    from areal.state.objects import ObjectStore

    found = ObjectStore(home).expect(ref)
    view = HomeView(home)
    refs = view.family(found.ref)
    related = [item for item in view.objects if item.ref in refs[1:]]
    seen = view.statuses([found, *related])
    document = document_of(found, seen[str(found.ref)])
    document["origins"] = origin_rows(found)
    states = view.states(refs)
    gone = view.gone(states, failed=False)
    document["processes"] = [failed_process_row(home, state) for state in states if state.spec.uid not in gone]
    document["related"] = [
        {"ref": status.ref, "phase": status.phase, "ready": status.ready, "message": status.message}
        for status in (seen[str(item.ref)] for item in related)
    ]
    document["events"] = [event_row(event) for event in EventLog(home).read(found.ref, _EVENTS)]
    return document
