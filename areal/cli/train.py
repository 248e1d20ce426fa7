"""``areal train``: training jobs. Flags are final; the floor below is not built yet."""

from __future__ import annotations

from typing import Any

import click

from areal.cli import options
from areal.cli.dryrun import DryRunCommand, dry_run_option
from areal.cli.invocation import Invocation, pass_invocation
from areal.cli.options import Seconds
from areal.cli.pending import not_implemented
from areal.cli.targets import complete_names

_PASS_ON = {"ignore_unknown_options": True}  # an override may begin with a dash; the driver reads it, not we

_job = click.argument("name", shell_complete=complete_names("TrainJob"))


def _reading(function: Any) -> Any:
    return options.remote(options.output()(options.common(function)))


def _changing(function: Any) -> Any:
    return options.yes(options.timeout("10m")(options.lock_timeout(options.output()(options.common(function)))))


def _driver_options(function: Any) -> Any:
    for option in (
        click.argument("overrides", nargs=-1, metavar="[KEY=VALUE]..."),
        click.option("--name", metavar="NAME", help="The job's name  [default: the configuration's]."),
        click.option("--driver", metavar="MODULE:FN", help="[default: the configuration's, else the built-in one]."),
        click.option(
            "--config",
            metavar="FILE",
            type=click.Path(exists=True, dir_okay=False),
            required=True,
            help="The driver's configuration.",
        ),
    ):
        function = option(function)
    return function


@click.command(context_settings=_PASS_ON)
@_driver_options
@options.yes
@options.common
@pass_invocation
def run(cli: Invocation, /, **flags: object) -> int:
    """Run a driver in the foreground; its exit code is ours. Every override is passed on to it."""
    return not_implemented()


@click.command(cls=DryRunCommand, context_settings=_PASS_ON)
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
def start(cli: Invocation, /, **flags: object) -> int:
    """Run a driver detached, under supervision; prints the job's name."""
    return not_implemented()


@click.command()
@_job
@click.option("--grace", type=Seconds(), metavar="TIME", help="Between SIGTERM and SIGKILL.")
@click.option("--force", is_flag=True, help="No grace: SIGKILL at once.")
@_changing
@pass_invocation
def stop(cli: Invocation, /, **flags: object) -> int:
    """Stop the job NAME; it may write a checkpoint within the grace."""
    return not_implemented()


@click.command()
@click.option("--all", "all_", is_flag=True, help="Also jobs that have ended.")
@_reading
@pass_invocation
def ps(cli: Invocation, /, **flags: object) -> int:
    """List jobs."""
    return not_implemented()


@click.command()
@_job
@click.option("-w", "--watch", is_flag=True, help="Refresh until Ctrl-C.")
@click.option("--interval", type=Seconds(), default="2s", show_default=True, metavar="TIME", help="Between refreshes.")
@_reading
@pass_invocation
def status(cli: Invocation, /, **flags: object) -> int:
    """The job NAME: phase, attempt, step, reward, throughput, staleness, and what it waits for."""
    return not_implemented()


@click.command()
@_job
@click.option("-f", "--follow", is_flag=True, help="Go on, printing new lines.")
@click.option("--attempt", type=click.IntRange(min=1), metavar="N", help="An earlier attempt  [default: the last].")
@click.option("-n", "--lines", type=click.IntRange(min=0), default=200, show_default=True, help="The last N.")
@click.option("--since", type=Seconds(), metavar="TIME", help="Only lines of the last TIME.")
@_reading
@pass_invocation
def logs(cli: Invocation, /, **flags: object) -> int:
    """The combined output of the job NAME."""
    return not_implemented()


@click.command()
@_job
@click.option("--plot", metavar="FILE.png", help="Also draw the curves into a file.")
@click.option("--metric", "metrics", multiple=True, metavar="NAME", help="Only these; may be repeated.")
@click.option("-w", "--watch", is_flag=True, help="Refresh until Ctrl-C.")
@_reading
@pass_invocation
def metrics(cli: Invocation, /, **flags: object) -> int:
    """The job NAME's curves in the terminal."""
    return not_implemented()
