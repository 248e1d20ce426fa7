"""``areal events``: what happened, newest last."""

from __future__ import annotations

import sys
import time

import click

from areal.cli import options
from areal.cli.invocation import Invocation, pass_invocation
from areal.cli.options import Seconds
from areal.cli.output.emit import compact, emit_rows, write
from areal.cli.output.table import Row, render_table
from areal.cli.remote import not_remote
from areal.cli.targets import complete_targets, parse_refs
from areal.cli.verbs.describe import EVENT_COLUMNS, event_row
from areal.resources.kinds import Ref

_WATCH_S = 0.5


@click.command()
@click.argument("targets", nargs=-1, metavar="[KIND/NAME]...", shell_complete=complete_targets)
@click.option("-w", "--watch", is_flag=True, help="Go on, printing what happens.")
@click.option("-n", "--limit", type=click.IntRange(min=1), default=50, show_default=True, help="The last so many.")
@click.option("--since", type=Seconds(), metavar="TIME", help="Only of the last TIME.")
@click.option("--type", "type_", type=click.Choice(["Normal", "Warning"]), help="Only this type.")
@options.remote
@options.output()
@options.common
@pass_invocation
def events(
    cli: Invocation, targets: tuple[str, ...], watch: bool, limit: int, since: float | None, type_: str | None
) -> int:
    """What happened to objects, newest last. An object that is gone keeps its last events."""
    not_remote(cli, "events")
    refs = parse_refs(targets)
    rows = [row for row in _read(cli, refs, type_) if since is None or time.time() - row["at"] <= since][-limit:]
    if not watch:
        emit_rows(cli, rows, EVENT_COLUMNS, name=_name, empty="nothing happened yet")
        return 0
    _print(cli, rows, header=True)
    seen = {_identity(row) for row in _read(cli, refs, type_)}
    while True:
        time.sleep(_WATCH_S)
        fresh = [row for row in _read(cli, refs, type_) if _identity(row) not in seen]
        seen.update(_identity(row) for row in fresh)
        _print(cli, fresh, header=False)


def _read(cli: Invocation, refs: list[Ref], type_: str | None) -> list[Row]:
    from areal.state.events import EventLog

    log = EventLog(cli.home)
    found = [event for ref in refs for event in log.read(ref)] if refs else log.read()
    found.sort(key=lambda event: event.at)
    return [event_row(event) for event in found if type_ is None or event.type == type_]


def _identity(row: Row) -> tuple[object, ...]:
    return row["ref"], row["reason"], row["message"], row["at"], row["count"]


def _name(row: Row) -> str:
    return f"{row['ref']} {row['reason']}"


def _print(cli: Invocation, rows: list[Row], *, header: bool) -> None:
    if cli.format.is_table:
        if rows or header:
            write(render_table(rows, EVENT_COLUMNS, wide=cli.format.kind == "wide", header=header))
    else:
        for row in rows:
            write(_name(row) if cli.format.kind == "name" else compact(row))
    sys.stdout.flush()
