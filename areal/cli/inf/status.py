"""``areal inf status``: the health of one service; with ``--watch`` also what goes through it."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from areal.cli import options, view
from areal.cli.inf.address import gateway_of
from areal.cli.inf.flags import service_name, service_option
from areal.cli.invocation import Invocation, fancy, pass_invocation
from areal.cli.options import Seconds
from areal.cli.output.emit import compact, emit_one, show, write
from areal.cli.output.table import Column, field, render_table
from areal.cli.remote import gateway
from areal.cli.targets import stored
from areal.errors import ArealError
from areal.resources.kinds import Ref
from areal.terminal import ESCAPE, spelled

if TYPE_CHECKING:
    from areal.cli.inf.traffic import Traffic

_KIND = "InferenceService"
_HOME, _LINE_END, _BELOW = f"{ESCAPE}[H", f"{ESCAPE}[K", f"{ESCAPE}[J"
_MODELS = (
    field("MODEL", "name"),
    field("STATUS", "phase", state=True),
    field("READY", "ready"),
    field("BACKEND", "backend"),
    field("MESSAGE", "message"),
)


@click.command()
@service_option
@click.option("-w", "--watch", is_flag=True, help="Refresh until Ctrl-C, with rates and latencies.")
@click.option("--interval", type=Seconds(), default="2s", show_default=True, metavar="TIME", help="Between refreshes.")
@options.remote
@options.output()
@options.common
@pass_invocation
def status(cli: Invocation, service: str | None, watch: bool, interval: float) -> int:
    """Health of one service: its processes and its models, each asked. Exit status 1 when something is down.

    With --watch also what goes through it, from the metrics of its gateway and data proxies: requests and tokens a
    second, p50 and p99 of latencies since the last refresh, and each replica's load, sessions and weight version.
    """
    if not watch:
        document = _document(cli, service)
        emit_one(cli, document, name=f"inferenceservice/{document['service']}", text=lambda: _page(document))
        return 0 if document["healthy"] else 1
    traffic: Traffic | None = None
    while True:
        document = _document(cli, service)
        traffic = traffic or _traffic(cli, service)
        if traffic is not None:
            document["traffic"] = _seen(traffic)
        _show(cli, document)
        time.sleep(interval)


def _document(cli: Invocation, service: str | None) -> dict[str, Any]:
    chosen = gateway(cli)
    if chosen is None:
        return _status(cli, service_name(cli, service))
    from areal.cli.remote_view import service_status

    return service_status(chosen)


def _traffic(cli: Invocation, service: str | None) -> Traffic | None:
    """None while the service does not run, or its key is not to be had: its health is shown all the same."""
    from areal.cli.inf.traffic import Traffic

    try:
        return Traffic(gateway_of(cli, service))
    except ArealError:
        return None


def _seen(traffic: Traffic) -> dict[str, Any] | None:
    try:
        return traffic.look()
    except ArealError as error:
        return {"error": error.message}


def _show(cli: Invocation, document: Mapping[str, Any]) -> None:
    """On a terminal in place, line by line, so that nothing flickers; elsewhere one after the other."""
    wide = cli.format.kind == "wide"
    if not cli.format.is_table:
        write(compact(document))
    elif fancy(sys.stdout):
        lines = spelled(_watched(document, wide)).splitlines()
        sys.stdout.write(_HOME + "".join(f"{line}{_LINE_END}\n" for line in lines) + _BELOW)
    else:
        show(_watched(document, wide) + "\n")
    sys.stdout.flush()


def _watched(document: Mapping[str, Any], wide: bool) -> str:
    from areal.cli.inf.traffic import page

    traffic = document.get("traffic")
    if traffic is None:
        return _page(document)
    return _page(document) + "\n\n" + (traffic["error"] if "error" in traffic else page(traffic, wide=wide))


def _status(cli: Invocation, name: str) -> dict[str, Any]:
    from areal.reconcilers.status import statuses
    from areal.state.objects import ObjectStore

    found = stored(cli.home, Ref(_KIND, name))
    runs = view.read_runs(cli.home)
    objects = list(ObjectStore(cli.home).list())
    models = [item for item in objects if view.service_of(item) == name]
    seen = statuses(cli.home, [found, *models], runs)
    own = seen[str(found.ref)]
    rows = []
    for item in models:
        state = seen[str(item.ref)]
        rows.append(
            {
                "name": item.name,
                "phase": state.phase,
                "ready": state.ready,
                "backend": item.spec.get("backend") or ("external" if item.spec.get("external") else None),
                "message": state.message,
            }
        )
    fine = {"Ready", "Suspended"}
    return {
        "service": name,
        "phase": own.phase,
        "ready": own.ready,
        "healthy": own.phase in fine and all(row["phase"] in fine for row in rows),
        "address": own.address,
        "message": own.message,
        "models": rows,
        "components": [view.process_row(s) for s in view.runs_of(runs, [found.ref, *(m.ref for m in models)])],
    }


def _page(document: Mapping[str, Any]) -> str:
    head = f"{document['service']}: {document['phase']} ({document['ready']})"
    head += f" at {document['address']}" if document["address"] else ""
    parts = [head + (f"\n{document['message']}" if document["message"] else "")]
    if document["models"]:
        parts.append(render_table(document["models"], _MODELS))
    if document["components"]:
        columns = view.PROCESS_COLUMNS if "owner" in document["components"][0] else _worker_columns()
        parts.append(render_table(document["components"], columns))
    return "\n\n".join(parts)


def _worker_columns() -> tuple[Column, ...]:
    from areal.cli.remote_view import WORKER_COLUMNS

    return WORKER_COLUMNS
