"""The data of the live view: tables, descriptions and logs, as text without control characters.

A read may take long, for example if a gateway hangs, so ``live_terminal`` runs reads in separate threads.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from areal.cli.live import Live, LiveColumn, LivePage, LiveRow, LiveTarget, Pane
from areal.cli.live_terminal import LiveReads, run_live
from areal.cli.logs import FollowedLogs, LinePrinter, LogQuery, logged
from areal.cli.output import Row, Table, folded, orderable, text_of
from areal.dataclasses import replace
from areal.errors import UsageFault
from areal.reconcilers.home_view import document_name
from areal.resources.kinds import Ref, parse_ref
from areal.terminal import spelled

if TYPE_CHECKING:
    from areal.cli.options import Invocation

_LINES = 5000  # of logs that are kept
_LAST = 500  # of them, those of each process at first


class ViewTable(NamedTuple):
    title: str
    look: Callable[[], Table]
    seconds: float = 1.0  # between its reads


def show_live(
    cli: Invocation,
    tables: Sequence[ViewTable],
    describe: Callable[[Ref], str],
    *,
    sort_by: str | None = None,
    read: Table | None = None,
    has_logs: bool = True,
) -> int:
    """Run the live view until ``q`` or Ctrl-C, and return the exit status. ``sort_by``: the sort column of the first
    table; ``read``: the data to show until the first read."""
    wide = cli.format.kind == "wide"

    def reader(table: ViewTable, order: str | None) -> Callable[[], Pane]:
        return lambda: pane_of(table.look(), table.title, wide=wide, sort_by=order)

    readers = [(reader(each, None if at else sort_by), each.seconds) for at, each in enumerate(tables)]
    panes = [Pane(table.title) for table in tables]
    if read is not None:
        panes[0] = pane_of(read, tables[0].title, wide=wide, sort_by=sort_by)
    return run_live(Live(tuple(panes)), LiveReads(readers, partial(_open, cli, describe, has_logs)))


def pane_of(table: Table, title: str, *, wide: bool, sort_by: str | None = None) -> Pane:
    columns = [column for column in table.columns if wide or not column.wide]
    rows = tuple(
        LiveRow(
            text_of(table.name(row)),
            tuple(text_of(column.cell(row)) for column in columns),
            tuple(orderable((column.order or column.cell)(row)) for column in columns),
            _target(row),
        )
        for row in table.sorted(sort_by)
    )
    notes = [table.note, *(f"{path} is unreadable: {reason}" for path, reason in table.unreadable)]
    titles = tuple(LiveColumn(column.title, column.right, column.state) for column in columns)
    return Pane(title, titles, rows, text_of("; ".join(filter(None, notes))) if any(notes) else "", at=time.monotonic())


def _target(row: Row) -> LiveTarget:
    if "owner" not in row:
        return LiveTarget(document_name(row))
    component, _, replica = str(row.get("process") or f"{row['component']}/{row['replica']}").partition("/")
    return LiveTarget(row["owner"], component, int(replica))


def _open(
    cli: Invocation, describe: Callable[[Ref], str], has_logs: bool, page: LivePage
) -> tuple[Callable[[], LivePage], float]:
    """Return the function that reads a page, and the seconds between reads."""
    if page.kind == "logs":
        if not has_logs:
            raise UsageFault("a gateway shows no logs: they are on its own machine")
        return _Logs(cli, page).read, 0.3
    return partial(_describe, describe, page), 2.0


def _describe(describe: Callable[[Ref], str], page: LivePage) -> LivePage:
    text = describe(parse_ref(page.target.ref))
    return replace(page, lines=tuple(folded(spelled(text)).expandtabs().split("\n")), at=time.monotonic())


class _Logs:
    """The last lines of a target's processes."""

    def __init__(self, cli: Invocation, page: LivePage) -> None:
        self._cli, self._page = cli, page
        self._kept: deque[str] = deque(maxlen=_LINES)
        self._count = 0
        self._logs: FollowedLogs | None = None

    def read(self) -> LivePage:
        if self._logs is None:
            ref = parse_ref(self._page.target.ref)
            query = LogQuery(self._page.target.component, self._page.target.replica, follow=True, lines=_LAST)
            states = logged(self._cli, ref, query)
            self._printer = LinePrinter(self._cli, states, lines=True)
            self._logs = FollowedLogs(self._cli, ref, query, states)
            lines = self._logs.first
        else:
            lines = self._logs.poll()
        self._kept.extend(spelled(self._printer.readable(line)).expandtabs() for line in lines)
        self._count += len(lines)
        return replace(self._page, lines=tuple(self._kept), dropped=self._count - len(self._kept), at=time.monotonic())
