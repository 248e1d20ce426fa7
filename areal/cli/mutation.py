"""One command that changes something: its context, progress, Ctrl-C, approval of its plan, and its outcome."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, TextIO

import click

from areal.cli.options import Invocation, interactive
from areal.cli.output import emit_rows, error_lines, show
from areal.cli.table import age, field, size
from areal.errors import UsageFault
from areal.terminal import ESCAPE, fancy, safe

if TYPE_CHECKING:
    from typing import Any

    from areal.reconcilers.context import Context, ObjectOutcome, Outcome, Progress
    from areal.reconcilers.plan import Plan


# -- progress on stderr: one moving line a target on a terminal, one line a change elsewhere

_FRAMES = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
_TICK_S = 0.1
_BYTES = 1 << 20  # a total above this is shown as bytes: nothing else here counts so far


class ProgressPrinter:
    """Shows ``Progress`` values as they come; safe to call from many threads. Use as a context manager.

    On a terminal every unfinished target keeps one line at the bottom, redrawn in place; a finished one is printed
    once above them and let go. Elsewhere a line is written when a target's stage changes, and only then (``verbose``:
    also when its count does; work with an ETA: also at each tenth of it).
    """

    def __init__(self, *, quiet: bool = False, verbose: bool = False, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._quiet = quiet
        self._verbose = verbose
        self._moving = not quiet and fancy(self._stream)
        self._lock = threading.Lock()
        self._live: dict[str, tuple[Progress, float]] = {}
        self._drawn = 0
        self._stop = threading.Event()
        self._ticker = threading.Thread(target=self._tick, name="progress", daemon=True)

    def __enter__(self) -> ProgressPrinter:
        if self._moving:
            self._ticker.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        if self._moving:
            self._ticker.join()
            with self._lock:
                self._erase()
                for progress, _ in self._live.values():
                    self._stream.write(_line(progress) + "\n")
                self._stream.flush()

    def __call__(self, progress: Progress) -> None:
        if self._quiet:
            return
        with self._lock:
            before = self._live.get(progress.ref)
            self._live[progress.ref] = (progress, time.monotonic())
            if not self._moving and (before is None or self._differs(before[0], progress)):
                self._stream.write(_line(progress) + "\n")
                self._stream.flush()

    def _differs(self, before: Progress, now: Progress) -> bool:
        changed = before.stage != now.stage or _tenth(before) < _tenth(now)
        return changed or (self._verbose and before.done != now.done)

    def _tick(self) -> None:
        turn = 0
        while not self._stop.wait(_TICK_S):
            turn += 1
            with self._lock:
                self._erase()
                self._draw(_FRAMES[turn % len(_FRAMES)])

    def _draw(self, frame: str) -> None:
        width, height = shutil.get_terminal_size()
        now = time.monotonic()
        shown = list(self._live.values())[-max(1, height - 2) :]
        for progress, seen_at in shown:
            text = "  ".join(filter(None, (f"{frame} {_line(progress, waited=now - seen_at)}", progress.detail)))
            self._stream.write(safe(text)[: width - 1] + "\n")
        self._drawn = len(shown)
        self._stream.flush()

    def _erase(self) -> None:
        if self._drawn:
            self._stream.write(f"{ESCAPE}[{self._drawn}A{ESCAPE}[J")
        self._drawn = 0


def _line(progress: Progress, *, waited: float = 0.0) -> str:
    parts = [f"{progress.ref}: {progress.stage}" if progress.ref else progress.stage]
    if progress.done is not None and progress.total:
        parts.append(_counted(progress.done, progress.total))
    elapsed = progress.elapsed_s + waited
    times = [age(elapsed)] if elapsed >= 1 else []
    if progress.eta_s is not None:
        times.append(f"ETA {age(max(0.0, progress.eta_s - waited))}")
    if times:
        parts.append(f"({', '.join(times)})")
    return " ".join(parts)


def _tenth(progress: Progress) -> int:
    """The number of tenths done, of work with an ETA."""
    if progress.eta_s is None or not progress.total:
        return 0
    return 10 * (progress.done or 0) // progress.total


def _counted(done: int, total: int) -> str:
    if total >= _BYTES:
        return f"{size(done)}/{size(total)} {100 * done // total}%"
    return f"{done}/{total}"


# -- Ctrl-C

EXIT_INTERRUPTED = 130
_NOTICE = "\ninterrupted: {doing}; again to leave at once (nothing is lost either way)\n"


@contextmanager
def graceful(interrupted: threading.Event, doing: str = "finishing the operation at hand") -> Iterator[None]:
    """Within, SIGINT and SIGTERM set ``interrupted``; a second one ends the process with 130.

    Leaving at once is safe: every operation is journaled before it is done, and the next command finishes or rolls
    back what it finds.
    """

    def handle(number: int, frame: FrameType | None) -> None:
        if interrupted.is_set():
            os._exit(EXIT_INTERRUPTED)
        interrupted.set()
        os.write(sys.stderr.fileno(), _NOTICE.format(doing=doing).encode())

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# -- the command

_COLUMNS = (field("OBJECT", "ref"), field("ACTION", "action", state=True), field("MESSAGE", "message"))


@contextmanager
def mutation(cli: Invocation) -> Iterator[Context]:
    """The context of one mutating command: progress on stderr, the first Ctrl-C finishes the op at hand."""
    from areal.cli.remote import refuse_remote_context
    from areal.reconcilers.context import Context
    from areal.state.actor import actor, command_line

    refuse_remote_context(cli)
    interrupted = threading.Event()
    who = actor()
    cli.tell(f"home {cli.home.root}, as {who}")
    began = time.monotonic()
    with ProgressPrinter(quiet=cli.quiet, verbose=bool(cli.verbose)) as progress, graceful(interrupted):
        yield Context(
            home=cli.home,
            actor=who,
            command=command_line(),
            lock_timeout_s=cli.lock_timeout_s,
            progress=progress,
            interrupted=interrupted,
        )
    cli.tell(f"took {time.monotonic() - began:.1f} s")


def mutate(cli: Invocation, operation: Callable[[Context], Outcome]) -> int:
    """Run ``operation`` and print its outcome. Returns the exit status."""
    with mutation(cli) as context:
        outcome = operation(context)
    return finish(cli, outcome, interrupted=context.interrupted.is_set())


def approver(cli: Invocation, command: str) -> Callable[[Plan], bool]:
    """Approves a plan. Only a destructive one is asked about: with --yes never, off a terminal it is refused."""

    def approve(plan: Plan) -> bool:
        if not plan.destructive or cli.yes:
            return True
        if not interactive():
            raise UsageFault(
                f"{command} would destroy something and there is no terminal to ask on",
                detail="\n".join(plan.destructive),
                hint="look at it with `areal diff`, then add --yes",
            )
        click.echo(plan.to_text(), err=True)
        return click.confirm("Go on?", err=True)

    return approve


def finish(cli: Invocation, outcome: Outcome, *, interrupted: bool = False) -> int:
    """Print an outcome: data on stdout, failures and notes on stderr. Returns the exit status."""
    if cli.format.kind == "table":
        for item in outcome.objects:
            kind, _, name = item.ref.partition("/")
            show(f"{kind.lower()}/{name} {item.action}" + (f": {item.message}" if item.message else ""))
    else:
        rest = {"notes": list(outcome.notes), "addresses": dict(outcome.addresses), "exitCode": outcome.exit_code}
        emit_rows(
            cli,
            [_row(item) for item in outcome.objects],
            _COLUMNS,
            name=lambda row: str(row["ref"]),
            wrap=lambda rows: {"objects": list(rows), **rest},
        )
    sys.stdout.flush()
    for item in outcome.objects:
        if item.error is not None:
            click.echo("\n".join(error_lines(item.error)), err=True)
    for note in outcome.notes:
        cli.say(note)
    if interrupted and outcome.exit_code in (0, EXIT_INTERRUPTED):
        cli.say("interrupted; run the same command again to go on from here")
        return EXIT_INTERRUPTED
    return outcome.exit_code


def _row(item: ObjectOutcome) -> dict[str, Any]:
    row: dict[str, Any] = {"ref": item.ref, "action": item.action, "message": item.message, "exitCode": item.exit_code}
    if item.error is not None:
        error = item.error
        row["error"] = {"message": error.message, "hint": error.hint, "detail": error.detail}
    return row
