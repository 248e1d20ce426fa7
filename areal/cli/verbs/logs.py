"""``areal logs``: all processes of an object merged with prefixes, or one."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from areal.cli import options, view
from areal.cli.invocation import Invocation, fancy, pass_invocation, style
from areal.cli.logtext import Line, last_lines, merged, not_yet_shown, of
from areal.cli.options import Seconds
from areal.cli.output.emit import compact, emit_rows, write
from areal.cli.output.table import Column, Row, field
from areal.cli.output.units import clock, iso
from areal.cli.remote import not_remote
from areal.cli.targets import complete_targets, one_ref, stored
from areal.errors import NotFound
from areal.terminal import without_colours

if TYPE_CHECKING:
    from areal.resources.kinds import Ref
    from areal.runtime.backends.base import Backend, RunState
    from areal.runtime.follow import TimedLine

DEFAULT_LINES = 200
_POLL_S = 0.2
_DISCOVER_S = 1.0
_COLOURS = ("cyan", "yellow", "green", "magenta", "blue", "bright_cyan", "bright_yellow", "bright_green")
_COMPONENTS = ("gateway", "router", "engine", "data-proxy")
_COLUMNS = (Column("TIME", lambda row: clock(row["at"])), field("LINE", "line"))


class Wanted(NamedTuple):
    """Which lines of which processes."""

    component: str | None = None
    replica: int | None = None
    lines: int = DEFAULT_LINES
    since_s: float | None = None
    previous: bool = False


@click.command()
@click.argument("targets", nargs=-1, required=True, metavar="KIND/NAME | KIND NAME", shell_complete=complete_targets)
@click.option(
    "-c",
    "--component",
    metavar="NAME",
    shell_complete=lambda c, p, i: [n for n in _COMPONENTS if n.startswith(i)],
    help="gateway, router, engine, data-proxy.",
)
@click.option("-r", "--replica", type=click.IntRange(min=0), metavar="N", help="One replica.")
@click.option("-f", "--follow", is_flag=True, help="Go on, printing new lines, also of processes yet to come.")
@click.option("--previous", is_flag=True, help="The start before the present one.")
@click.option(
    "-n",
    "--lines",
    type=click.IntRange(min=0),
    default=DEFAULT_LINES,
    show_default=True,
    help="The last N of each process.",
)
@click.option("--since", type=Seconds(), metavar="TIME", help="Only lines of the last TIME.")
@options.remote
@options.output()
@options.common
@pass_invocation
def logs(
    cli: Invocation,
    targets: tuple[str, ...],
    component: str | None,
    replica: int | None,
    follow: bool,
    previous: bool,
    lines: int,
    since: float | None,
) -> int:
    """Logs of an object's processes, merged in order of time and prefixed; of a service, its models' too."""
    not_remote(cli, "logs")
    ref = one_ref(targets)
    stored(cli.home, ref)
    return show_logs(cli, ref, Wanted(component, replica, lines, since, previous), follow=follow)


def show_logs(
    cli: Invocation, ref: Ref, wanted: Wanted, *, follow: bool, until: Callable[[], bool] = lambda: False
) -> int:
    """Print, and with ``follow`` go on until Ctrl-C or ``until`` says so."""
    from areal.runtime.backends import open_backend

    backend = open_backend("local", cli.home.root)
    states = _select(cli, backend, ref, wanted)
    if not states and not follow:
        raise _no_process(cli, backend, ref, wanted)
    printer = _Printer(cli, states, lines=follow or cli.format.kind == "jsonl")
    tails = {state.spec.uid: _Tail(cli, state, printer) for state in states} if follow else {}
    found = {state.spec.uid: _lines(backend, state, wanted) for state in states}
    printer.print(list(merged([of(state, found[state.spec.uid]) for state in states])))
    if follow:
        for uid, tail in tails.items():
            tail.shown = [line.text for line in found[uid]]
        _follow(
            lambda: _select(cli, backend, ref, wanted), lambda state: _Tail(cli, state, printer, new=True), tails, until
        )
    return 0


def _select(cli: Invocation, backend: Backend, ref: Ref, wanted: Wanted) -> list[RunState]:
    from areal.state.objects import ObjectStore

    refs = view.family(list(ObjectStore(cli.home).list()), ref)
    return [
        state
        for state in view.runs_of(backend.observe(), refs)
        if wanted.component in (None, state.spec.component) and wanted.replica in (None, state.spec.replica)
    ]


def _no_process(cli: Invocation, backend: Backend, ref: Ref, wanted: Wanted) -> NotFound:
    every = [f"{state.spec.component}/{state.spec.replica}" for state in _select(cli, backend, ref, Wanted())]
    if not every:
        return NotFound(f"{ref} has no process and no log", hint=f"areal describe {ref.kind.lower()}/{ref.name}")
    from areal.resources.suggest import did_you_mean

    guess = did_you_mean(wanted.component, [name.partition("/")[0] for name in every]) if wanted.component else ""
    return NotFound(f"{ref} has no such process{guess}", hint=f"it has: {', '.join(dict.fromkeys(every))}")


def _lines(backend: Backend, state: RunState, wanted: Wanted) -> list[TimedLine]:
    from areal.runtime.follow import TimedLine
    from areal.runtime.logs import previous_start

    paths = backend.log_paths(state.spec.uid)
    if not wanted.lines:
        return []
    if wanted.previous:
        return [TimedLine(0.0, text) for text in previous_start(paths)[-wanted.lines :]]
    since = 0.0 if wanted.since_s is None else time.time() - wanted.since_s
    return last_lines(paths, wanted.lines, since)


class _Tail:
    """What one process goes on to write; ``shown`` is what was printed of it before."""

    def __init__(self, cli: Invocation, state: RunState, printer: _Printer, *, new: bool = False) -> None:
        from areal.runtime.follow import Follower

        self._follower = Follower(str(cli.home.runs / state.spec.uid), from_start=new)
        self._state = state
        self._printer = printer
        self.shown: list[str] = []

    def print(self) -> None:
        lines = self._follower.poll()
        if self.shown and lines:
            lines, self.shown = not_yet_shown(self.shown, lines), []
        self._printer.print([Line(time.time(), self._state, text) for text in lines])


def _follow(
    look: Callable[[], list[RunState]],
    tail_of: Callable[[RunState], _Tail],
    tails: dict[str, _Tail],
    until: Callable[[], bool],
) -> None:
    look_at = 0.0
    while not until():
        if time.monotonic() >= look_at:
            for state in look():
                if state.spec.uid not in tails:
                    tails[state.spec.uid] = tail_of(state)
            look_at = time.monotonic() + _DISCOVER_S
        for tail in tails.values():
            tail.print()
        time.sleep(_POLL_S)


class _Printer:
    """Lines as people read them, with a prefix a process when there are several; or as documents, one a line where
    the end cannot be awaited (``lines``)."""

    def __init__(self, cli: Invocation, states: Sequence[RunState], *, lines: bool) -> None:
        self._cli = cli
        self._lines = lines
        self._several_owners = len({state.spec.owner for state in states}) > 1
        self._prefixed = len(states) != 1
        self._labels: dict[str, str] = {}
        for state in states:
            self._label(state)

    def print(self, lines: Sequence[Line]) -> None:
        chosen = self._cli.format
        if chosen.is_table:
            write("\n".join(self._readable(line) for line in lines))
        elif self._lines and chosen.kind != "name":
            write("\n".join(compact(_row(line)) for line in lines))
        else:
            emit_rows(self._cli, [_row(line) for line in lines], _COLUMNS, name=_name, empty="no lines")
        sys.stdout.flush()

    def _label(self, state: RunState) -> str:
        short = f"{state.spec.component}/{state.spec.replica}"
        return self._labels.setdefault(
            state.spec.uid, f"{state.spec.owner.partition('/')[2]} {short}" if self._several_owners else short
        )

    def _readable(self, line: Line) -> str:
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


def _row(line: Line) -> dict[str, Any]:
    spec = line.process.spec
    return {
        "time": iso(line.at or None),
        "at": line.at or None,
        "owner": spec.owner,
        "component": spec.component,
        "replica": spec.replica,
        "line": line.text,
    }


def _name(row: Row) -> str:
    return f"{row['owner']} {row['component']}/{row['replica']}"
