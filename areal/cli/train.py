"""``areal train``: commands for training jobs, manifests of jobs from flags, and rows of jobs."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from areal import interrupt
from areal.cli import options
from areal.cli.apply import converge, foreground, preview, resource
from areal.cli.logs import LogQuery, log_options, print_lines, show_logs
from areal.cli.manifest import DryRunCommand, dry_run_option
from areal.cli.objects import complete_names, recorded, stored
from areal.cli.operate import confirmed, finish, mutation, wait_for
from areal.cli.options import Invocation, change_options, pass_invocation, stack, stop_options, watch_options
from areal.cli.output import Column, Row, emit_rows, field, report_unreadable, show_status, text_of, write
from areal.cli.remote import local_options
from areal.errors import Conflict, Locked, NotFound, UsageFault
from areal.installation import module_argv
from areal.numbers import age
from areal.reconcilers.home_view import HomeView
from areal.resources.kinds import MAX_NAME_LENGTH, TRAIN_JOB, Ref, check_name, name_problem
from areal.runtime.causes import starts
from areal.state.job_curves import read_curves
from areal.state.job_metrics import bottleneck, eta_s, newest_step

if TYPE_CHECKING:
    from areal.state.records import StoredObject

_NAMING = ("experiment_name", "trial_name")
_ALL_LINES = 1_000_000
_WEEK_S = 7 * 86400.0

_job = click.argument("name", shell_complete=complete_names(TRAIN_JOB))
_driver_options = stack(
    click.option(
        "--config",
        metavar="FILE",
        type=click.Path(exists=True, dir_okay=False),
        help="The driver's configuration  [default: the overrides alone].",
    ),
    click.option("--driver", metavar="MODULE:FN|FILE", help="[default: the configuration's, else built in]."),
    click.option("--name", metavar="NAME", help="The job's name  [default: the configuration's]."),
    click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]... [-- WORD...]"),
)


def job_manifest(
    config: str | None, *, name: str | None, driver: str | None, overrides: Sequence[str], restart: Mapping[str, object]
) -> dict[str, Any]:
    """Return the manifest of a job. Raises UsageFault for an unreadable configuration, or one without a driver."""
    from areal.reconcilers.kinds.job_config import choose_driver, config_tree

    path = Path(config).absolute() if config else None
    tree = config_tree(path, overrides)
    choose_driver(driver, tree, config or "a job without --config")
    spec: dict[str, Any] = {"workingDir": os.getcwd(), "restart": dict(restart)}  # noqa: PTH109
    if path is not None:
        spec["config"] = str(path)
    file = (driver or "").partition(":")[0]
    if file.endswith(".py") and not Path(file).expanduser().is_file():
        raise UsageFault(f"there is no driver {file}", hint="--driver path/to/driver.py, or module:function")
    if driver:
        spec["driver"] = driver
    if overrides:
        spec["overrides"] = list(overrides)
    return resource(TRAIN_JOB, name or name_from({**tree, **_names_in(overrides)}, path or Path(file or "run")), spec)


def _names_in(overrides: Sequence[str]) -> dict[str, str]:
    """Return the names that overrides set, as they are written: 2024-01-02 and 0012 are a date and a number in YAML."""
    from areal.resources.tree import BadOverride, dotted, parse_override

    found: dict[str, str] = {}
    for text in overrides:
        with contextlib.suppress(BadOverride):  # the driver reports it
            override = parse_override(text)
            if override.op != "~" and (key := dotted(override.path)) in _NAMING:
                found[key] = (override.value or "").strip("'\"")
    return found


def name_from(config: Mapping[str, object], path: Path) -> str:
    """Return a job's name, from experiment and trial of the configuration, else from the name of the file. Raises
    UsageFault if neither makes a valid name."""
    parts = [config.get(key) for key in _NAMING]
    words = [str(part) for part in parts if isinstance(part, str | int) and "${" not in str(part)] or [path.stem]
    name = re.sub(r"[^a-z0-9]+", "-", "-".join(words).lower())[:MAX_NAME_LENGTH].strip("-")
    if name_problem(name) is not None:
        raise UsageFault(f"cannot derive a job name from {path.name}", hint="give the job one: --name NAME")
    return name


@click.command()
@_driver_options
@stack(options.yes, options.common, pass_invocation)
def run(cli: Invocation, /, **given: Any) -> int:
    """Run a driver in the foreground, and exit with its status. Every override is passed on to it."""
    manifest = job_manifest(**given, restart={"policy": "Never"})
    ref = Ref(TRAIN_JOB, manifest["metadata"]["name"])
    with mutation(cli) as context:
        outcome = converge(cli, context, [manifest], command="train run", recreate=_ended_job_uid(cli, ref))
    return finish(cli, outcome) if outcome.exit_code else _foreground(cli, ref)


@click.command(cls=DryRunCommand)
@_driver_options
@click.option(
    "--restart",
    type=click.Choice(["never", "on-failure"]),
    default="never",
    show_default=True,
    help="Start it again from its newest checkpoint.",
)
@click.option(
    "--max-restarts", type=click.IntRange(min=0), help="Most restarts, with --restart on-failure  [default: 3]."
)
@dry_run_option
@change_options(destructive=True)
def start(cli: Invocation, /, restart: str, max_restarts: int | None, dry_run: str | None, **given: Any) -> int:
    """Run a driver detached, under supervision; prints the job's name."""
    if restart == "never" and max_restarts is not None:
        raise UsageFault("--max-restarts has no effect without --restart on-failure")
    policy: dict[str, object] = {"policy": "OnFailure" if restart == "on-failure" else "Never"}
    if max_restarts is not None:
        policy["maxRestarts"] = max_restarts
    manifest = job_manifest(**given, restart=policy)
    ref = Ref(TRAIN_JOB, manifest["metadata"]["name"])
    earlier = _ended_job_uid(cli, ref)
    if dry_run:
        return preview(cli, [manifest], dry_run, recreate=earlier)
    with mutation(cli) as context:
        outcome = converge(cli, context, [manifest], command="train start", recreate=earlier)
    if outcome.exit_code or not cli.format.is_table:
        return finish(cli, outcome, interrupted=context.interrupted.is_set())
    write(ref.name)
    cli.info(f"areal train logs {ref.name} -f shows its output; areal train status {ref.name} its progress")
    return 0


def _ended_job_uid(cli: Invocation, ref: Ref) -> str:
    """Return the uid of an ended job of this name, which is replaced even if its spec is unchanged; "" if there is no
    such job. Raises Conflict if the job runs."""
    found = recorded(cli, ref)
    if found is None:
        return ""
    live = ("queued", "starting", "backoff", "unknown")
    if any(state.pid or state.phase in live for state in HomeView(cli.home).states([ref])):
        hint = f"areal train logs {ref.name} -f; areal train stop {ref.name}; or give this one another --name"
        raise Conflict(f"{ref} runs already", hint=hint)
    cli.info(f"{ref} has run before: another run, from the start, sets the files of the earlier one aside")
    return found.uid


def _foreground(cli: Invocation, ref: Ref) -> int:
    """Print the driver's output until it ends; Ctrl-C stops it. Returns the driver's exit code, or 130."""
    from areal.reconcilers import operations
    from areal.reconcilers.kinds.job_status import DRIVER, exit_code

    stopped = foreground(cli, ref, LogQuery(DRIVER, follow=True, lines=_ALL_LINES), _ended(cli, ref))
    if stopped is not None:
        if stopped.exit_code == interrupt.STATUS:
            _stop_in_background(cli, ref)
        return interrupt.STATUS
    with mutation(cli) as context, contextlib.suppress(Locked):  # then the holder of the lock does this
        operations.rest(context, ref)
    now = HomeView(cli.home).job_status(stored(cli.home, ref))
    code = exit_code(now.run.state) if now.run is not None else None
    if code is None:
        raise NotFound(f"the exit status of {ref} is unknown: {now.message}", hint=f"areal train logs {ref.name}")
    return code


def _stop_in_background(cli: Invocation, ref: Ref) -> None:
    """Start a process that finishes the stop, because the same command again would start another run."""
    words = ("train", "stop", ref.name, "--yes", "--home", str(cli.home.root), "--lock-timeout", "10m")
    subprocess.Popen(
        module_argv("areal.cli", *words),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    cli.info(f"{ref} is stopped in the background; areal train status {ref.name} shows it")


def _ended(cli: Invocation, ref: Ref) -> Callable[[], bool]:
    """Return a check for whether the driver has ended. It is true only at the second call after the end, when the last
    lines have been printed."""
    seen = 0

    def ended() -> bool:
        nonlocal seen
        found = recorded(cli, ref)
        if found is None:
            return True
        now = HomeView(cli.home).job_status(found)
        seen = seen + 1 if now.phase not in ("Running", "Queued", "Pending") else 0
        return seen > 1

    return ended


def step_of(row: Mapping[str, object]) -> str | None:
    """Format step and total steps: ``12/200``."""
    if row["step"] is None:
        return None
    return f"{row['step']}/{row['totalSteps']}" if row["totalSteps"] is not None else str(row["step"])


def job_row(home: HomeView, found: StoredObject) -> dict[str, object]:
    """Return the document of a job: its progress, and the metrics of its last step."""
    from areal.reconcilers.kinds.job_status import JobPhase, exit_code

    status = home.statuses([found])[str(found.ref)]
    now = home.job_status(found)
    state = now.run.state if now.run is not None else None
    ended = now.run is not None and (now.finished or now.phase is JobPhase.STOPPED) and now.run.ended_at
    last = newest_step(home.home.job_metrics(found.name))
    return {
        "name": found.name,
        "phase": status.phase,
        "attempt": now.attempt or None,
        "stage": home.stage(state) if state is not None and status.phase == "Running" and not last else None,
        "step": last.get("step"),
        "totalSteps": last.get("total_steps"),
        "etaSeconds": eta_s(last) if status.phase == "Running" else None,
        "reward": last.get("reward/mean"),
        "tokensPerSecond": last.get("tokens_per_second"),
        "staleness": last.get("staleness/max"),
        "bottleneck": bottleneck(last) if status.phase == "Running" else None,
        "message": status.message,
        "exitCode": exit_code(state) if state is not None else None,
        "pid": state.pid if state is not None else None,
        "folder": str(home.home.jobs / found.name),
        "ageSeconds": status.age_s,
        "elapsedSeconds": max(0.0, ended - found.created_at) if ended else status.age_s,
    }


@click.command()
@_job
@stop_options
@change_options(destructive=True)
def stop(cli: Invocation, /, name: str, grace: float | None) -> int:
    """Stop the job NAME; it may write a checkpoint within the grace. Without a grace, it loses its steps since the last
    one: that needs a yes."""
    from areal.reconcilers import operations
    from areal.runtime.backends.base import LIVE

    ref = stored(cli.home, Ref(TRAIN_JOB, check_name(name))).ref
    lives = any(state.phase in LIVE for state in HomeView(cli.home).states([ref]))
    if grace == 0 and lives and not confirmed(cli, f"stop {ref} at once? It loses its steps since the last checkpoint"):
        raise UsageFault(f"{ref} would lose its steps since the last checkpoint", hint="--yes, or stop it with a grace")
    with mutation(cli) as context:
        outcome = operations.carry_out(context, operations.suspending(context, ref, grace), cli.deadline_s())
    outcome = operations.with_action(outcome, "suspended", "stopped")
    status = finish(cli, outcome, interrupted=context.interrupted.is_set())
    if any(item.action == "stopped" and not item.exit_code for item in outcome.objects):
        cli.info(f"areal resume {str(ref).lower()} continues it from its newest checkpoint")
    return status


@click.command()
@click.option("-a", "--all", "all_", is_flag=True, help="Also jobs that have ended.")
@local_options
def ps(cli: Invocation, /, all_: bool) -> int:
    """List jobs."""
    home = HomeView(cli.home)
    jobs = home.of_kind(TRAIN_JOB)
    rows = [job_row(home, found) for found in jobs]
    rows = [row for row in rows if all_ or row["phase"] in ("Running", "Queued", "Pending")]
    empty = "no job runs; --all lists those that have ended" if not jobs.unreadable else ""
    emit_rows(cli, rows, _JOBS, name="trainjob/{name}".format_map, empty=empty)
    return report_unreadable(cli, jobs.unreadable)


_JOBS = (
    field("NAME", "name"),
    field("PHASE", "phase", state=True),
    field("ATTEMPT", "attempt", right=True),
    Column("STEP", step_of, right=True),
    field("REWARD", "reward", right=True),
    field("TOKENS/S", "tokensPerSecond", right=True, wide=True),
    field("STALENESS", "staleness", right=True, wide=True),
    field("PID", "pid", right=True, wide=True),
    Column("ELAPSED", lambda row: age(row["elapsedSeconds"])),
    Column("ETA", lambda row: age(row["etaSeconds"])),
    field("MESSAGE", "message"),
)


@click.command()
@_job
@watch_options()
@local_options
def status(cli: Invocation, /, name: str, watch: bool, interval: float) -> int:
    """Show the job NAME: phase, attempt, step, reward, throughput, staleness, bottleneck."""
    ref = Ref(TRAIN_JOB, check_name(name))

    def look() -> dict[str, object]:
        from areal.state.files import explain
        from areal.wire.training_health import warnings_of

        row = job_row(HomeView(cli.home), stored(cli.home, ref))
        try:
            steps = read_curves(cli.home.job_metrics(name))
        except OSError as error:
            return {**row, "warnings": [explain(error, cli.home.job_metrics(name), "read the metrics in").message]}
        return {**row, "warnings": [each.message for each in warnings_of(steps)]}

    row = show_status(cli, look, "trainjob/{name}".format_map, _page, watch=watch, interval=interval)
    return 1 if row["phase"] == "Failed" else 0


def _page(row: Row) -> str:
    facts = {
        "phase": row["phase"],
        "attempt": row["attempt"],
        "stage": row["stage"],
        "step": step_of(row),
        "reward": row["reward"],
        "tokens/s": row["tokensPerSecond"],
        "staleness": row["staleness"],
        "bottleneck": row["bottleneck"],
        "elapsed": age(row["elapsedSeconds"]),
        "ETA": age(row["etaSeconds"]) if row["etaSeconds"] is not None else None,
        "message": row["message"],
        "warning": "; ".join(row["warnings"]),
        "exit code": row["exitCode"],
        "folder": row["folder"],
    }
    return "\n".join(f"{title:<10}  {text_of(value)}" for title, value in facts.items() if value not in (None, ""))


@click.command()
@_job
@options.timeout("7d")
@local_options
def wait(cli: Invocation, /, name: str) -> int:
    """Wait until the job NAME has ended: exit 0 if it succeeded, 8 if it failed or was stopped.

    Its step, elapsed time and ETA are shown on a terminal; elsewhere a line at each tenth of the run.
    """
    return wait_for(cli, [Ref(TRAIN_JOB, check_name(name))], (("completed",),), within_s=_WEEK_S)


@click.command()
@_job
@click.option("--attempt", type=click.IntRange(min=1), metavar="N", help="An earlier attempt  [default: the last].")
@log_options()
@local_options
def logs(cli: Invocation, /, name: str, attempt: int | None, query: LogQuery) -> int:
    """Print the output of the job NAME."""
    from areal.reconcilers.kinds.job_status import DRIVER

    ref = stored(cli.home, Ref(TRAIN_JOB, check_name(name))).ref
    if attempt is None:
        return show_logs(cli, ref, query._replace(component=DRIVER))
    if query.follow or query.since is not None:
        raise UsageFault("--attempt and --follow or --since exclude each other")
    print_lines(cli, _attempt(cli, ref, attempt)[-query.lines :] if query.lines else [])
    return 0


def _attempt(cli: Invocation, ref: Ref, attempt: int) -> list[str]:
    """Return the output of an attempt. Raises NotFound, with the attempts whose output is kept."""
    from areal.reconcilers.kinds.job_status import attempt_of
    from areal.runtime.backends import Backends

    backend = Backends(cli.home.root)
    found: dict[int, list[str]] = {}
    for state in HomeView(cli.home).states([ref]):
        each = starts(backend.log_paths(state.spec.uid))
        found |= {attempt_of(state) - back: output for back, output in enumerate(reversed(each))}
    if attempt not in found:
        known = ", ".join(map(str, sorted(found))) or "none"
        raise NotFound(f"{ref} has no output of attempt {attempt}", hint=f"there is that of: {known}")
    return found[attempt]
