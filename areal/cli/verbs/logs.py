"""``areal logs``: all processes of an object merged with prefixes, or one."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from areal.cli import options, view
from areal.cli.invocation import Invocation, fancy, pass_invocation
from areal.cli.logtext import Follower, Line, merged, process_label, stamped
from areal.cli.options import Seconds
from areal.cli.output.emit import compact, emit_rows, write
from areal.cli.output.table import Column, field
from areal.cli.output.units import clock, iso
from areal.cli.remote import not_remote
from areal.cli.targets import complete_targets, one_ref, stored
from areal.errors import NotFound

if TYPE_CHECKING:
    from areal.resources.kinds import Ref
    from areal.runtime.backends.base import Backend, RunState

DEFAULT_LINES = 200
_POLL_S = 0.2
_DISCOVER_S = 1.0
_COLOURS = ("cyan", "yellow", "green", "magenta", "blue", "bright_cyan", "bright_yellow", "bright_green")
_COMPONENTS = ("gateway", "router", "engine", "data-proxy")
_COLUMNS = (Column("TIME", lambda row: clock(row["at"])), field("PROCESS", "process"), field("LINE", "line"))


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
    printer = _Printer(cli, states)
    followers = {state.spec.uid: _follower(backend, state, from_end=True) for state in states} if follow else {}
    found = list(merged([_lines(backend, state, wanted, printer.label(state)) for state in states]))
    printer.print([line for line in found if _recent(line, wanted.since_s)])
    if follow:
        _follow(cli, backend, ref, wanted, printer, followers, until)
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


def _lines(backend: Backend, state: RunState, wanted: Wanted, label: str) -> list[Line]:
    from areal.runtime import logs as runtime_logs

    paths = backend.log_paths(state.spec.uid)
    if wanted.previous:
        found = runtime_logs.previous_start(paths)
        return list(stamped(label, found[-wanted.lines :] if wanted.lines else []))
    return list(stamped(label, runtime_logs.tail(paths, wanted.lines)))


def _recent(line: Line, since_s: float | None) -> bool:
    return since_s is None or time.time() - line.at <= since_s


def _follower(backend: Backend, state: RunState, *, from_end: bool) -> Follower | None:
    paths = backend.log_paths(state.spec.uid)
    return Follower(paths[-1], from_end=from_end) if paths else None


def _follow(
    cli: Invocation,
    backend: Backend,
    ref: Ref,
    wanted: Wanted,
    printer: _Printer,
    followers: dict[str, Follower | None],
    until: Callable[[], bool],
) -> None:
    labels = dict(printer.labels)
    look_at = 0.0
    while not until():
        if time.monotonic() >= look_at:
            for state in _select(cli, backend, ref, wanted):
                if followers.get(state.spec.uid) is None:
                    followers[state.spec.uid] = _follower(backend, state, from_end=False)
                    labels[state.spec.uid] = printer.label(state)
            look_at = time.monotonic() + _DISCOVER_S
        for uid, follower in followers.items():
            if follower is not None:
                printer.print(list(stamped(labels[uid], follower.lines(), time.time())))
        time.sleep(_POLL_S)


class _Printer:
    """Lines as people read them: a prefix a process when there are several; or one document a line."""

    def __init__(self, cli: Invocation, states: Sequence[RunState]) -> None:
        self._cli = cli
        self._several_owners = len({state.spec.owner for state in states}) > 1
        self._prefixed = len(states) != 1
        self._colours: dict[str, str] = {}
        self.labels = {state.spec.uid: self.label(state) for state in states}

    def label(self, state: RunState) -> str:
        label = process_label(state, several_owners=self._several_owners)
        self._colours.setdefault(label, _COLOURS[len(self._colours) % len(_COLOURS)])
        return label

    def print(self, lines: Sequence[Line]) -> None:
        chosen = self._cli.format
        if chosen.is_table:
            write("\n".join(self._readable(line) for line in lines))
        elif chosen.kind == "jsonl":
            write("\n".join(compact(_row(line)) for line in lines))
        else:
            emit_rows(self._cli, [_row(line) for line in lines], _COLUMNS, name=lambda row: str(row["process"]))
        sys.stdout.flush()

    def _readable(self, line: Line) -> str:
        if not self._prefixed:
            return line.text
        width = max(len(label) for label in self._colours)
        prefix = f"{line.process:<{width}} | "
        if fancy(sys.stdout):
            prefix = click.style(prefix, fg=self._colours[line.process])
        return prefix + line.text


def _row(line: Line) -> dict[str, Any]:
    return {"at": line.at or None, "time": iso(line.at or None), "process": line.process, "line": line.text}
