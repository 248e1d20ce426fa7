"""What the live view reads: tables, descriptions and logs, as text that is spelled already.

Each reader may take long, as where a gateway hangs; ``live_terminal`` calls them in threads of their own.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from areal.cli.get import described, objects
from areal.cli.live import Live, LiveColumn, LivePage, LiveRow, LiveTarget, Pane
from areal.cli.live_terminal import LiveReads, run_live
from areal.cli.logs import FollowedLogs, LinePrinter, LogQuery, logged
from areal.cli.output import Row, Table, folded, orderable, text_of
from areal.cli.top import UsageMeter
from areal.dataclasses import replace
from areal.errors import UsageFault
from areal.reconcilers.home_view import document_name
from areal.resources.kinds import parse_ref
from areal.terminal import spelled

if TYPE_CHECKING:
    from areal.cli.options import Invocation
    from areal.client.gateway import GatewayClient

_LINES = 5000  # of logs that are kept
_LAST = 500  # of them, those of each process at first
_PERIOD_S = 1.0


def show_live(
    cli: Invocation,
    *,
    look: Callable[[], Table] | None = None,
    usage: Callable[[], Table] | None = None,
    gateway: GatewayClient | None = None,
    interval: float = 2.0,
    sort_by: str | None = None,
) -> int:
    """Runs the live view until ``q`` or Ctrl-C, and returns the exit status. ``look`` reads the objects that are shown
    first, in the order of ``sort_by``; without it, ``usage`` reads the processes that are. Raises what the first look
    raises."""
    wide = cli.format.kind == "wide"
    first = look or partial(objects, cli, (), None, False, set())
    tables = [("Objects", lambda: pane_of(first(), "Objects", wide=wide, sort_by=sort_by), _PERIOD_S)]
    if gateway is None:
        second = usage or UsageMeter(cli, ()).table
        tables.append(("Processes", lambda: pane_of(second(), "Processes", wide=wide), max(interval, _PERIOD_S)))
    if look is None:
        tables.reverse()
    panes = [Pane(title) for title, _, _ in tables]
    if look is not None:
        panes[0] = tables[0][1]()
    reads = LiveReads([(read, seconds) for _, read, seconds in tables], partial(_open, cli, gateway))
    return run_live(Live(tuple(panes)), reads)


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


def _open(cli: Invocation, gateway: GatewayClient | None, page: LivePage) -> tuple[Callable[[], LivePage], float]:
    """The reader of a page, and the seconds between its reads."""
    if page.kind == "logs":
        return _Logs(cli, gateway, page).read, 0.3
    return partial(_describe, cli, gateway, page), 2.0


def _describe(cli: Invocation, gateway: GatewayClient | None, page: LivePage) -> LivePage:
    _, text = described(cli, gateway, parse_ref(page.target.ref))
    return replace(page, lines=tuple(folded(spelled(text())).expandtabs().split("\n")), at=time.monotonic())


class _Logs:
    """The last lines of a target's processes."""

    def __init__(self, cli: Invocation, gateway: GatewayClient | None, page: LivePage) -> None:
        if gateway is not None:
            raise UsageFault("a gateway shows no logs: they are on its own machine")
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
