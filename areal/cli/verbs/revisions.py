"""``areal history`` and ``areal rollback``."""

from __future__ import annotations

import click

from areal.cli import options
from areal.cli.acting import acting, finish, timeout_s
from areal.cli.invocation import Invocation, pass_invocation
from areal.cli.output.emit import emit_one, emit_rows, to_yaml
from areal.cli.output.table import Column, field
from areal.cli.output.units import clock, iso
from areal.cli.remote import not_remote
from areal.cli.targets import complete_targets, one_ref, stored
from areal.errors import NotFound

_COLUMNS = (
    field("REVISION", "revision", right=True),
    Column("WHEN", lambda row: clock(row["at"])),
    field("WHO", "actor"),
    field("CURRENT", "current", wide=True),
    field("SOURCE", "source"),
)
_targets = click.argument(
    "targets", nargs=-1, required=True, metavar="KIND/NAME | KIND NAME", shell_complete=complete_targets
)


@click.command()
@_targets
@click.option("--revision", type=click.IntRange(min=1), metavar="N", help="Print the spec of this revision.")
@options.remote
@options.output()
@options.common
@pass_invocation
def history(cli: Invocation, targets: tuple[str, ...], revision: int | None) -> None:
    """An object's accepted specs: who, when, from which file. The last 20 are kept."""
    from areal.state.objects import ObjectStore

    not_remote(cli, "history")
    ref = one_ref(targets)
    current = stored(cli.home, ref)
    rows = [
        {
            "revision": item.number,
            "at": item.at,
            "time": iso(item.at),
            "actor": item.actor,
            "source": _file(item.source),
            "current": item.number == current.revision,
            "spec": item.spec,
        }
        for item in ObjectStore(cli.home).revisions(ref)
    ]
    if revision is None:
        emit_rows(cli, rows, _COLUMNS, name=lambda row: f"{ref}@{row['revision']}")
        return
    row = next((row for row in rows if row["revision"] == revision), None)
    if row is None:
        kept = ", ".join(str(row["revision"]) for row in rows)
        raise NotFound(f"{ref} has no revision {revision}", hint=f"revisions kept: {kept}")
    emit_one(cli, row, name=f"{ref}@{revision}", text=lambda: to_yaml([row["spec"]]))


def _file(source: object) -> str | None:
    if isinstance(source, dict):
        line = source.get("line")
        return f"{source.get('file')}:{line}" if line else str(source.get("file"))
    return None if source is None else str(source)


@click.command()
@_targets
@click.option("--to", type=click.IntRange(min=1), metavar="N", help="Revision  [default: the one before the present].")
@click.option("--dry-run", is_flag=True, help="Print the plan, do nothing.")
@options.yes
@options.timeout("10m")
@options.lock_timeout
@options.output()
@options.common
@pass_invocation
def rollback(cli: Invocation, targets: tuple[str, ...], to: int | None, dry_run: bool) -> int:
    """Apply an earlier revision's spec again; a new revision records it."""
    from areal.reconcilers import operations

    ref = one_ref(targets)
    with acting(cli) as context:
        outcome = operations.rollback(context, ref, to=to, dry_run=dry_run, timeout_s=timeout_s(cli))
    return finish(cli, outcome, interrupted=context.interrupted.is_set())
