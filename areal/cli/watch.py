"""``areal train watch``: prints alerts of training jobs, for a terminal and for CI, and sends them to a URL."""

from __future__ import annotations

import time
from urllib.parse import urlsplit

import click

from areal.cli.objects import complete_names, stored
from areal.cli.options import Invocation, was_given
from areal.cli.output import emit_rows, field, write
from areal.cli.remote import local_options
from areal.client.gateway import NoResponse, ServiceClient
from areal.errors import TargetFailed, UsageFault
from areal.reconcilers.alerts import Alert, gather
from areal.reconcilers.home_view import HomeView
from areal.resources.addresses import is_loopback
from areal.resources.kinds import TRAIN_JOB, Ref, check_name
from areal.state.files import explain
from areal.state.job_curves import JobCurves

_NOTIFY_S = 10.0
_COLUMNS = (
    field("SEVERITY", "severity", state=True),
    field("RULE", "rule"),
    field("OBJECT", "object"),
    field("MESSAGE", "message"),
    field("CAUSE", "cause", wide=True),
    field("NEXT", "next", wide=True),
)


@click.command()
@click.argument("names", nargs=-1, metavar="[NAME]...", shell_complete=complete_names(TRAIN_JOB))
@click.option("--once", is_flag=True, help="Judge what there is now, and do not wait.")
@click.option("--notify", metavar="URL", help="POST each alert as JSON: https, or http on loopback.")
@click.option(
    "--interval", type=click.FloatRange(min=0.1), default=2.0, show_default=True, help="Seconds between two looks."
)
@local_options
def watch(cli: Invocation, /, names: tuple[str, ...], once: bool, notify: str | None, interval: float) -> int:
    """Watch jobs for alerts: exits 8 when one fires, 0 when all have ended well.

    NaN or infinite numbers, a collapse of the reward, a KL spike, groups without spread, a reward that does not move, a
    step that stalls, restarts without progress, a replica with older weights. Without a NAME, all jobs that run.

    \b
    areal train watch learn || areal train stop learn
    areal train watch learn --notify https://hooks.example.com/areal
    """
    if once and was_given("interval"):
        raise UsageFault("--interval is the time between looks, and --once looks once")
    target = _target(notify) if notify else None
    refs = [Ref(TRAIN_JOB, check_name(name)) for name in dict.fromkeys(names)]
    if not refs:
        view = HomeView(cli.home)
        refs = [job.ref for job in view.of_kind(TRAIN_JOB) if not view.job_status(job).finished]
    curves = {ref.name: JobCurves(cli.home.job_metrics(ref.name)) for ref in refs}
    names_of_all = ", ".join(curves)
    if refs and not once:
        cli.info(f"watching {names_of_all}: ends at the first alert, or with the jobs; Ctrl-C ends it before")
    while True:
        view = HomeView(cli.home)
        jobs = [stored(cli.home, ref) for ref in refs]
        statuses = {job.name: view.job_status(job) for job in jobs}
        for each in curves.values():
            try:
                each.update()
            except OSError as error:
                raise explain(error, each.path, "read the metrics in") from error
        alerts = list(gather(cli.home, jobs, statuses, curves))
        failed = [job for job in jobs if statuses[job.name].phase in ("Failed", "Lost", "Stopped")]
        ended = once or all(statuses[job.name].phase in ("Succeeded", "Failed", "Lost", "Stopped") for job in jobs)
        if alerts or ended:
            if alerts or not cli.format.is_table:
                emit_rows(cli, [alert.document() for alert in alerts], _COLUMNS, name="{rule}".format_map)
            if target is not None:
                _notify(cli, target, alerts)
            if alerts:
                if cli.format.is_table:
                    page = "\n{object}: {message}\n  cause: {cause}\n  next:  {next}".format_map
                    write("\n".join(page(alert.document()) for alert in alerts))
                return TargetFailed.exit_code
            if failed and not once:
                message = statuses[failed[0].name].message
                raise TargetFailed(
                    f"{failed[0].ref} is {statuses[failed[0].name].phase}{f': {message}' if message else ''}",
                    hint=f"areal train logs {failed[0].name}",
                )
            if cli.format.is_table:
                cli.info(f"no alert in {names_of_all or 'any job: none runs'}")
            return 0
        time.sleep(interval)


def _target(url: str) -> tuple[str, str]:
    """Return base and path of the URL. Raises UsageFault unless it is https, or http on loopback."""
    parts = urlsplit(url)
    try:
        port = parts.port
    except ValueError as error:
        raise UsageFault(f"--notify {url}: {error}") from error
    host = parts.hostname or ""
    if "@" in parts.netloc:
        raise UsageFault(
            "--notify: the URL has a user or password, which is not sent", hint="--notify https://HOST/PATH"
        )
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    if not path.isascii() or not path.isprintable() or " " in path:
        raise UsageFault("--notify: the path has characters that URLs escape", hint="write them with %, as in %20")
    if not host or parts.scheme not in ("http", "https") or (parts.scheme == "http" and not is_loopback(host)):
        raise UsageFault(
            f"--notify {url}: alerts name jobs and errors, and go out by https only, or by http to this machine",
            hint="--notify https://HOST/PATH",
        )
    base = f"{parts.scheme}://{f'[{host}]' if ':' in host else host}{f':{port}' if port else ''}"
    return base, path


def _notify(cli: Invocation, target: tuple[str, str], alerts: list[Alert]) -> None:
    """POST each alert. A failed POST causes a warning on stderr, without the path of the URL, which may be a secret. It
    does not change the exit status."""
    base, path = target
    for alert in alerts:
        document: dict[str, object] = alert.document()
        try:
            status, answer = ServiceClient(base, None, _NOTIFY_S).ask("POST", path, document)
        except (NoResponse, ValueError) as error:  # ValueError: the host is not a name
            why = error.why if isinstance(error, NoResponse) else error
            cli.info(f"warning: {base} was not notified of {alert.rule}: {why}")
            continue
        if not 200 <= status < 300:
            cli.info(f"warning: {base} answered {status} to {alert.rule}: {str(answer)[:200]}")
