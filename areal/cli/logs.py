"""``areal logs``: logs of one process, or of all processes of an object, merged by time."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from heapq import merge
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from areal.cli.objects import complete, one_ref, stored, targets_argument
from areal.cli.options import Decorator, Invocation, Seconds, gather
from areal.cli.output import Column, Row, clock, emit_next, emit_rows, field, write
from areal.cli.remote import local_options
from areal.errors import NotFound, UsageFault, did_you_mean
from areal.numbers import iso
from areal.reconcilers.home_view import HomeView
from areal.resources.kinds import KINDS, Ref, components_of
from areal.runtime.causes import starts
from areal.runtime.logs import LogFollower, TimedLine, timed_lines
from areal.terminal import fancy, pause, style, without_colours

if TYPE_CHECKING:
    from areal.runtime.backends.base import RunControl, RunState

_DEFAULT_LINES = 200
_POLL_S = 0.2
_DISCOVER_S = 1.0
_COLOURS = ("cyan", "yellow", "green", "magenta", "blue", "bright_cyan", "bright_yellow", "bright_green")
_COLUMNS = (Column("TIME", lambda row: clock(row["at"])), field("LINE", "line"))


class LogQuery(NamedTuple):
    """The selected processes and lines."""

    component: str | None = None
    replica: int | None = None
    follow: bool = False
    previous: bool = False
    lines: int = _DEFAULT_LINES
    since: float | None = None  # seconds ago


def log_options(
    kinds: Iterable[str] = (), *, replica: str = "One replica.", since: str = "Only lines of the last TIME."
) -> Decorator[Any]:
    """Add the options of logs, passed to the command as ``query``. ``kinds``: the kinds whose processes can be
    selected; if there are none, the command has one process and no options to select it."""
    components = components_of(kinds)
    more = ", also of processes yet to come" if kinds else ""
    one_process: list[Decorator[Any]] = [
        click.option("-f", "--follow", is_flag=True, help=f"Keep printing new lines{more}."),
        click.option(
            "-n",
            "--lines",
            "--tail",
            type=click.IntRange(min=0),
            default=_DEFAULT_LINES,
            show_default=True,
            help="The last N of each process." if kinds else "The last N.",
        ),
        click.option("--since", type=Seconds(), metavar="TIME", help=since),
    ]
    choice: list[Decorator[Any]] = [
        click.option(
            "-c",
            "--component",
            metavar="NAME",
            shell_complete=complete(lambda ctx: components_of(kinds)),
            help=f"{', '.join(components[:-1])} or {components[-1]}  [default: all]." if kinds else "",
        ),
        click.option("-r", "--replica", type=click.IntRange(min=0), metavar="N", help=replica),
        click.option("--previous", is_flag=True, help="The start before the present one."),
    ]
    return gather("query", LogQuery, [*choice, *one_process] if kinds else one_process)


@click.command()
@targets_argument
@log_options(KINDS)
@local_options
def logs(cli: Invocation, targets: tuple[str, ...], query: LogQuery) -> int:
    """Print logs of an object's processes, merged in order of time and prefixed; of a service, its models' too."""
    return show_logs(cli, stored(cli.home, one_ref(targets)).ref, query)


def show_logs(cli: Invocation, ref: Ref, query: LogQuery, until: Callable[[], bool] = lambda: False) -> int:
    """Print logs; with ``follow``, until Ctrl-C or until ``until()`` is true. Raises NotFound without a process."""
    if query.previous and query.since is not None:
        raise UsageFault("--since cannot be used with --previous: the times of those lines are not known")
    states = logged(cli, ref, query)
    if not states and not query.follow:
        raise _no_process(cli, ref, query)
    printer = LinePrinter(cli, states, lines=query.follow or cli.format.kind == "jsonl")
    lines = FollowedLogs(cli, ref, query, states)
    printer.print(lines.first)
    if query.previous and not lines.first:
        cli.info(f"no process of {ref} has an earlier start")
    while query.follow and not until():
        printer.print(lines.poll())
        pause(_POLL_S)
    return 0


class FollowedLogs:
    """Lines of an object's processes: the last lines as ``first``, then new lines, also of processes that start
    later."""

    def __init__(self, cli: Invocation, ref: Ref, query: LogQuery, states: Sequence[RunState]) -> None:
        from areal.runtime.backends import Backends

        self._backend = Backends(cli.home.root)
        self._select = partial(logged, cli, ref, query)
        self._tails = {state.spec.uid: _Tail(self._backend, state) for state in states} if query.follow else {}
        found = {state.spec.uid: _lines(self._backend, state, query) for state in states}
        self.first = list(merged([(state, found[state.spec.uid]) for state in states]))
        for uid, tail in self._tails.items():
            tail.shown = [line.text for line in found[uid]]
        self._look_at = 0.0

    def poll(self) -> list[Line]:
        if time.monotonic() >= self._look_at:
            for state in self._select():
                if state.spec.uid not in self._tails:
                    self._tails[state.spec.uid] = _Tail(self._backend, state, new=True)
            self._look_at = time.monotonic() + _DISCOVER_S
        return [line for tail in self._tails.values() for line in tail.poll()]


def logged(cli: Invocation, ref: Ref, query: LogQuery) -> list[RunState]:
    return HomeView(cli.home).logged(ref, query.component, query.replica)


def _no_process(cli: Invocation, ref: Ref, query: LogQuery) -> NotFound:
    every = [f"{state.spec.component}/{state.spec.replica}" for state in logged(cli, ref, LogQuery())]
    if not every:
        return NotFound(f"{ref} has no process and no log", hint=f"areal describe {ref.kind.lower()}/{ref.name}")
    guess = did_you_mean(query.component, [name.partition("/")[0] for name in every]) if query.component else ""
    return NotFound(f"{ref} has no such process{guess}", hint=f"it has: {', '.join(dict.fromkeys(every))}")


def print_lines(cli: Invocation, lines: Sequence[str], *, follow: bool = False) -> None:
    """Print lines of a file without timestamps. ``follow``: more lines may come, so that each is a JSON document."""
    rows = [{"line": line} for line in lines]
    if cli.format.is_table:
        write("\n".join(lines))
    elif follow:
        for row in rows:
            emit_next(cli, row, name=row["line"])
    else:
        emit_rows(cli, rows, _COLUMNS[1:], name="{line}".format_map, empty="no lines")
    sys.stdout.flush()


_FIRST_WINDOW_S = 16.0
_WIDER = 8
_WIDEST_S = 1e9
_RESOLUTION_S = 1.0  # a line has the time of the last time mark in its log, which is at most this much older


class Line(NamedTuple):
    at: float  # seconds since the epoch; 0 when it is not known
    process: RunState
    text: str


def _lines(backend: RunControl, state: RunState, query: LogQuery) -> list[TimedLine]:
    paths = backend.log_paths(state.spec.uid)
    if not query.lines:
        return []
    if query.previous:
        found = starts(paths)
        return [TimedLine(0.0, text) for text in (found[-2] if len(found) > 1 else [])[-query.lines :]]
    return last_lines(paths, query.lines, 0.0 if query.since is None else time.time() - query.since)


def last_lines(paths: Sequence[str], count: int, since: float = 0.0) -> list[TimedLine]:
    """Return the last ``count`` lines written at ``since`` or later. Widens its time window step by step, so that it
    does not read the beginning of a long log."""
    newest = max((Path(path).stat().st_mtime for path in paths if Path(path).exists()), default=0.0)
    window = _FIRST_WINDOW_S
    while True:
        start = max(since, newest - window)
        lines = (line for line in timed_lines(paths, start) if not line.at or line.at + _RESOLUTION_S >= since)
        found = deque(lines, maxlen=count)
        if len(found) == count or start == since or window > _WIDEST_S:
            return list(found)
        window *= _WIDER


def merged(streams: Sequence[tuple[RunState, Sequence[TimedLine]]]) -> Iterator[Line]:
    """Yield all lines by time. Lines of one process keep their order, since their times never decrease."""
    lines = [[Line(line.at, process, line.text) for line in stream] for process, stream in streams]
    return merge(*lines, key=lambda line: line.at)


def not_yet_shown(shown: Sequence[str], polled: Sequence[str]) -> list[str]:
    """Return ``polled`` without the first lines if ``shown`` ends with them (written between opening and reading)."""
    for overlap in range(min(len(shown), len(polled)), 0, -1):
        if list(shown[-overlap:]) == list(polled[:overlap]):
            return list(polled[overlap:])
    return list(polled)


class _Tail:
    """Follows the log of one process. ``shown``: its lines that have been printed before."""

    def __init__(self, backend: RunControl, state: RunState, *, new: bool = False) -> None:
        self._follower = LogFollower(lambda: backend.log_paths(state.spec.uid), from_start=new)
        self._state = state
        self.shown: list[str] = []

    def poll(self) -> list[Line]:
        lines = self._follower.poll()
        if self.shown and lines:
            lines, self.shown = not_yet_shown(self.shown, lines), []
        return [Line(time.time(), self._state, text) for text in lines]


class LinePrinter:
    """Prints lines as text, with a prefix per process if there are several, or as documents. ``lines``: print
    them one by one, because the output has no end."""

    def __init__(self, cli: Invocation, states: Sequence[RunState], *, lines: bool) -> None:
        self._cli = cli
        self._lines = lines
        self._several_owners = len({state.spec.owner for state in states}) > 1
        self._prefixed = len(states) != 1
        self._labels: dict[str, str] = {}
        for state in states:
            self._label(state)

    def print(self, lines: Sequence[Line]) -> None:
        if self._cli.format.is_table:
            write("\n".join(self.readable(line) for line in lines))
        elif self._lines:
            for line in lines:
                emit_next(self._cli, row := _row(line), name=_name(row))
        else:
            emit_rows(self._cli, [_row(line) for line in lines], _COLUMNS, name=_name, empty="no lines")
        sys.stdout.flush()

    def _label(self, state: RunState) -> str:
        short = f"{state.spec.component}/{state.spec.replica}"
        return self._labels.setdefault(
            state.spec.uid, f"{state.spec.owner.partition('/')[2]} {short}" if self._several_owners else short
        )

    def readable(self, line: Line) -> str:
        text = without_colours(line.text) if sys.stdout.isatty() else line.text
        if not self._prefixed:
            return text
        label = self._label(line.process)
        width = max(len(known) for known in self._labels.values())
        prefix = f"{label:<{width}} | "
        if fancy(sys.stdout):
            number = list(self._labels).index(line.process.spec.uid)
            prefix = style(prefix, fg=_COLOURS[number % len(_COLOURS)])
        return prefix + text


def _name(row: Row) -> str:
    return "{owner} {component}/{replica}".format_map(row)


def _row(line: Line) -> dict[str, object]:
    spec = line.process.spec
    return {
        "time": iso(line.at),
        "at": line.at or None,
        "owner": spec.owner,
        "component": spec.component,
        "replica": spec.replica,
        "line": line.text,
    }
