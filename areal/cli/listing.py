"""A list as it is at one moment: printed, sorted, or watched."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from areal.cli.dryrun import as_list
from areal.cli.output.emit import compact, emit_one, emit_rows, to_yaml, write
from areal.cli.output.table import Column, Row, render_table, text_of
from areal.errors import UsageFault

if TYPE_CHECKING:
    from areal.cli.invocation import Invocation

_WATCH_S = 1.0
_CLOCKS = ("AGE", "UPTIME")


class Listing(NamedTuple):
    """``single``: one object was asked for by name, so that its document is no list. ``manifests``: for -o manifest."""

    rows: Sequence[Row]
    columns: Sequence[Column]
    name: Callable[[Row], str]
    single: bool = False
    unreadable: Sequence[tuple[str, str]] = ()
    manifests: Sequence[Mapping[str, Any]] = ()
    where: str = ""  # what was looked at, when it is not this home
    note: str = ""  # of what is not listed


def show(cli: Invocation, listing: Listing, sort_by: str | None) -> int:
    """Print once. Files that cannot be read are reported, never passed over: then the status is 1."""
    rows = _sorted(listing, sort_by)
    if cli.format.kind == "manifest":
        write(to_yaml(listing.manifests) if listing.manifests else "")
    elif listing.single and not cli.format.is_table:
        emit_one(cli, rows[0], name=listing.name(rows[0]), text=str)
    else:
        emit_rows(
            cli,
            rows,
            listing.columns,
            name=listing.name,
            empty=listing.note or f"nothing in {listing.where or cli.home.root} yet",
            wrap=as_list,
        )
    if listing.note and rows:
        cli.say(listing.note)
    from areal.cli.failures import report_line

    for path, reason in listing.unreadable:
        report_line(f"{path} is unreadable: {reason}", hint="areal doctor --fix restores it from its newest revision")
    return 1 if listing.unreadable else 0


def watch(cli: Invocation, look: Callable[[], Listing], sort_by: str | None) -> int:
    """The list, then each row again whenever what it shows changes, until Ctrl-C."""
    seen: dict[str, Any] = {}
    header = True
    while True:
        listing = look()
        rows = {listing.name(row): row for row in _sorted(listing, sort_by)}
        shapes = {name: _shape(cli, listing, row) for name, row in rows.items()}
        fresh = [row for name, row in rows.items() if seen.get(name) != shapes[name]]
        if fresh:
            _print_changes(cli, listing, fresh, header)
            header = False
        for name in seen.keys() - rows.keys():
            cli.say(f"{name} is gone")
        seen = shapes
        time.sleep(_WATCH_S)


def _sorted(listing: Listing, sort_by: str | None) -> list[Row]:
    rows = list(listing.rows)
    if sort_by is None:
        return rows
    key = _sort_key(listing, sort_by)
    return sorted(rows, key=lambda row: _orderable(key(row)))


def _sort_key(listing: Listing, sort_by: str) -> Callable[[Row], Any]:
    if sort_by[:1] in ".{$":
        from areal.resources.jsonpath import first

        return lambda row: first(sort_by, row)
    titles = {column.title.lower(): column for column in listing.columns}
    if sort_by.lower() == "age":
        return lambda row: row.get("metadata", {}).get("createdAt") or row.get("startedAt")
    if sort_by.lower() not in titles:
        from areal.resources.suggest import did_you_mean

        raise UsageFault(f'no column "{sort_by}"{did_you_mean(sort_by, titles)}', hint=f"one of {', '.join(titles)}")
    return titles[sort_by.lower()].cell


def _orderable(value: Any) -> tuple[int, Any]:
    """Absent first, then numbers, then text: values of different types never meet."""
    if value is None:
        return 0, 0
    if isinstance(value, int | float):
        return 1, value
    return 2, text_of(value)


def _shape(cli: Invocation, listing: Listing, row: Row) -> Any:
    """What makes a row new: all that is printed of it but its clock."""
    wide = cli.format.kind != "table"
    return [text_of(c.cell(row)) for c in listing.columns if c.title not in _CLOCKS and (wide or not c.wide)]


def _print_changes(cli: Invocation, listing: Listing, rows: Sequence[Row], header: bool) -> None:
    if cli.format.is_table:
        write(render_table(rows, listing.columns, wide=cli.format.kind == "wide", header=header))
    elif cli.format.kind == "name":
        write("\n".join(listing.name(row) for row in rows))
    else:
        write("\n".join(compact(row) for row in rows))
    sys.stdout.flush()
