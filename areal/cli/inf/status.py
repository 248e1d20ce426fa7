"""``areal inf status``, ``ps``, ``models`` and ``logs``: services and models as they are."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from areal.cli.logs import LogQuery, log_options, show_logs
from areal.cli.objects import PROCESS_COLUMNS, HomeView, process_row, service_name, service_of, service_option, stored
from areal.cli.options import Invocation, read_options, watch_options
from areal.cli.output import Column, Row, age, emit_rows, field, render_table, show_status
from areal.cli.remote import gateway, gateway_of, local_options
from areal.errors import ArealError
from areal.resources.kinds import INFERENCE_SERVICE, MODEL, Ref, served_name

if TYPE_CHECKING:
    from areal.cli.inf.traffic import Traffic
    from areal.reconcilers.status import ObjectStatus
    from areal.state.records import StoredObject


@click.command()
@service_option
@log_options([INFERENCE_SERVICE, MODEL])
@local_options
def logs(cli: Invocation, service: str | None, query: LogQuery) -> int:
    """Logs of a service's processes and its models', merged in order of time."""
    return show_logs(cli, stored(cli.home, Ref(INFERENCE_SERVICE, service_name(cli, service))).ref, query)


# -- ps

_SERVICES = (
    field("SERVICE", "service"),
    field("STATUS", "phase", state=True),
    field("READY", "ready"),
    field("MODELS", "models"),
    field("GATEWAY", "address"),
    field("PID", "pid", right=True),
    Column("AGE", lambda row: age(row["ageSeconds"]), right=True),
    field("MESSAGE", "message", wide=True),
)


@click.command()
@click.option("-a", "--all", "all_", is_flag=True, help="Also services that are stopped.")
@read_options()
def ps(cli: Invocation, all_: bool) -> int:
    """List inference services; those that run, or with --all every one."""
    chosen = gateway(cli)
    if chosen is not None:
        from areal.cli.remote_view import service_status

        found = service_status(chosen)
        rows = [{**found, "models": len(found["models"]), "pid": None, "ageSeconds": None}]
    else:
        rows = [row for row in _services(HomeView(cli.home)) if all_ or row["phase"] != "Suspended"]
    emit_rows(cli, rows, _SERVICES, name="inferenceservice/{service}".format_map, empty="no inference service runs")
    return 0


def _services(home: HomeView) -> list[dict[str, Any]]:
    services = [item for item in home.objects if item.kind == INFERENCE_SERVICE]
    seen = home.statuses(services)
    rows = []
    for item in services:
        state = seen[str(item.ref)]
        gateways = (run.pid for run in home.states([item.ref]) if run.spec.component == "gateway" and run.pid)
        rows.append(
            {
                "service": item.name,
                "phase": state.phase,
                "ready": state.ready,
                "models": [model.name for model in home.objects if service_of(model) == item.name],
                "address": state.address,
                "pid": next(gateways, None),
                "ageSeconds": state.age_s,
                "message": state.message,
            }
        )
    return rows


# -- status

_MODELS = (
    field("MODEL", "name"),
    field("STATUS", "phase", state=True),
    field("READY", "ready"),
    field("BACKEND", "backend"),
    field("MESSAGE", "message"),
)


@click.command()
@service_option
@watch_options("Refresh until Ctrl-C, with rates and latencies.")
@read_options()
def status(cli: Invocation, service: str | None, watch: bool, interval: float) -> int:
    """Health of one service: its processes and its models, each asked. Exit status 1 when something is down.

    With --watch also what goes through it, from the metrics of its gateway and data proxies: requests and tokens a
    second, p50 and p99 of latencies since the last refresh, and each replica's load, sessions and weight version.
    """
    traffic: Traffic | None = None

    def look() -> dict[str, Any]:
        nonlocal traffic
        document = _status(cli, service)
        if watch and traffic is None:
            from areal.cli.inf.traffic import Traffic

            with contextlib.suppress(ArealError):  # it does not run, or has no key here: only its health is shown
                traffic = Traffic(gateway_of(cli, service))
        if traffic is not None:
            try:
                document["traffic"] = traffic.look()
            except ArealError as error:
                document["traffic"] = {"error": error.message}
        return document

    def page(document: Row) -> str:
        return _page(document, wide=cli.format.kind == "wide")

    name = "inferenceservice/{service}".format_map
    return 0 if show_status(cli, look, name, page, watch=watch, interval=interval)["healthy"] else 1


def _status(cli: Invocation, service: str | None) -> dict[str, Any]:
    chosen = gateway(cli)
    if chosen is not None:
        from areal.cli.remote_view import service_status

        return service_status(chosen)
    home = HomeView(cli.home)
    found = stored(cli.home, Ref(INFERENCE_SERVICE, service_name(cli, service)))
    models = [item for item in home.objects if service_of(item) == found.name]
    seen = home.statuses([found, *models])
    own = seen[str(found.ref)]
    rows = [model_row(item, seen[str(item.ref)]) for item in models]
    fine = {"Ready", "Suspended"}
    return {
        "service": found.name,
        "phase": own.phase,
        "ready": own.ready,
        "healthy": own.phase in fine and all(row["phase"] in fine for row in rows),
        "address": own.address,
        "message": own.message,
        "models": [{key: row[key] for key in ("name", "phase", "ready", "backend", "message")} for row in rows],
        "components": [process_row(state) for state in home.states([found.ref, *(item.ref for item in models)])],
    }


def _page(document: Mapping[str, Any], *, wide: bool) -> str:
    head = f"{document['service']}: {document['phase']} ({document['ready']})"
    head += f" at {document['address']}" if document["address"] else ""
    parts = [head + (f"\n{document['message']}" if document["message"] else "")]
    if document["models"]:
        parts.append(render_table(document["models"], _MODELS))
    if document["components"]:
        columns: tuple[Column, ...] = PROCESS_COLUMNS
        if "owner" not in document["components"][0]:
            from areal.cli.remote_view import WORKER_COLUMNS

            columns = WORKER_COLUMNS
        parts.append(render_table(document["components"], columns))
    traffic = document.get("traffic")
    if traffic is not None:
        from areal.cli.inf.traffic import page

        parts.append(traffic["error"] if "error" in traffic else page(traffic, wide=wide))
    return "\n\n".join(parts)


# -- models

_MODEL_COLUMNS = (
    field("NAME", "name"),
    field("STATUS", "phase", state=True),
    field("READY", "ready"),
    field("BACKEND", "backend"),
    field("PATH", "path"),
    field("SERVED AS", "servedModelName", wide=True),
    field("SERVICE", "service", wide=True),
    field("MESSAGE", "message", wide=True),
)


@click.command()
@service_option
@read_options()
def models(cli: Invocation, service: str | None) -> int:
    """List a service's models; of a remote gateway, those that it lists."""
    chosen = gateway(cli)
    if chosen is not None:
        from areal.cli.remote_view import model_rows

        rows = model_rows(chosen)
    else:
        name = stored(cli.home, Ref(INFERENCE_SERVICE, service_name(cli, service))).name
        home = HomeView(cli.home)
        found = [item for item in home.of_kind(MODEL) if service_of(item) == name]
        seen = home.statuses(found)
        rows = [model_row(item, seen[str(item.ref)]) for item in found]
    emit_rows(cli, rows, _MODEL_COLUMNS, name="model/{name}".format_map, empty="no model is registered")
    return 0


def model_row(model: StoredObject, state: ObjectStatus) -> dict[str, Any]:
    external = model.spec.get("external") or {}
    return {
        "name": model.name,
        "servedModelName": served_name(model.name, model.spec),
        "service": service_of(model),
        "backend": model.spec.get("backend") or ("external" if external else None),
        "path": model.spec.get("path") or external.get("url"),
        "phase": state.phase,
        "ready": state.ready,
        "replicas": state.desired,
        "readyReplicas": state.ready_replicas,
        "message": state.message,
    }
