"""``areal train``: training jobs."""

from __future__ import annotations

import contextlib
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from areal.cli import jobs, options, view
from areal.cli.acting import acting, finish, timeout_s
from areal.cli.curves import MAIN, WIDTH, Curve, Group, curves_of, grouped, span_of, sparkline
from areal.cli.curves import plot as draw
from areal.cli.dryrun import DryRunCommand, dry_run_option
from areal.cli.inf.converge import converge, preview, recorded
from areal.cli.invocation import Invocation, fancy, pass_invocation
from areal.cli.options import Seconds
from areal.cli.output.emit import clear, emit_one, emit_rows, show, write
from areal.cli.output.table import Column, field, render_table, text_of
from areal.cli.output.units import age
from areal.cli.remote import not_remote
from areal.cli.targets import complete_names, stored
from areal.errors import Conflict, Locked, NotFound, UsageFault
from areal.state.job_metrics import steps_of

if TYPE_CHECKING:
    from areal.resources.kinds import Ref

_ALL_LINES = 1_000_000
_WATCH_S = 2.0
_NARROWEST = 10  # characters of a curve

_job = click.argument("name", shell_complete=complete_names("TrainJob"))


def _reading(function: Any) -> Any:
    return options.remote(options.output()(options.common(function)))


def _changing(function: Any) -> Any:
    return options.yes(options.timeout("10m")(options.lock_timeout(options.output()(options.common(function)))))


def _driver_options(function: Any) -> Any:
    for option in (
        click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]... [-- WORD...]"),
        click.option("--name", metavar="NAME", help="The job's name  [default: the configuration's]."),
        click.option("--driver", metavar="MODULE:FN|FILE", help="[default: the configuration's, else built in]."),
        click.option(
            "--config",
            metavar="FILE",
            type=click.Path(exists=True, dir_okay=False),
            help="The driver's configuration  [default: the overrides alone].",
        ),
    ):
        function = option(function)
    return function


@click.command()
@_driver_options
@options.yes
@options.common
@pass_invocation
def run(
    cli: Invocation, /, config: str | None, driver: str | None, name: str | None, overrides: tuple[str, ...]
) -> int:
    """Run a driver in the foreground; its exit code is ours. Every override is passed on to it."""
    restart = {"policy": "Never"}
    manifest = jobs.job_manifest(config, name=name, driver=driver, overrides=overrides, restart=restart)
    ref = jobs.ref_of(manifest["metadata"]["name"])
    with acting(cli) as context:
        outcome = converge(cli, context, [manifest], what="train run", anew=_earlier(cli, ref))
    if outcome.exit_code:
        return finish(cli, outcome)
    return _foreground(cli, ref)


def _earlier(cli: Invocation, ref: Ref) -> str:
    """The uid of an earlier job of this name, which has ended: another begins in its place, though nothing of it
    differs. "" where there is none. Raises Conflict where it runs."""
    found = recorded(cli, ref)
    if found is None:
        return ""
    if any(state.pid or state.phase in ("starting", "backoff") for state in jobs.drivers_of(cli, ref)):
        hint = f"areal train logs {ref.name} -f; areal train stop {ref.name}; or give this one another --name"
        raise Conflict(f"{ref} runs already", hint=hint)
    cli.say(f"{ref} has run before: this is another run, from the start; what that one made is set aside")
    return found.uid


def _foreground(cli: Invocation, ref: Ref) -> int:
    """Show what the driver says until it ends. Ctrl-C stops it."""
    from areal.cli.verbs.logs import Wanted, show_logs
    from areal.reconcilers import operations
    from areal.reconcilers.job_phase import DRIVER, exit_code

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.default_int_handler)
    try:
        show_logs(cli, ref, Wanted(DRIVER, lines=_ALL_LINES), follow=True, until=_ended(cli, ref))
    except KeyboardInterrupt:
        with acting(cli) as context:
            cli.say("\nstopping; Ctrl-C again leaves at once")
            outcome = operations.suspend(context, ref)
        if outcome.exit_code == 130:
            _stop_behind_our_back(cli, ref)
        return 130
    with acting(cli) as context, contextlib.suppress(Locked):  # whoever has it sees to it
        operations.rest(context, ref)
    now = jobs.standing_of(stored(cli.home, ref), jobs.drivers_of(cli, ref))
    code = exit_code(now.run.state) if now.run is not None else None
    if code is None:
        raise NotFound(f"nobody knows how {ref} ended: {now.message}", hint=f"areal train logs {ref.name}")
    return code


def _stop_behind_our_back(cli: Invocation, ref: Ref) -> None:
    """The same command again would not go on with the stop, but begin another run: another process goes on with it."""
    words = ("train", "stop", ref.name, "--yes", "--home", str(cli.home.root), "--lock-timeout", "10m")
    subprocess.Popen(
        [sys.executable, "-m", "areal.cli", *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    cli.say(f"{ref} is stopped in the background; areal train status {ref.name} shows it")


def _ended(cli: Invocation, ref: Ref) -> Callable[[], bool]:
    """Whether the driver has ended: said once its last lines have been shown."""
    seen = 0

    def ended() -> bool:
        nonlocal seen
        found = recorded(cli, ref)
        if found is None:
            return True
        now = jobs.standing_of(found, jobs.drivers_of(cli, ref))
        seen = seen + 1 if now.phase not in ("Running", "Pending") else 0
        return seen > 1

    return ended


@click.command(cls=DryRunCommand)
@_driver_options
@click.option(
    "--restart",
    type=click.Choice(["never", "on-failure"]),
    default="never",
    show_default=True,
    help="Start it again from its newest checkpoint.",
)
@click.option("--max-restarts", type=click.IntRange(min=0), default=3, show_default=True, help="So often at most.")
@dry_run_option
@_changing
@pass_invocation
def start(
    cli: Invocation,
    /,
    config: str | None,
    driver: str | None,
    name: str | None,
    overrides: tuple[str, ...],
    restart: str,
    max_restarts: int,
    dry_run: str | None,
) -> int:
    """Run a driver detached, under supervision; prints the job's name."""
    policy = {"policy": "OnFailure", "maxRestarts": max_restarts} if restart == "on-failure" else {"policy": "Never"}
    manifest = jobs.job_manifest(config, name=name, driver=driver, overrides=overrides, restart=policy)
    ref = jobs.ref_of(manifest["metadata"]["name"])
    earlier = _earlier(cli, ref)
    if dry_run:
        return preview(cli, [manifest], dry_run, anew=earlier)
    with acting(cli) as context:
        outcome = converge(cli, context, [manifest], what="train start", anew=earlier)
    if outcome.exit_code or not cli.format.is_table:
        return finish(cli, outcome, interrupted=context.interrupted.is_set())
    write(ref.name)
    cli.say(f"areal train logs {ref.name} -f shows what it says; areal train status {ref.name} how it is")
    return 0


@click.command()
@_job
@click.option("--grace", type=Seconds(), metavar="TIME", help="Between SIGTERM and SIGKILL.")
@click.option("--force", is_flag=True, help="No grace: SIGKILL at once.")
@_changing
@pass_invocation
def stop(cli: Invocation, /, name: str, grace: float | None, force: bool) -> int:
    """Stop the job NAME; it may write a checkpoint within the grace."""
    from areal.reconcilers import operations

    if force and grace is not None:
        raise UsageFault("--force is no grace at all: give one of --grace and --force")
    ref = jobs.ref_of(name)
    stored(cli.home, ref)
    with acting(cli) as context:
        outcome = operations.suspend(context, ref, timeout_s=timeout_s(cli), grace_s=0.0 if force else grace)
    return finish(cli, outcome, interrupted=context.interrupted.is_set())


@click.command()
@click.option("--all", "all_", is_flag=True, help="Also jobs that have ended.")
@_reading
@pass_invocation
def ps(cli: Invocation, /, all_: bool) -> int:
    """List jobs."""
    not_remote(cli, "train ps")
    from areal.state.objects import ObjectStore

    runs = view.read_runs(cli.home)
    rows = [jobs.job_row(cli, found, runs) for found in ObjectStore(cli.home).list(jobs.KIND)]
    rows = [row for row in rows if all_ or row["phase"] in ("Running", "Pending")]
    emit_rows(cli, rows, _JOBS, name=_name, empty="no job runs; --all lists those that have ended")
    return 0


_JOBS = (
    field("NAME", "name"),
    field("PHASE", "phase", state=True),
    field("ATTEMPT", "attempt", right=True),
    Column("STEP", jobs.step_of, right=True),
    field("REWARD", "reward", right=True),
    field("TOKENS/S", "tokensPerSecond", right=True, wide=True),
    field("STALENESS", "staleness", right=True, wide=True),
    field("PID", "pid", right=True, wide=True),
    Column("AGE", lambda row: age(row["ageSeconds"])),
    Column("ETA", lambda row: age(row["etaSeconds"])),
    field("MESSAGE", "message"),
)


def _name(row: Any) -> str:
    return f"trainjob/{row['name']}"


@click.command()
@_job
@click.option("-w", "--watch", is_flag=True, help="Refresh until Ctrl-C.")
@click.option("--interval", type=Seconds(), default="2s", show_default=True, metavar="TIME", help="Between refreshes.")
@_reading
@pass_invocation
def status(cli: Invocation, /, name: str, watch: bool, interval: float) -> int:
    """The job NAME: phase, attempt, step, reward, throughput, staleness, and what it waits for."""
    not_remote(cli, "train status")
    ref = jobs.ref_of(name)
    while True:
        row = jobs.job_row(cli, stored(cli.home, ref), view.read_runs(cli.home))
        if watch and fancy(sys.stdout):
            clear()
        emit_one(cli, row, name=_name(row), text=lambda row=row: _sentences(row))  # type: ignore[misc]
        if not watch:
            return 1 if row["phase"] == "Failed" else 0
        sys.stdout.flush()
        time.sleep(interval)


_SAID = (
    ("phase", "phase"),
    ("attempt", "attempt"),
    ("progress", "step"),
    ("reward", "reward"),
    ("tokensPerSecond", "tokens/s"),
    ("staleness", "staleness"),
    ("bottleneck", "bottleneck"),
    ("elapsed", "elapsed"),
    ("eta", "ETA"),
    ("message", "message"),
    ("exitCode", "exit code"),
    ("folder", "folder"),
)


def _sentences(row: dict[str, Any]) -> str:
    times = {
        "elapsed": age(row["ageSeconds"]),
        "eta": age(row["etaSeconds"]) if row["etaSeconds"] is not None else None,
    }
    row = {**row, **times, "progress": jobs.step_of(row)}
    width = max(len(title) for _, title in _SAID)
    shown = [(title, row[key]) for key, title in _SAID if row[key] not in (None, "")]
    return "\n".join(f"{title:<{width}}  {text_of(value)}" for title, value in shown)


@click.command()
@_job
@options.timeout("7d")
@_reading
@pass_invocation
def wait(cli: Invocation, /, name: str) -> int:
    """Wait until the job NAME has ended: exit 0 where it succeeded, 8 where it failed or was stopped.

    Its step, elapsed time and ETA are shown on a terminal; elsewhere a line at each tenth of the run.
    """
    from areal.reconcilers.waiting import wait as wait_for

    not_remote(cli, "train wait")
    with acting(cli) as context:
        outcome = wait_for(
            context, [jobs.ref_of(name)], (("completed",),), timeout_s(cli, 7 * 86400.0), stopped_fails=True
        )
    return finish(cli, outcome, interrupted=context.interrupted.is_set())


@click.command()
@_job
@click.option("-f", "--follow", is_flag=True, help="Go on, printing new lines.")
@click.option("--attempt", type=click.IntRange(min=1), metavar="N", help="An earlier attempt  [default: the last].")
@click.option("-n", "--lines", type=click.IntRange(min=0), default=200, show_default=True, help="The last N.")
@click.option("--since", type=Seconds(), metavar="TIME", help="Only lines of the last TIME.")
@_reading
@pass_invocation
def logs(cli: Invocation, /, name: str, follow: bool, attempt: int | None, lines: int, since: float | None) -> int:
    """The combined output of the job NAME."""
    from areal.cli.verbs.logs import Wanted, show_logs
    from areal.reconcilers.job_phase import DRIVER

    not_remote(cli, "train logs")
    ref = jobs.ref_of(name)
    stored(cli.home, ref)
    if attempt is None:
        return show_logs(cli, ref, Wanted(DRIVER, lines=lines, since_s=since), follow=follow)
    if follow or since is not None:
        raise UsageFault("--attempt is about what was: it does not go with --follow or --since")
    write("\n".join(_attempt(cli, ref, attempt)[-lines:] if lines else []))
    return 0


def _attempt(cli: Invocation, ref: Ref, attempt: int) -> list[str]:
    """Raises NotFound naming the attempts whose output is still there."""
    from areal.runtime.backends import open_backend
    from areal.runtime.logs import starts

    backend = open_backend("local", cli.home.root)
    found: dict[int, list[str]] = {}
    for state in jobs.drivers_of(cli, ref):
        each = starts(backend.log_paths(state.spec.uid))
        last = int(state.spec.inputs.get("attempt", 1)) + state.restarts
        found |= {last - back: output for back, output in enumerate(reversed(each))}
    if attempt not in found:
        known = ", ".join(map(str, sorted(found))) or "none"
        raise NotFound(f"{ref} has no output of attempt {attempt}", hint=f"there is that of: {known}")
    return found[attempt]


@click.command()
@click.argument("names", nargs=-1, required=True, metavar="NAME...", shell_complete=complete_names("TrainJob"))
@click.option("--plot", metavar="FILE.png", help="Also draw the curves into a file.")
@click.option("--metric", "metrics", multiple=True, metavar="NAME", help="Only these; may be repeated.")
@click.option("--all", "all_", is_flag=True, help="Every number  [default: the ten that matter].")
@click.option("-w", "--watch", is_flag=True, help="Refresh until Ctrl-C.")
@_reading
@pass_invocation
def metrics(
    cli: Invocation, /, names: tuple[str, ...], plot: str | None, metrics: tuple[str, ...], all_: bool, watch: bool
) -> int:
    """The jobs' curves in the terminal, numbers that belong together on one scale. Several jobs are compared.

    \b
    areal train metrics NAME --all
    areal train metrics NAME OTHER --metric reward/mean --plot both.png

    NAME may also be the folder of a run that was started by hand; it has a / in it.
    """
    not_remote(cli, "train metrics")
    while True:
        runs = {name: curves_of(steps_of(_metrics_file(cli, name)), metrics) for name in dict.fromkeys(names)}
        _require(cli, runs, metrics)
        if cli.format.is_table and not (all_ or metrics):
            runs = _main(cli, runs)
        groups = grouped(runs)
        if plot:
            draw(groups, plot)
        if watch and fancy(sys.stdout):
            clear()
        _emit_curves(cli, groups, several=len(runs) > 1)
        if not watch:
            return 0
        sys.stdout.flush()
        time.sleep(_WATCH_S)


def _metrics_file(cli: Invocation, name: str) -> Path:
    """Raises NotFound."""
    if "/" in name:
        path = Path(name).expanduser() / "metrics.jsonl"
        if not path.is_file():
            raise NotFound(f"there is no {path}")
        return path
    stored(cli.home, jobs.ref_of(name))
    return cli.home.job_metrics(name)


def _require(cli: Invocation, runs: Mapping[str, Mapping[str, Curve]], wanted: Sequence[str]) -> None:
    """Raises NotFound for a metric that no job has, and where none has any."""
    known = {metric for curves in runs.values() for metric in curves}
    first = next(iter(runs))
    if missing := [metric for metric in wanted if metric not in known]:
        hint = f"areal train metrics {first} --all lists them"
        raise NotFound(
            f"{' and '.join(runs)} {'have' if len(runs) > 1 else 'has'} no metric {', '.join(missing)}", hint=hint
        )
    empty = [name for name, curves in runs.items() if not curves]
    if len(empty) == len(runs):
        raise NotFound(f"{', '.join(empty)} has written no metrics yet", hint=f"areal train status {first}")
    if empty:
        cli.say(f"no such metrics yet: {', '.join(empty)}")


def _main(cli: Invocation, runs: Mapping[str, Mapping[str, Curve]]) -> dict[str, dict[str, Curve]]:
    """The ten that matter; all, where a driver writes none of them."""
    chosen = {job: {name: curves[name] for name in MAIN if name in curves} for job, curves in runs.items()}
    known, shown = ({metric for curves in every.values() for metric in curves} for every in (runs, chosen))
    if not shown:
        return {job: dict(curves) for job, curves in runs.items()}
    if hidden := len(known - shown):
        cli.say(f"{hidden} more: --all")
    return chosen


def _emit_curves(cli: Invocation, groups: Sequence[Group], *, several: bool) -> None:
    rows = [
        {
            "group": group.title,
            "metric": each.metric,
            "job": each.job,
            "steps": [step for step, _ in each.curve],
            "values": [value for _, value in each.curve],
        }
        for group in groups
        for each in group.series
    ]
    if not cli.format.is_table:
        emit_rows(cli, rows, (), name=lambda row: str(row["metric"]))
        return
    show(_charts(groups, rows, several=several, wide=cli.format.kind == "wide"))


def _charts(groups: Sequence[Group], rows: Sequence[Mapping[str, Any]], *, several: bool, wide: bool) -> str:
    """A table with the groups' titles between its lines; the curves have the room that is left on a terminal."""
    titled = {group.title for group in groups if len({each.metric for each in group.series}) > 1}
    columns = [
        Column("METRIC", lambda row: row["metric"]),
        *([field("JOB", "job")] if several else []),
        Column("STEP", lambda row: row["steps"][-1], right=True),
        Column("FIRST", lambda row: row["values"][0], right=True),
        Column("LAST", lambda row: row["values"][-1], right=True),
        Column("MIN", lambda row: min(row["values"]), wide=True, right=True),
        Column("MAX", lambda row: max(row["values"]), wide=True, right=True),
    ]
    head, *lines = render_table(rows, columns, wide=wide).split("\n")
    width = max(map(len, (head, *lines))) + 2
    room = shutil.get_terminal_size().columns - width - 2 if sys.stdout.isatty() else WIDTH
    span, found, rest = span_of(groups), [f"  {head:<{width}}CURVE"], iter(lines)
    for group in groups:
        low, high = group.scale
        if group.title in titled:
            found.append(f"{group.title}: {text_of(low)} to {text_of(high)}")
        for each in group.series:
            curve = sparkline(each.curve, span, (low, high), max(_NARROWEST, min(WIDTH, room)))
            found.append(f"  {next(rest):<{width}}{curve}")
    return "\n".join(found)
