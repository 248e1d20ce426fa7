"""Calling a reconciler: build its context, show its progress, approve its plan, print its outcome."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from areal.cli.interrupts import EXIT_INTERRUPTED, graceful
from areal.cli.invocation import Invocation, interactive
from areal.cli.output.emit import emit_rows, show
from areal.cli.output.table import field
from areal.cli.progress import ProgressPrinter
from areal.errors import ArealError, UsageFault

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from areal.reconcilers.context import Context, ObjectOutcome, Outcome
    from areal.reconcilers.plan import Plan

DEFAULT_TIMEOUT_S = 600.0

_COLUMNS = (field("OBJECT", "ref"), field("ACTION", "action", state=True), field("MESSAGE", "message"))


@contextmanager
def acting(cli: Invocation) -> Iterator[Context]:
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


def timeout_s(cli: Invocation, default: float = DEFAULT_TIMEOUT_S) -> float:
    if cli.timeout_s is not None:
        return cli.timeout_s
    from areal.cli.options import parse_seconds

    configured = cli.default("timeout")
    return parse_seconds(configured) if configured else default


def approver(cli: Invocation, what: str) -> Callable[[Plan], bool]:
    """Approves a plan. Only a destructive one is asked about: with --yes never, off a terminal it is refused."""

    def approve(plan: Plan) -> bool:
        if not plan.destructive or cli.yes:
            return True
        if not interactive():
            raise UsageFault(
                f"{what} would destroy something and there is no terminal to ask on",
                detail="\n".join(plan.destructive),
                hint="look at it with `areal diff`, then add --yes",
            )
        click.echo(plan.to_text(), err=True)
        return click.confirm("Go on?", err=True)

    return approve


def require_approval(cli: Invocation, what: str) -> None:
    """For verbs that are destructive by their name: refuse off a terminal before anything is looked at."""
    if not cli.yes and not interactive():
        raise UsageFault(f"{what} is destructive and there is no terminal to ask on", hint="add --yes")


def finish(cli: Invocation, outcome: Outcome, *, interrupted: bool = False) -> int:
    """Print what was done: data on stdout, failures and notes on stderr. Returns the exit status."""
    if cli.format.is_table and cli.format.kind != "wide":
        for item in outcome.objects:
            show(_sentence(item))
    else:
        emit_rows(
            cli,
            [_row(item) for item in outcome.objects],
            _COLUMNS,
            name=lambda row: str(row["ref"]),
            wrap=_document(outcome),
        )
    sys.stdout.flush()
    _failures(outcome.objects)
    for note in outcome.notes:
        cli.say(note)
    if interrupted and outcome.exit_code in (0, EXIT_INTERRUPTED):
        cli.say("interrupted; run the same command again to go on from here")
        return EXIT_INTERRUPTED
    return outcome.exit_code


def _sentence(item: ObjectOutcome) -> str:
    kind, _, name = item.ref.partition("/")
    return f"{kind.lower()}/{name} {item.action}" + (f": {item.message}" if item.message else "")


def _failures(objects: Sequence[ObjectOutcome]) -> None:
    from areal.cli.failures import error_lines

    for item in objects:
        if item.error is not None:
            first, *rest = error_lines(item.error)
            click.echo("\n".join([f"{first}", *rest]), err=True)


def _row(item: ObjectOutcome) -> dict[str, Any]:
    row: dict[str, Any] = {"ref": item.ref, "action": item.action, "message": item.message, "exitCode": item.exit_code}
    if item.error is not None:
        row["error"] = error_document(item.error)
    return row


def error_document(error: ArealError) -> dict[str, Any]:
    return {"message": error.message, "hint": error.hint, "detail": error.detail}


def _document(outcome: Outcome) -> Callable[[Sequence[Any]], Any]:
    def wrap(rows: Sequence[Any]) -> dict[str, Any]:
        return {
            "objects": list(rows),
            "notes": list(outcome.notes),
            "addresses": dict(outcome.addresses),
            "exitCode": outcome.exit_code,
        }

    return wrap
