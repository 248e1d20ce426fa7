"""``areal agent run``, ``stop``, ``status``, ``ps``, ``logs``, ``scaleup`` and ``scaledown``."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from areal.cli.agent.sessions import service_option
from areal.cli.apply import resource, spec_of
from areal.cli.logs import LogQuery, log_options, show_logs
from areal.cli.manifest import DryRunCommand, dry_run_option
from areal.cli.objects import complete_names, stored
from areal.cli.options import Invocation, Seconds, change_options, env_option, read_options, timeout, watch_options
from areal.cli.output import field
from areal.cli.remote import gateway, local_options
from areal.cli.services import (
    ScaleFlags,
    gateway_options,
    list_services,
    run_service,
    scale_options,
    scale_service,
    service_columns,
    service_status,
    service_stop_options,
    status_page,
    stop_service,
    watch_service,
    with_applied,
)
from areal.client.gateway import GatewayClient
from areal.errors import ArealError, UsageFault
from areal.reconcilers.home_view import HomeView
from areal.resources.kinds import AGENT_SERVICE, INFERENCE_SERVICE, MODEL, Ref, check_name

if TYPE_CHECKING:
    from areal.cli.traffic import ServiceTraffic
    from areal.state.records import StoredObject

_LAUNCH_S = 60.0
_SETUP_S = 120.0


@click.command(cls=DryRunCommand)
@click.option("--service", metavar="NAME", default="default", show_default=True, help="The agent service.")
@click.option("--agent", metavar="MODULE:CLASS", help="The agent.")
@click.option("--command", metavar="WORDS", help="Instead: a program that answers a message, and its arguments.")
@click.option("--pairs", type=click.IntRange(min=0), metavar="N", help="Worker and data-proxy pairs  [default: 1].")
@gateway_options(8090)
@click.option(
    "--inf",
    metavar="SERVICE",
    shell_complete=complete_names(INFERENCE_SERVICE),
    help="Inference service that records model calls.",
)
@click.option("--model", metavar="NAME", shell_complete=complete_names(MODEL), help="Its model.")
@click.option("--session-timeout", type=Seconds(), metavar="TIME", help="An idle session ends after  [default: 30m].")
@click.option("--drain-timeout", type=Seconds(), metavar="TIME", help="Running turns may end within  [default: 10m].")
@click.option("--health-poll-interval", type=Seconds(), metavar="TIME", help="Between health checks  [default: 5s].")
@click.option("--setup-timeout", type=Seconds(), metavar="TIME", help="A pair must be ready within  [default: 2m].")
@env_option("the workers")
@dry_run_option
@change_options(timeout(what="Give up waiting after this long in all (exit 7)"), destructive=True)
def run(
    cli: Invocation,
    /,
    service: str,
    detach: bool,
    force: bool,
    env: tuple[tuple[str, str], ...],
    dry_run: str | None,
    **settings: Any,
) -> int:
    """Start an agent service: a gateway, a router, and pairs of worker and data proxy.

    \b
    areal agent run -d --agent my_agent:MyAgent
    areal agent run -d --agent my_agent:MyAgent --pairs 4 --inf default --model qwen
    areal agent run -d --command "node agent.js"

    The agent is imported from the current folder. With --inf, that service records its model calls.
    """
    if (command := settings["command"]) is not None:
        try:
            settings["command"] = shlex.split(command)
        except ValueError as error:
            raise UsageFault(f"--command: {error}: {command!r}") from None
    if settings["model"] and not settings["inf"]:
        raise UsageFault("--model needs --inf SERVICE, the inference service of the model")
    ref = Ref(AGENT_SERVICE, check_name(service))
    spec = spec_of({**settings, "env": dict(env)})
    manifest = with_applied(cli, resource(AGENT_SERVICE, ref.name, spec), force=force)
    if not {"agent", "command"} & manifest["spec"].keys():
        hint = "or a program: --command WORDS"
        raise UsageFault("no agent is given: --agent MODULE:CLASS is missing", hint=hint)
    setup_timeout = settings["setup_timeout"]
    seconds = _LAUNCH_S + (_SETUP_S if setup_timeout is None else setup_timeout)
    seconds = cli.deadline_s(seconds, flagged=setup_timeout is not None)
    return run_service(cli, ref, [manifest], seconds=seconds, detach=detach, force=force, dry_run=dry_run)


@click.command()
@service_option
@service_stop_options
@change_options(destructive=True)
def stop(cli: Invocation, service: str, **given: Any) -> int:
    """Stop an agent service, and forget it with its sessions, after a confirmation. Running turns may end within the
    grace. With --keep-state the service and its sessions stay.

    A running TrainJob that uses it is deleted only with --cascade, after a confirmation.
    """
    return stop_service(cli, AGENT_SERVICE, service, **given)


@click.command()
@service_option
@log_options([AGENT_SERVICE], replica="One pair.")
@local_options
def logs(cli: Invocation, service: str, query: LogQuery) -> int:
    """Print logs of an agent service's processes, merged in order of time."""
    return show_logs(cli, stored(cli.home, Ref(AGENT_SERVICE, service)).ref, query)


@click.command()
@service_option
@scale_options("--pairs")
def scaleup(cli: Invocation, service: str, scale: ScaleFlags) -> int:
    """Add pairs: to --pairs N, or --by N. They get new sessions once they are ready."""
    return _scale(cli, service, scale, up=True)


@click.command()
@service_option
@scale_options("--pairs")
def scaledown(cli: Invocation, service: str, scale: ScaleFlags) -> int:
    """Remove pairs: to --pairs N, or --by N. Their turns finish, their sessions move to other pairs."""
    return _scale(cli, service, scale, up=False)


def _scale(cli: Invocation, service: str, scale: ScaleFlags, *, up: bool) -> int:
    scale.require_one("--pairs")
    found = stored(cli.home, Ref(AGENT_SERVICE, service))
    return scale_service(cli, found, scale, f"areal agent {{}} --service {service}", up=up)


_SERVICES = service_columns(field("PAIRS", "pairs", right=True), field("AGENT", "agent", wide=True))


@click.command()
@click.option("-a", "--all", "all_", is_flag=True, help="Also services that are stopped.")
@read_options()
def ps(cli: Invocation, all_: bool) -> int:
    """List running agent services; with --all, also stopped ones."""
    return list_services(cli, AGENT_SERVICE, _SERVICES, all_=all_, own=_about, remote=_remote)


def _about(home: HomeView, item: StoredObject) -> dict[str, object]:
    return {"pairs": item.spec.get("pairs", 1), "agent": item.spec.get("agent") or item.spec.get("command")}


@click.command()
@service_option
@watch_options("Refresh until Ctrl-C, with rates and latencies.")
@read_options()
def status(cli: Invocation, service: str, watch: bool, interval: float) -> int:
    """Show the health of an agent service, each process probed. Exit status 1 when something is down.

    With --watch also its traffic, from the metrics of its gateway and data proxies: sessions, turns a second,
    p50 and p99 of latencies since the last refresh, failures and rewards.
    """

    def page(document: Mapping[str, Any]) -> str:
        from areal.cli.traffic import agent_page

        return status_page(document, traffic=agent_page)

    def traffic(chosen: GatewayClient) -> ServiceTraffic:
        from areal.cli.traffic import agent_traffic

        return agent_traffic(chosen, partial(_data_proxies, cli, service))

    look = partial(_status, cli, service)
    return watch_service(cli, AGENT_SERVICE, service, look, page, traffic, watch=watch, interval=interval)


def _status(cli: Invocation, service: str) -> dict[str, object]:
    chosen = gateway(cli)
    if chosen is not None:
        return _remote(chosen)
    home = HomeView(cli.home)
    found = stored(cli.home, Ref(AGENT_SERVICE, service))
    document, _ = service_status(home, found)
    return document | _about(home, found)


def _data_proxies(cli: Invocation, service: str) -> dict[str, str]:
    """Return the addresses of the service's running data proxies, by ``data-proxy/PAIR``; empty for a remote
    service."""
    if gateway(cli) is not None:
        return {}
    states = HomeView(cli.home).states([Ref(AGENT_SERVICE, service)])
    alive = (state.spec for state in states if state.spec.component == "data-proxy" and state.pid)
    return {f"data-proxy/{spec.replica}": spec.url for spec in alive if spec.url}


def _remote(chosen: GatewayClient) -> dict[str, object]:
    """Return the status of a service of another home, as its gateway reports it."""
    document: dict[str, object] = {
        "service": "remote",
        "address": chosen.url,
        "ready": None,
        "components": [],
        "pairs": None,
    }
    try:
        status, readiness = chosen.ask("GET", "/ready")
    except ArealError as error:
        return {**document, "phase": "Unreachable", "healthy": False, "message": error.message}
    reason = readiness.get("reason") if isinstance(readiness, Mapping) else None
    phase = {200: "Ready", 503: "Progressing"}.get(status, "Unknown")
    message = "" if status == 200 else f"the gateway is not ready: {reason or f'it answers {status}'}"
    return {**document, "phase": phase, "healthy": status == 200, "message": message}
