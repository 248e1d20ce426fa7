"""``areal inf stop``, ``ps``, ``logs``."""

from __future__ import annotations

from typing import Any

import click

from areal.cli import options, view
from areal.cli.acting import acting, approver, finish, timeout_s
from areal.cli.inf.flags import service_name, service_option
from areal.cli.invocation import Invocation, pass_invocation
from areal.cli.options import Seconds
from areal.cli.output.emit import emit_rows
from areal.cli.output.table import Column, field
from areal.cli.output.units import age
from areal.cli.remote import gateway, not_remote
from areal.cli.targets import stored
from areal.cli.verbs.operate import together
from areal.resources.kinds import Ref

_KIND = "InferenceService"
_PS = (
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
@service_option
@click.option("--grace", type=Seconds(), metavar="TIME", help="Between SIGTERM and SIGKILL  [default: the object's].")
@click.option("--force", is_flag=True, help="No grace: SIGKILL at once.")
@click.option("--keep-state", is_flag=True, help="Stop the processes, keep the service; `inf run` starts it again.")
@click.option("--all", "all_", is_flag=True, help="Every inference service of this home.")
@click.option("--cascade", is_flag=True, help="Also delete the running TrainJobs that sample from it; asks first.")
@options.yes
@options.timeout("10m")
@options.lock_timeout
@options.output()
@options.common
@pass_invocation
def stop(
    cli: Invocation,
    service: str | None,
    grace: float | None,
    force: bool,
    keep_state: bool,
    all_: bool,
    cascade: bool,
) -> int:
    """Stop a service and its models, and forget them. Running streams finish within the grace.

    A TrainJob that runs on it is not taken along without --cascade and a yes.
    """
    refs = _every(cli) if all_ else [stored(cli.home, Ref(_KIND, service_name(cli, service))).ref]
    if not refs:
        cli.say("no inference service to stop")
        return 0
    seconds = 0.0 if force else grace
    from areal.reconcilers import operations

    with acting(cli) as context:
        if keep_state:
            outcome = together([operations.suspend(context, ref, timeout_s=timeout_s(cli)) for ref in refs])
        else:
            outcome = operations.delete(
                context,
                refs,
                grace_s=seconds,
                cascade=True,
                spare_running_jobs=not cascade,
                wait=True,
                timeout_s=timeout_s(cli),
                approve=approver(cli, "inf stop") if cascade else lambda plan: True,
            )
    return finish(cli, outcome, interrupted=context.interrupted.is_set())


def _every(cli: Invocation) -> list[Ref]:
    from areal.state.objects import ObjectStore

    return [found.ref for found in ObjectStore(cli.home).list(_KIND)]


@click.command()
@click.option("--all", "all_", is_flag=True, help="Also services that are stopped.")
@options.remote
@options.output()
@options.common
@pass_invocation
def ps(cli: Invocation, all_: bool) -> int:
    """List inference services; those that run, or with --all every one."""
    chosen = gateway(cli)
    if chosen is not None:
        from areal.cli.remote_view import service_status

        found = service_status(chosen)
        rows = [{**found, "models": len(found["models"]), "pid": None, "ageSeconds": None}]
    else:
        rows = [row for row in _services(cli) if all_ or row["phase"] != "Suspended"]
    emit_rows(cli, rows, _PS, name=lambda row: f"inferenceservice/{row['service']}", empty="no inference service runs")
    return 0


def _services(cli: Invocation) -> list[dict[str, Any]]:
    from areal.reconcilers.status import statuses
    from areal.state.objects import ObjectStore

    objects = list(ObjectStore(cli.home).list())
    runs = view.read_runs(cli.home) if objects else {}
    services = [item for item in objects if item.kind == _KIND]
    seen = statuses(cli.home, services, runs)
    rows = []
    for item in services:
        state = seen[str(item.ref)]
        models = [m.name for m in objects if view.service_of(m) == item.name]
        gateways = [run for run in view.runs_of(runs, [item.ref]) if run.spec.component == "gateway" and run.pid]
        rows.append(
            {
                "service": item.name,
                "phase": state.phase,
                "ready": state.ready,
                "models": models,
                "address": state.address,
                "pid": gateways[0].pid if gateways else None,
                "ageSeconds": state.age_s,
                "message": state.message,
            }
        )
    return rows


@click.command()
@service_option
@click.option("-c", "--component", metavar="NAME", help="gateway, router, engine or data-proxy  [default: all].")
@click.option("-r", "--replica", type=click.IntRange(min=0), metavar="N", help="One replica.")
@click.option("-f", "--follow", is_flag=True, help="Go on, printing new lines.")
@click.option("--previous", is_flag=True, help="The start before the present one.")
@click.option("-n", "--lines", type=click.IntRange(min=0), default=200, show_default=True, help="The last N of each.")
@click.option("--since", type=Seconds(), metavar="TIME", help="Only lines of the last TIME.")
@options.remote
@options.output()
@options.common
@pass_invocation
def logs(
    cli: Invocation,
    service: str | None,
    component: str | None,
    replica: int | None,
    follow: bool,
    previous: bool,
    lines: int,
    since: float | None,
) -> int:
    """Logs of a service's processes and its models', merged in order of time."""
    from areal.cli.verbs.logs import Wanted, show_logs

    not_remote(cli, "inf logs")
    ref = stored(cli.home, Ref(_KIND, service_name(cli, service))).ref
    return show_logs(cli, ref, Wanted(component, replica, lines, since, previous), follow=follow)
