"""``areal top``: CPU, memory, GPU and tokens per second of each process."""

from __future__ import annotations

import sys

import click

from areal.cli.objects import complete_targets
from areal.cli.options import Invocation, watch_options
from areal.cli.output import clear, compact, emit_rows, is_live, write
from areal.cli.remote import local_options
from areal.cli.usage import SAMPLE_S, USAGE_COLUMNS, UsageMeter
from areal.terminal import fancy


@click.command()
@click.argument("targets", nargs=-1, metavar="[KIND/NAME]...", shell_complete=complete_targets)
@watch_options()
@click.option(
    "--sort-by",
    type=click.Choice(["cpu", "memory", "name"]),
    default="name",
    show_default=True,
    help="Order: the largest first, or by name.",
)
@local_options
def top(cli: Invocation, targets: tuple[str, ...], watch: bool, interval: float, sort_by: str) -> int:
    """CPU, memory, GPU and tokens a second of each process; of a service, its models' too."""
    if watch and is_live(cli):
        from areal.cli.get import live_description, live_objects
        from areal.cli.live_view import ViewTable, show_live

        processes = ViewTable("Processes", UsageMeter(cli, targets, sort_by).table, max(1.0, interval))
        return show_live(cli, [processes, live_objects(cli)], live_description(cli, None))
    while True:
        rows = UsageMeter(cli, targets, sort_by, max(SAMPLE_S, interval) if watch else SAMPLE_S).read()
        if watch and not cli.format.is_table:
            write(compact(rows))
        else:
            if watch and fancy(sys.stdout):
                clear()
            emit_rows(cli, rows, USAGE_COLUMNS, name="{owner} {process}".format_map, empty="no process runs")
        if not watch:
            return 0
        sys.stdout.flush()
