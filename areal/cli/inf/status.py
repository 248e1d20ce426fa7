"""``areal inf status``, ``ps``, ``models`` and ``logs``: the state of services and models."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from areal.cli.logs import LogQuery, log_options, show_logs
from areal.cli.objects import service_name, service_option, stored
from areal.cli.options import Invocation, read_options, watch_options
from areal.cli.output import Column, emit_rows, field, render_table, report_unreadable
from areal.cli.remote import gateway, local_options
from areal.cli.services import list_services, service_columns, service_status, status_page, watch_service
from areal.client.gateway import GatewayClient
from areal.reconcilers.home_view import HomeView, service_of, weights_text
from areal.resources.kinds import INFERENCE_SERVICE, MODEL, Ref, served_name

if TYPE_CHECKING:
    from areal.cli.traffic import ServiceTraffic
    from areal.reconcilers.status import ObjectStatus
    from areal.state.records import StoredObject


@click.command()
@service_option
@log_options([INFERENCE_SERVICE, MODEL])
@local_options
def logs(cli: Invocation, service: str | None, query: LogQuery) -> int:
    """Print logs of a service's processes and its models', merged in order of time."""
    return show_logs(cli, stored(cli.home, Ref(INFERENCE_SERVICE, service_name(cli, service))).ref, query)


_SERVICES = service_columns(field("MODELS", "models"))


@click.command()
@click.option("-a", "--all", "all_", is_flag=True, help="Also services that are stopped.")
@read_options()
def ps(cli: Invocation, all_: bool) -> int:
    """List running inference services; with --all, also stopped ones."""

    def own(home: HomeView, item: StoredObject) -> Mapping[str, Any]:
        return {"models": [model.name for model in home.objects if service_of(model) == item.name]}

    def remote(chosen: GatewayClient) -> Mapping[str, Any]:
        from areal.cli.remote_view import service_status as remote_status

        found: Mapping[str, Any] = remote_status(chosen)
        return {**found, "models": len(found["models"])}

    return list_services(cli, INFERENCE_SERVICE, _SERVICES, all_=all_, own=own, remote=remote)


_MODELS = (
    field("MODEL", "name"),
    field("STATUS", "phase", state=True),
    field("READY", "ready"),
    field("BACKEND", "backend"),
    Column("WEIGHTS", weights_text),
    field("MESSAGE", "message"),
)


@click.command()
@service_option
@watch_options("Refresh until Ctrl-C, with rates and latencies.")
@read_options()
def status(cli: Invocation, service: str | None, watch: bool, interval: float) -> int:
    """Show the health of a service: its processes and its models, each probed. Exit status 1 when something is down.

    With --watch also its traffic, from the metrics of its gateway and data proxies: requests and tokens a second,
    p50 and p99 of latencies since the last refresh, and each replica's load, sessions and weight version.
    """

    def page(document: Mapping[str, Any]) -> str:
        from areal.cli.traffic import inference_page

        models = render_table(document["models"], _MODELS) if document["models"] else ""
        wide = cli.format.kind == "wide"
        return status_page(document, models, traffic=lambda found: inference_page(found, wide=wide))

    def traffic(chosen: GatewayClient) -> ServiceTraffic:
        from areal.cli.traffic import inference_traffic

        return inference_traffic(chosen)

    look = partial(_status, cli, service)
    return watch_service(cli, INFERENCE_SERVICE, service, look, page, traffic, watch=watch, interval=interval)


def _status(cli: Invocation, service: str | None) -> dict[str, object]:
    chosen = gateway(cli)
    if chosen is not None:
        from areal.cli.remote_view import service_status as remote_status

        return remote_status(chosen)
    home = HomeView(cli.home)
    found = stored(cli.home, Ref(INFERENCE_SERVICE, service_name(cli, service)))
    models = [item for item in home.objects if service_of(item) == found.name]
    document, seen = service_status(home, found, models)
    rows = [model_row(item, seen[str(item.ref)]) for item in models]
    shown = [{key: row[key] for key in ("name", "phase", "ready", "backend", "weights", "message")} for row in rows]
    lost = list(_unreadable_models(home, found.name))
    document |= {"models": [*shown, *lost], "healthy": document["healthy"] and not lost}
    return document


def _unreadable_models(home: HomeView, service: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of models whose records cannot be read, and which may belong to the service."""
    from areal.state.files import remedy
    from areal.state.upkeep import ref_of

    models = home.of_kind(MODEL)
    for path, reason in models.unreadable:
        presumed = models.presumed.get(path)
        if presumed is None or service_of(presumed) == service:
            message = f"its record is unreadable: {remedy(reason)}"
            row = {"phase": "Unknown", "ready": "", "backend": None, "weights": None, "message": message}
            yield {"name": ref_of(path).name, **row}


_MODEL_COLUMNS = (
    field("NAME", "name"),
    field("STATUS", "phase", state=True),
    field("READY", "ready"),
    field("BACKEND", "backend"),
    field("PATH", "path"),
    Column("WEIGHTS", lambda row: weights_text(row) if (row.get("weights") or {}).get("version") is not None else ""),
    field("SERVED AS", "servedModelName", wide=True),
    field("SERVICE", "service", wide=True),
    field("MESSAGE", "message", wide=True),
)


@click.command()
@service_option
@read_options()
def models(cli: Invocation, service: str | None) -> int:
    """List a service's models; of a remote gateway, those that it lists."""
    chosen, unreadable = gateway(cli), []
    if chosen is not None:
        from areal.cli.remote_view import model_rows

        rows = model_rows(chosen)
    else:
        name = stored(cli.home, Ref(INFERENCE_SERVICE, service_name(cli, service))).name
        home = HomeView(cli.home)
        recorded = home.of_kind(MODEL)
        found, unreadable = [item for item in recorded if service_of(item) == name], recorded.unreadable
        seen = home.statuses(found)
        rows = [model_row(item, seen[str(item.ref)]) for item in found]
    emit_rows(
        cli, rows, _MODEL_COLUMNS, name="model/{name}".format_map, empty="" if unreadable else "no model is registered"
    )
    return report_unreadable(cli, unreadable)


def model_row(model: StoredObject, state: ObjectStatus) -> dict[str, object]:
    external = model.spec.get("external") or {}
    return {
        "name": model.name,
        "servedModelName": served_name(model.name, model.spec),
        "service": service_of(model),
        "backend": model.spec.get("backend") or ("external" if external else None),
        "path": model.spec.get("path") or external.get("url"),
        "weights": state.details.get("weights"),
        "phase": state.phase,
        "ready": state.ready,
        "replicas": state.desired,
        "readyReplicas": state.ready_replicas,
        "message": state.message,
    }
