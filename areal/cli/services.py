"""The parts that ``areal inf`` and ``areal agent`` share: running, stopping, listing, watching and scaling services."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from areal import interrupt
from areal.cli.apply import converge, foreground, preview
from areal.cli.logs import LogQuery
from areal.cli.objects import PROCESS_COLUMNS, all_refs, complete, recorded, stored
from areal.cli.operate import approver, finish, merge_outcomes, mutate, scale_object
from areal.cli.options import Decorator, Invocation, change_options, gather, stack, stop_options, timeout, was_given
from areal.cli.output import Column, emit_rows, field, render_table, report_unreadable, show_status
from areal.cli.remote import gateway, gateway_of, namespace, refuse_remote_context
from areal.client.gateway import GatewayClient, session_pages
from areal.errors import ArealError, UsageFault
from areal.numbers import age
from areal.reconcilers.home_view import HomeView, process_row
from areal.resources.kinds import BACKENDS, Ref, check_name

if TYPE_CHECKING:
    from areal.cli.traffic import ServiceTraffic
    from areal.reconcilers.context import Context, Outcome
    from areal.reconcilers.status import ObjectStatus
    from areal.state.records import StoredObject

_LOOK_S = 2.0
_SCALE_S = 1800.0


def noun(kind: str) -> str:
    """Return the name of a kind in words: ``AgentService`` -> "agent service"."""
    return "".join(f" {char.lower()}" if char.isupper() else char for char in kind).strip()


def gateway_options(port: int) -> Decorator[Any]:
    """Add the options of a service with a gateway. ``port``: its default port."""
    return stack(
        click.option("--host", metavar="HOST", help="Where the gateway listens  [default: 127.0.0.1]."),
        click.option("--port", type=click.IntRange(1, 65535), metavar="PORT", help=f"Its port  [default: {port}]."),
        click.option(
            "--admin-api-key-file",
            metavar="FILE",
            callback=lambda ctx, param, file: os.path.abspath(os.path.expanduser(file)) if file else None,  # noqa: PTH100, PTH111 - symlinks stay
            help="File with the admin key  [default: generated, 0600].",
        ),
        click.option(
            "--scheduler",
            metavar="BACKEND",
            shell_complete=complete(lambda ctx: BACKENDS.names()),
            help="Where processes run: local, ray, slurm, or an installed backend.",
        ),
        click.option(
            "--log-level", type=click.Choice(["debug", "info", "warning", "error"]), help="Of gateway and router."
        ),
        click.option(
            "-d", "--detach", is_flag=True, help="Return when ready; otherwise follow the logs, and Ctrl-C stops."
        ),
        click.option("--force", is_flag=True, help="Replace an existing service of this name."),
    )


def with_applied(cli: Invocation, wanted: dict[str, Any], *, force: bool) -> dict[str, Any]:
    """Complete the manifest of the given flags with the applied manifest, so that the command changes only the fields
    of its flags."""
    from areal.reconcilers.desired import over_applied

    found = None if force else recorded(cli, Ref(wanted["kind"], wanted["metadata"]["name"]))
    return wanted if found is None else over_applied(found, wanted)


def run_service(
    cli: Invocation,
    ref: Ref,
    manifests: list[dict[str, object]],
    *,
    seconds: float,
    detach: bool,
    force: bool,
    dry_run: str | None,
) -> int:
    """Start or resume the service and the other objects of ``manifests``. Without ``detach``, the service runs in the
    foreground. Returns the exit status."""
    if dry_run:
        return preview(cli, manifests, dry_run, force=force)
    code = mutate(cli, lambda context: _start(cli, context, ref, manifests, force, seconds))
    if code:
        return code
    if address := HomeView(cli.home).address(ref):
        cli.info(f"gateway: {address}; talk to it: areal {namespace(ref.kind)} chat --service {ref.name}")
    if detach:
        return 0
    cli.info("in the foreground: Ctrl-C stops the service (with -d it keeps running)")
    stopped = foreground(cli, ref, LogQuery(lines=0, follow=True), _stopped(cli, ref))
    if stopped is None:
        cli.info(f"{ref} was stopped by another command")
        return 0
    finish(cli, stopped)  # the service stays recorded: `run` starts it again
    return interrupt.STATUS


def _start(
    cli: Invocation, context: Context, ref: Ref, manifests: list[dict[str, object]], force: bool, seconds: float
) -> Outcome:
    """Apply the manifests, and resume a service that `stop --keep-state` has suspended."""
    from areal.reconcilers import operations

    command = f"{namespace(ref.kind)} run"
    outcomes = [converge(cli, context, manifests, command=command, force=force, timeout=seconds)]
    found = recorded(cli, ref)
    if not outcomes[0].exit_code and found is not None and found.spec.get("suspend"):
        outcomes.append(operations.carry_out(context, operations.resuming(context, ref), seconds))
    return merge_outcomes(outcomes)


def _stopped(cli: Invocation, ref: Ref) -> Callable[[], bool]:
    """Return a check for whether another command has stopped or deleted the service. The check reads the state at most
    every two seconds."""
    next_look = time.monotonic() + _LOOK_S

    def stopped() -> bool:
        nonlocal next_look
        if time.monotonic() < next_look:
            return False
        next_look = time.monotonic() + _LOOK_S
        found = recorded(cli, ref)
        return found is None or bool(found.spec.get("suspend"))

    return stopped


service_stop_options = stack(
    stop_options,
    click.option("--keep-state", is_flag=True, help="Stop the processes, keep the service; `run` starts it again."),
    click.option("--all", "all_", is_flag=True, help="Every such service of this home."),
    click.option("--cascade", is_flag=True, help="Also delete the running TrainJobs that use it; asks first."),
)


def stop_service(
    cli: Invocation, kind: str, name: str, *, grace: float | None, keep_state: bool, all_: bool, cascade: bool
) -> int:
    from areal.reconcilers import operations

    refuse_remote_context(cli)
    if all_ and was_given("service"):
        raise UsageFault("--all stops every service; it cannot be used with --service")
    refs = all_refs(cli.home, kind) if all_ else [stored(cli.home, Ref(kind, check_name(name))).ref]
    if not refs:
        cli.info(f"no {noun(kind)} to stop")
        return 0
    seconds = cli.deadline_s()
    if keep_state:
        if cascade:
            raise UsageFault("--keep-state deletes nothing, so --cascade has no effect with it")

        def suspend(context: Context) -> Outcome:
            changes = (operations.suspending(context, ref, grace) for ref in refs)
            return merge_outcomes([operations.carry_out(context, change, seconds) for change in changes])

        return mutate(cli, suspend)
    return mutate(
        cli,
        operations.delete,
        refs,
        grace_s=grace,
        cascade=True,
        spare_running_jobs=not cascade,
        timeout_s=seconds,
        approve=approver(cli, f"{namespace(kind)} stop"),
    )


def all_sessions(cli: Invocation, chosen: GatewayClient, path: str) -> Iterator[dict[str, object]]:
    """Yield all sessions of the list at ``path``. Reports how many data proxies are away, whose sessions are not
    listed."""

    def away(count: int) -> None:
        cli.info(f"sessions of {count} data proxies that are away are not listed")

    return session_pages(chosen, path, away=away)


limit_option: Decorator[Any] = click.option(
    "--limit", type=click.IntRange(min=1), default=100, show_default=True, metavar="N", help="Maximum number."
)


def emit_sessions(
    cli: Invocation, sessions: Iterator[dict[str, object]], limit: int, columns: Sequence[Column], *, name: str
) -> None:
    """Print the first ``limit`` sessions, and whether there are more. ``name``: the field with the session's id."""
    found = list(islice(sessions, limit + 1))
    if len(found) > limit:
        cli.info(f"there are more than {limit}; --limit shows them")
    emit_rows(cli, found[:limit], columns, name=lambda row: str(row[name]), empty="no session", answered=True)


class ScaleFlags(NamedTuple):
    to: int | None
    by: int | None
    force_conflicts: bool

    def require_one(self, flag: str) -> None:
        """Raise UsageFault if both ``flag``, for the target number, and --by are given."""
        if self.to is not None and self.by is not None:
            raise UsageFault(f"use either {flag} (the new number) or --by (the change), not both")


def scale_options(flag: str) -> Decorator[Any]:
    """Add the options for scaling, passed as ``scale``. ``flag``: option for the target number. Must be the last
    decorator."""
    return stack(
        gather(
            "scale",
            ScaleFlags,
            (
                click.option(flag, "to", type=click.IntRange(min=0), metavar="N", help="To this many."),
                click.option("--by", type=click.IntRange(min=1), metavar="N", help="By this many  [default: 1]."),
                click.option("--force-conflicts", is_flag=True, help="Take the field when another layer holds it."),
            ),
        ),
        change_options(timeout("30m"), destructive=True),
    )


def scale_service(cli: Invocation, found: StoredObject, flags: ScaleFlags, command: str, *, up: bool) -> int:
    """Scales a service, or a model of one. ``command``: ``areal inf {} --model x``, for the hint of an error."""
    from areal.reconcilers.operations import declared_replicas

    present = declared_replicas(found)
    wanted = flags.to if flags.to is not None else present + (flags.by or 1) * (1 if up else -1)
    if wanted < 0:
        raise UsageFault(f"--by {flags.by or 1} is too many: {found.ref} has {present}")
    if (wanted < present) == up and wanted != present:
        verb, other = ("scaleup", "scaledown") if up else ("scaledown", "scaleup")
        raise UsageFault(f"{verb} from {present} to {wanted} is the wrong direction", hint=command.format(other))
    expected = (present,) if flags.to is None else (present, wanted)  # another command may reach the number first
    return scale_object(cli, found.ref, wanted, within_s=_SCALE_S, current=expected, force=flags.force_conflicts)


def service_columns(*own: Column) -> tuple[Column, ...]:
    """Return the columns of ``ps``, with the columns ``own`` of one kind."""
    return (
        field("SERVICE", "service"),
        field("STATUS", "phase", state=True),
        field("READY", "ready"),
        *own,
        field("GATEWAY", "address"),
        field("PID", "pid", right=True),
        Column("AGE", lambda row: age(row["ageSeconds"]), right=True),
        field("MESSAGE", "message", wide=True),
    )


def list_services(
    cli: Invocation,
    kind: str,
    columns: Sequence[Column],
    *,
    all_: bool,
    own: Callable[[HomeView, StoredObject], Mapping[str, object]],
    remote: Callable[[GatewayClient], Mapping[str, object]],
) -> int:
    """Print a row per service. ``own`` returns the fields of this kind; ``remote``, the row of a remote gateway."""
    chosen, unreadable = gateway(cli), []
    if chosen is not None:
        rows = [{"pid": None, "ageSeconds": None, **remote(chosen)}]
    else:
        home = HomeView(cli.home)
        found = home.of_kind(kind)
        unreadable = found.unreadable
        seen = home.statuses(found)
        rows = [{**_service_row(home, item, seen[str(item.ref)]), **own(home, item)} for item in found]
        rows = [row for row in rows if all_ or row["phase"] != "Suspended"]
    name = f"{kind.lower()}/{{service}}".format_map
    emit_rows(cli, rows, columns, name=name, empty=f"no {noun(kind)} runs" if not unreadable else "")
    return report_unreadable(cli, unreadable)


def _service_row(home: HomeView, item: StoredObject, state: ObjectStatus) -> dict[str, object]:
    gateways = (run.pid for run in home.states([item.ref]) if run.spec.component == "gateway" and run.pid)
    return {
        "service": item.name,
        "phase": state.phase,
        "ready": state.ready,
        "address": state.address,
        "pid": next(gateways, None),
        "ageSeconds": state.age_s,
        "message": state.message,
    }


_FINE = {"Ready", "Suspended"}


def service_status(
    home: HomeView, found: StoredObject, members: Sequence[StoredObject] = ()
) -> tuple[dict[str, object], dict[str, ObjectStatus]]:
    """Return the document of ``status``, and the statuses of the service and its ``members`` by reference."""
    from areal.reconcilers.launch import key_path

    seen = home.statuses([found, *members])
    own = seen[str(found.ref)]
    states = home.states([found.ref, *(item.ref for item in members)])
    gone = home.gone(states)
    document = {
        "service": found.name,
        "phase": own.phase,
        "ready": own.ready,
        "healthy": all(status.phase in _FINE for status in seen.values()),
        "address": own.address,
        "keyFile": str(key_path(home.home, found)),
        "message": own.message,
        "components": [process_row(state) for state in states if state.spec.uid not in gone],
    }
    return document, seen


def watch_service(
    cli: Invocation,
    kind: str,
    service: str | None,
    look: Callable[[], dict[str, object]],
    page: Callable[[Mapping[str, object]], str],
    traffic_of: Callable[[GatewayClient], ServiceTraffic],
    *,
    watch: bool,
    interval: float,
) -> int:
    """Print the status of a service; with ``watch`` repeatedly, with its traffic. Returns the exit status."""
    traffic: ServiceTraffic | None = None

    def document() -> dict[str, object]:
        nonlocal traffic
        found = look()
        if watch and traffic is None:
            with contextlib.suppress(ArealError):  # it does not run, or has no key here: only its health is shown
                traffic = traffic_of(gateway_of(cli, service, kind))
        if traffic is not None:
            try:
                found["traffic"] = traffic.look()
            except ArealError as error:
                found["traffic"] = {"error": error.message}
        return found

    name = f"{kind.lower()}/{{service}}".format_map
    return 0 if show_status(cli, document, name, page, watch=watch, interval=interval)["healthy"] else 1


def status_page(document: Mapping[str, Any], *tables: str, traffic: Callable[[Any], str]) -> str:
    """Render a status document. ``tables``: tables of one kind, placed before the table of processes."""
    head = f"{document['service']}: {document['phase']}" + (f" ({document['ready']})" if document["ready"] else "")
    head += f" at {document['address']}" if document["address"] else ""
    parts = [head + (f"\n{document['message']}" if document["message"] else ""), *filter(None, tables)]
    if document["components"]:
        columns: tuple[Column, ...] = PROCESS_COLUMNS
        if "owner" not in document["components"][0]:
            from areal.cli.remote_view import WORKER_COLUMNS

            columns = WORKER_COLUMNS
        parts.append(render_table(document["components"], columns))
    found = document.get("traffic")
    if found is not None:
        parts.append(found["error"] if "error" in found else traffic(found))
    return "\n\n".join(parts)
