"""``areal describe``: one object, its spec by origin, its conditions, its processes, what happened last."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from areal.cli import options, view
from areal.cli.invocation import Invocation, pass_invocation
from areal.cli.output.emit import emit_one
from areal.cli.output.table import Column, field, render_table, text_of
from areal.cli.output.units import clock, iso
from areal.cli.remote import gateway
from areal.cli.targets import complete_targets, one_ref, stored

if TYPE_CHECKING:
    from areal.reconcilers.status import ObjectStatus
    from areal.runtime.backends.base import RunState
    from areal.state.events import Event
    from areal.state.records import StoredObject

_EVENTS = 10
_LOG_LINES = 8

_CONDITIONS = (
    field("TYPE", "type"),
    field("STATUS", "status", state=True),
    field("REASON", "reason"),
    field("SINCE", "lastTransitionTime"),
    field("MESSAGE", "message"),
)
EVENT_COLUMNS = (
    Column("WHEN", lambda row: clock(row["at"])),
    field("TYPE", "type", state=True),
    field("REASON", "reason"),
    field("OBJECT", "ref"),
    Column("MESSAGE", lambda row: f"{row['message']} (x{row['count']})" if row["count"] > 1 else row["message"]),
    field("WHO", "actor", wide=True),
)


@click.command()
@click.argument("targets", nargs=-1, required=True, metavar="KIND/NAME | KIND NAME", shell_complete=complete_targets)
@options.remote
@options.output()
@options.common
@pass_invocation
def describe(cli: Invocation, targets: tuple[str, ...]) -> int:
    """One object: its spec and who set each field, conditions, processes with their last exit, last events."""
    chosen = gateway(cli)
    if chosen is not None:
        return _remote(cli, targets)
    ref = one_ref(targets)
    document = describe_object(cli, stored(cli.home, ref))
    emit_one(cli, document, name=view.document_name(document), text=lambda: _page(document))
    return 0


def describe_object(cli: Invocation, found: StoredObject) -> dict[str, Any]:
    from areal.reconcilers.status import statuses
    from areal.state.events import EventLog
    from areal.state.objects import ObjectStore

    runs = view.read_runs(cli.home)
    objects = list(ObjectStore(cli.home).list())
    refs = view.family(objects, found.ref)
    related = [item for item in objects if item.ref in refs[1:]]
    seen = statuses(cli.home, [found, *related], runs)
    document = view.document_of(found, seen[str(found.ref)])
    document["origins"] = view.origin_rows(found)
    document["processes"] = [_process(cli, state) for state in view.runs_of(runs, refs)]
    document["related"] = [_related(seen[str(item.ref)]) for item in related]
    document["events"] = [event_row(event) for event in EventLog(cli.home).read(found.ref, _EVENTS)]
    return document


def _related(status: ObjectStatus) -> dict[str, Any]:
    return {"ref": status.ref, "phase": status.phase, "ready": status.ready, "message": status.message}


def _process(cli: Invocation, state: RunState) -> dict[str, Any]:
    """A process; of one that is not well, also what it said last."""
    row = view.process_row(state)
    if state.last_exit is not None and state.last_exit.reason != "stopped":
        from areal.runtime.logs import first_exception, tail

        paths = _log_paths(cli, state.spec.uid)
        row["firstException"] = first_exception(paths)
        row["lastLines"] = tail(paths, _LOG_LINES)
    return row


def _log_paths(cli: Invocation, uid: str) -> tuple[str, ...]:
    from areal.runtime.backends import open_backend

    return open_backend("local", cli.home.root).log_paths(uid)


def event_row(event: Event) -> dict[str, Any]:
    return {
        "ref": event.ref,
        "type": event.type,
        "reason": event.reason,
        "message": event.message,
        "actor": event.actor,
        "at": event.at,
        "time": iso(event.at),
        "count": event.count,
        "firstAt": event.first_at,
    }


def _page(document: Mapping[str, Any]) -> str:
    metadata, status = document["metadata"], document["status"]
    head = {
        "Name": metadata["name"],
        "Kind": document["kind"],
        "Status": f"{status['phase']} ({status['ready']})",
        "Message": status.get("message"),
        "Address": status.get("address"),
        "Generation": f"{metadata['generation']} (revision {metadata['revision']})",
        "Created": metadata["createdAt"],
        "Owner": metadata.get("owner"),
        "Set": metadata.get("set"),
        "Labels": metadata["labels"],
        "Annotations": metadata["annotations"],
        "Depends on": metadata["dependsOn"],
    }
    sections = [
        "\n".join(f"{title + ':':<13}{text_of(value)}" for title, value in head.items() if value),
        _section("Spec", document["origins"], view.ORIGIN_COLUMNS),
        _section("Conditions", status.get("conditions", []), _CONDITIONS),
        _section(
            "Objects",
            document["related"],
            (
                field("NAME", "ref"),
                field("READY", "ready"),
                field("STATUS", "phase", state=True),
                field("MESSAGE", "message"),
            ),
        ),
        _section("Processes", document["processes"], view.PROCESS_COLUMNS),
        *[_last_exit(process) for process in document["processes"] if process["lastExit"]],
        _section("Events", document["events"], tuple(c for c in EVENT_COLUMNS if c.title != "OBJECT")),
    ]
    return "\n\n".join(section for section in sections if section)


def _section(title: str, rows: Sequence[Mapping[str, Any]], columns: Sequence[Column]) -> str:
    if not rows:
        return f"{title}: none" if title != "Objects" else ""
    table = render_table(rows, columns, indent=2)
    return f"{title}:\n" + "\n".join(f"  {line}" for line in table.splitlines())


def _last_exit(process: Mapping[str, Any]) -> str:
    last = process["lastExit"]
    lines = [
        f"Last exit of {process['owner']} {process['component']}/{process['replica']}: {last['reason']}, {last['at']}"
    ]
    if process.get("firstException"):
        lines += [f"  | {line}" for line in process["firstException"].splitlines()]
        lines.append("  last lines:")
    lines += [f"  | {line}" for line in process.get("lastLines", [])]
    return "\n".join(lines)


def _remote(cli: Invocation, targets: tuple[str, ...]) -> int:
    from areal.cli.remote_view import describe_remote

    chosen = gateway(cli)
    assert chosen is not None
    document = describe_remote(chosen, one_ref(targets))
    from areal.cli.output.emit import to_yaml

    emit_one(cli, document, name=view.document_name(document), text=lambda: to_yaml([document]))
    return 0
