"""``areal weight-update``: gateways that the training side starts. Flags are final; the floor is not built yet."""

from __future__ import annotations

from typing import Any

import click

from areal.cli import options
from areal.cli.invocation import Invocation, pass_invocation
from areal.cli.options import Seconds
from areal.cli.pending import not_implemented

_service = click.option("--service", metavar="NAME", default="default", show_default=True, help="The gateway's name.")


def _reading(function: Any) -> Any:
    return options.remote(options.output()(options.common(function)))


@click.command()
@_service
@click.option("-w", "--watch", is_flag=True, help="Refresh until Ctrl-C.")
@click.option("--interval", type=Seconds(), default="2s", show_default=True, metavar="TIME", help="Between refreshes.")
@_reading
@pass_invocation
def status(cli: Invocation, /, **flags: object) -> int:
    """Health of a weight-update gateway. Exit status 1 when it cannot be reached."""
    return not_implemented()


@click.command()
@_service
@_reading
@pass_invocation
def pairs(cli: Invocation, /, **flags: object) -> int:
    """Pairs of training and inference: NAME MODE TRAIN INFER VERSION LAST-UPDATE DURATION STATE."""
    return not_implemented()


@click.command()
@click.option("--all", "all_", is_flag=True, help="Also gateways that are gone.")
@_reading
@pass_invocation
def ps(cli: Invocation, /, **flags: object) -> int:
    """List weight-update gateways."""
    return not_implemented()


@click.command()
@_service
@click.option("-f", "--follow", is_flag=True, help="Go on, printing new lines.")
@click.option("-n", "--lines", type=click.IntRange(min=0), default=200, show_default=True, help="The last N.")
@click.option("--since", type=Seconds(), metavar="TIME", help="Only lines of the last TIME.")
@_reading
@pass_invocation
def logs(cli: Invocation, /, **flags: object) -> int:
    """Logs of a weight-update gateway."""
    return not_implemented()


@click.command()
@_service
@click.option("--pair", metavar="NAME", required=True, help="The pair.")
@options.yes
@options.timeout("10m")
@_reading
@pass_invocation
def force_sync(cli: Invocation, /, **flags: object) -> int:
    """Push the training side's weights to the inference side now."""
    return not_implemented()
