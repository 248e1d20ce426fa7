"""Operations: ``areal scale|restart|suspend|resume|wait|reconcile|adopt|doctor``, and the parts that all mutating
commands share: context, progress, Ctrl-C, approval of the plan, and outcome.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TextIO

import click

from areal import interrupt
from areal.cli import options
from areal.cli.failures import error_lines, report
from areal.cli.objects import complete_names, complete_targets, one_ref, parse_refs, select, targets_argument
from areal.cli.options import Invocation, change_options, interactive, stack, timeout
from areal.cli.output import emit_rows, field, show
from areal.cli.remote import checked_url, gateway, refuse_remote_context
from areal.errors import ArealError, NotFound, UsageFault, did_you_mean, worst_exit
from areal.numbers import age, duration, size
from areal.resources.kinds import MODEL, Ref
from areal.terminal import ESCAPE, fancy, outlive_readers, safe

if TYPE_CHECKING:
    from areal.reconcilers.context import Context, Outcome, Progress
    from areal.reconcilers.converge import Approve
    from areal.reconcilers.plan import Plan

P = ParamSpec("P")

_FRAMES = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
_TICK_S = 0.1
_BYTES = 1 << 20  # totals from here on are shown as bytes: no other count gets this high


class ProgressPrinter:
    """Shows ``Progress`` values as they arrive. Thread-safe. Use as a context manager.

    On a terminal, every target has one line that is redrawn in place; the last lines stay. Elsewhere, a line is written
    only when the stage of a target changes (with ``verbose`` also when its count changes; for work with an ETA also at
    each tenth).
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
                    self._stream.write(_progress_line(progress) + "\n")
                self._stream.flush()

    def __call__(self, progress: Progress) -> None:
        if self._quiet:
            return
        with self._lock:
            before = self._live.get(progress.ref)
            self._live[progress.ref] = (progress, time.monotonic())
            if self._moving:
                return
            was = before[0] if before is not None else None
            changed = was is None or was.stage != progress.stage or _tenth(was) < _tenth(progress)
            if changed or (self._verbose and was is not None and was.done != progress.done):
                self._stream.write(_progress_line(progress) + "\n")
                self._stream.flush()

    def _tick(self) -> None:
        turn = 0
        while not self._stop.wait(_TICK_S):
            turn += 1
            with self._lock:
                self._erase()
                self._draw(_FRAMES[turn % len(_FRAMES)])

    def _draw(self, frame: str) -> None:
        import shutil

        width, height = shutil.get_terminal_size()
        now = time.monotonic()
        newest = sorted(self._live, key=lambda ref: self._live[ref][1])[-max(1, height - 2) :]
        shown = [each for ref, each in self._live.items() if ref in newest]
        for progress, seen_at in shown:
            text = f"{frame} {_progress_line(progress, waited=now - seen_at)}"
            self._stream.write(safe(text)[: width - 1] + "\n")
        self._drawn = len(shown)
        self._stream.flush()

    def _erase(self) -> None:
        if self._drawn:
            self._stream.write(f"{ESCAPE}[{self._drawn}A{ESCAPE}[J")
        self._drawn = 0


def _progress_line(progress: Progress, *, waited: float = 0.0) -> str:
    parts = [f"{progress.ref}: {progress.stage}" if progress.ref else progress.stage]
    done, total = progress.done, progress.total
    if done is not None and total:
        parts.append(f"{size(done)}/{size(total)} {100 * done // total}%" if total >= _BYTES else f"{done}/{total}")
    elapsed = progress.elapsed_s + waited
    times = [age(elapsed)] if elapsed >= 1 else []
    if progress.eta_s is not None:
        times.append(f"ETA {age(max(0.0, progress.eta_s - waited))}")
    if times:
        parts.append(f"({', '.join(times)})")
    return " ".join(parts) + (f"  {progress.detail}" if progress.detail else "")


def _tenth(progress: Progress) -> int:
    """Return how many tenths are done of work with an ETA; 0 for other work."""
    if progress.eta_s is None or not progress.total:
        return 0
    return 10 * (progress.done or 0) // progress.total


_NOTICE = "\ninterrupted: {doing}; again to leave at once (nothing is lost either way)\n"


@contextmanager
def graceful(interrupted: threading.Event, doing: str = "finishing the operation at hand") -> Iterator[None]:
    """Make SIGINT and SIGTERM set ``interrupted``; a second signal exits the process with status 130.

    Exiting at once is safe: every operation is journaled before it runs, and the next command finishes open operations
    or rolls them back.
    """

    signalled = False

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal signalled
        if signalled or interrupted.is_set():
            os._exit(interrupt.STATUS)
        signalled = True
        interrupt.set_in_handler(interrupted)
        with suppress(OSError):  # no reader
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


_OUTCOME_COLUMNS = (field("OBJECT", "ref"), field("ACTION", "action", state=True), field("MESSAGE", "message"))


@contextmanager
def mutation(cli: Invocation, *, changes: bool = True) -> Iterator[Context]:
    """Yield the context of a mutating command. Progress goes to stderr. After the first Ctrl-C the current operation
    finishes. ``changes``: the command changes something, so it continues even if the reader of its output has exited.
    """
    from areal.reconcilers.context import Context
    from areal.state.locks import actor, command_line

    refuse_remote_context(cli)
    if changes:
        outlive_readers()
    interrupted = threading.Event()
    who = actor()
    cli.detail(f"home {cli.home.root}, as {who}")
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
    cli.detail(f"took {duration(time.monotonic() - began)}")


def mutate(
    cli: Invocation, operation: Callable[Concatenate[Context, P], Outcome], *args: P.args, **given: P.kwargs
) -> int:
    """Run ``operation`` and print its outcome. Returns the exit status."""
    with mutation(cli) as context:
        outcome = operation(context, *args, **given)
    return finish(cli, outcome, interrupted=context.interrupted.is_set())


def confirmed(cli: Invocation, question: str) -> bool:
    """Return whether --yes is given, or the user of a terminal agrees."""
    return cli.yes or (interactive() and click.confirm(question, err=True))


def approver(cli: Invocation, command: str) -> Approve:
    """Return a function that approves plans. It asks only about destructive plans, and not with --yes. Without a
    terminal to ask on, it raises UsageFault."""

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
    """Print an outcome: data to stdout, failures and notes to stderr. Returns the exit status."""
    if cli.format.kind == "table":
        lines = []
        for item in outcome.objects:
            kind, _, name = item.ref.partition("/")
            lines.append(f"{kind.lower()}/{name} {item.action}" + (f": {item.message}" if item.message else ""))
        show("\n".join(lines))
    else:
        rows: list[dict[str, Any]] = []
        for item in outcome.objects:
            rows.append({"ref": item.ref, "action": item.action, "message": item.message, "exitCode": item.exit_code})
            if (error := item.error) is not None:
                rows[-1]["error"] = {"message": error.message, "hint": error.hint, "detail": error.detail}
        rest = {"notes": list(outcome.notes), "addresses": dict(outcome.addresses), "exitCode": outcome.exit_code}
        emit_rows(
            cli, rows, _OUTCOME_COLUMNS, name="{ref}".format_map, wrap=lambda rows: {"objects": list(rows), **rest}
        )
    sys.stdout.flush()
    for item in outcome.objects:
        if item.error is not None:
            click.echo("\n".join(error_lines(item.error)), err=True)
    for note in outcome.notes:
        cli.info(note)
    if interrupted and not outcome.exit_code:
        cli.info("interrupted; run the same command again to go on from here")
        return interrupt.STATUS
    return outcome.exit_code


@click.command()
@targets_argument
@click.option("--replicas", type=click.IntRange(min=0), required=True, metavar="N", help="Number of replicas.")
@click.option("--model", metavar="NAME", shell_complete=complete_names(MODEL), help="The model of a service.")
@click.option(
    "--current", type=click.IntRange(min=0), metavar="N", help="Fail (exit 5) unless the present number is N."
)
@click.option("--force-conflicts", is_flag=True, help="Take the field when another layer holds it.")
@change_options(destructive=True)
def scale(
    cli: Invocation,
    targets: tuple[str, ...],
    replicas: int,
    model: str | None,
    current: int | None,
    force_conflicts: bool,
) -> int:
    """Set the number of replicas. A later apply of a manifest that says another number is a conflict."""
    expected = () if current is None else (current,)
    return scale_object(cli, one_ref(targets), replicas, model=model, current=expected, force=force_conflicts)


def scale_object(cli: Invocation, ref: Ref, replicas: int, *, within_s: float = 600.0, **how: Any) -> int:
    from areal.reconcilers import operations

    seconds = cli.deadline_s(within_s)
    return mutate(cli, operations.scale, ref, replicas, timeout_s=seconds, approve=approver(cli, "this scaling"), **how)


def _verb(name: str, text: str) -> click.Command:
    """Return a command that runs an operation on each object in turn, and reports failures with all outcomes."""

    def run(cli: Invocation, targets: tuple[str, ...]) -> int:
        from areal.reconcilers import operations
        from areal.reconcilers.context import ObjectOutcome, Outcome

        refs = parse_refs(targets)

        def each(context: Context) -> Outcome:
            outcomes = []
            for ref in refs:
                try:
                    change = operations.CHANGES[name](context, ref)
                    outcomes.append(operations.carry_out(context, change, cli.deadline_s()))
                except ArealError as error:
                    if len(refs) == 1:
                        raise
                    failed = ObjectOutcome(str(ref), "failed", error.message, error.exit_code, error)
                    outcomes.append(Outcome((failed,), exit_code=error.exit_code))
                if context.interrupted.is_set():
                    break
            return merge_outcomes(outcomes)

        return mutate(cli, each)

    return click.command(name, help=text)(targets_argument(change_options()(run)))


restart = _verb(
    "restart", "Restart an object's processes: the new beside the old, then the old drains, where there is room."
)
suspend = _verb("suspend", "Stop an object's processes and keep the object; `areal resume` starts them again.")
resume = _verb("resume", "Start a suspended object again.")


def merge_outcomes(outcomes: Sequence[Outcome]) -> Outcome:
    """Merge outcomes. The exit status is the most severe one; an object keeps its last change."""
    from areal.reconcilers.context import Outcome

    objects = {item.ref: item for outcome in outcomes for item in outcome.objects if item.action == "unchanged"}
    objects.update({item.ref: item for outcome in outcomes for item in outcome.objects if item.action != "unchanged"})
    return Outcome(
        objects=tuple(objects.values()),
        notes=tuple(note for outcome in outcomes for note in outcome.notes),
        exit_code=worst_exit([outcome.exit_code for outcome in outcomes]),
        addresses={ref: url for outcome in outcomes for ref, url in outcome.addresses.items()},
    )


@click.command()
@click.argument("targets", nargs=-1, metavar="[KIND/NAME]...", shell_complete=complete_targets)
@click.option("-w", "--watch", is_flag=True, help="Stay in the foreground and repeat until Ctrl-C.")
@options.duration("--interval", "10s", "Between rounds.")
@click.option("--stop-at-exit", is_flag=True, help="With --watch: stop all processes at exit, keep the objects.")
@options.only_with("watch", "interval", "stop_at_exit")
@change_options(destructive=True)
def reconcile(cli: Invocation, targets: tuple[str, ...], watch: bool, interval: float, stop_at_exit: bool) -> int:
    """Compare recorded objects with live processes, and heal the difference; no manifests are read."""
    from areal.reconcilers import operations
    from areal.reconcilers.operations import reconcile_once

    refs = tuple(parse_refs(targets)) or None
    if stop_at_exit and refs:
        raise UsageFault("--stop-at-exit stops all processes; it cannot be used with KIND/NAME")
    approve = approver(cli, "this reconcile")
    if not watch:
        return mutate(cli, reconcile_once, refs, cli.deadline_s(), approve)
    with mutation(cli) as context:
        cli.info(f"watching every {interval:g} s; Ctrl-C ends it")
        approve, reported = _ask_once(approve), ""
        while not context.interrupted.is_set():
            try:
                done = reconcile_once(context, refs, cli.deadline_s(), approve)
            except ArealError as error:
                before, reported = reported, f"{error.message}\n{error.detail}"
                if reported != before:
                    report(error, cli)
            else:
                lines = [
                    f"{item.ref} {item.action}: {item.message}" for item in done.objects if item.action != "unchanged"
                ]
                before, reported = reported, "\n".join([*lines, *done.notes])
                if (lines and not done.exit_code) or reported not in ("", before):  # what stays wrong is reported once
                    finish(cli, done)
            context.interrupted.wait(interval)
        if stop_at_exit:
            operations.stop_processes(context)
    return interrupt.STATUS


def _ask_once(approve: Approve) -> Approve:
    """Wrap ``approve`` for a command that plans repeatedly: a declined plan is not asked about again, and if there is
    no terminal to ask on, the error says how to continue."""
    declined: set[str] = set()

    def asked(plan: Plan) -> bool:
        text = "\n".join(plan.destructive)
        if text in declined:
            return False
        try:
            approved = approve(plan)
        except UsageFault as error:
            raise UsageFault(
                error.message,
                detail=error.detail,
                hint="the watch waits: areal diff --drift shows the plan, and areal reconcile --yes carries it out; "
                "areal reconcile --watch --yes does so by itself",
            ) from error
        if not approved:
            declined.add(text)
        return approved

    return asked


@click.command()
@click.argument("target", required=False, metavar="[KIND/NAME]", shell_complete=complete_targets)
@click.option("--pid", type=click.IntRange(min=1), metavar="PID", help="A process of this machine.")
@click.option("--url", metavar="URL", help="An OpenAI-compatible server.")
@click.option("--as", "as_", metavar="KIND/NAME", shell_complete=complete_targets, help="The object that it becomes.")
@change_options()
def adopt(cli: Invocation, target: str | None, pid: int | None, url: str | None, as_: str | None) -> int:
    """Take a running process or URL under management, without restarting it.

    \b
    areal adopt --url http://10.0.0.7:8000 --as model/qwen
    areal adopt --pid 4711 --as model/qwen
    """
    from areal.reconcilers import operations

    name = as_ or target
    if name is None or (as_ and target and as_ != target):
        raise UsageFault("the object is not named: --as KIND/NAME", hint="areal adopt --url URL --as model/NAME")
    if (pid is None) == (url is None):
        raise UsageFault("give one of --pid and --url")
    (ref,) = parse_refs([name])
    address = checked_url(url) if url else None
    return mutate(cli, operations.adopt, ref, pid=pid, url=address, timeout_s=cli.deadline_s())


_WORDS = ("ready", "deleted", "completed")
_FORMS = "ready, deleted, completed, condition=TYPE[=STATUS] or jsonpath=EXPR=VALUE"
_TYPES = ("Ready", "Progressing", "Degraded", "Stalled")
_CONDITION = rf"(?i)condition=({'|'.join(_TYPES)})(=(True|False|Unknown))?"
_PART = r"(?:[^,\[\]'\"{}]|\[[^\]]*\]|\{[^}]*\}|'[^']*'|\"[^\"]*\")+"


@click.command()
@targets_argument
@click.option(
    "--for",
    "conditions",
    multiple=True,
    required=True,
    metavar="CONDITION",
    help=f"{_FORMS}; comma: or, repeated: and.",
)
@click.option("-l", "--selector", metavar="SELECTOR", help="Of one kind, the objects with these labels.")
@timeout("10m", "One deadline for everything (exit 7)")
@options.read_options()
def wait(cli: Invocation, targets: tuple[str, ...], conditions: tuple[str, ...], selector: str | None) -> int:
    """Wait until objects meet conditions. Fails at once (exit 8) when they can no longer be met.

    \b
    areal wait model/qwen --for ready --timeout 20m
    areal wait job/gsm8k --for completed,condition=Stalled
    """
    wanted = tuple(parse_alternatives(text) for text in conditions)
    chosen = gateway(cli)
    if chosen is not None:
        from areal.cli.remote_view import wait_remote

        return wait_remote(cli, chosen, parse_refs(targets), wanted, cli.deadline_s())
    refs = select(cli.home, targets, selector) if selector is not None else parse_refs(targets)
    if not refs and not any("deleted" in alternatives for alternatives in wanted):
        raise NotFound(f"no labels match {selector}: there is nothing to wait for", hint="areal get all -o wide")
    return wait_for(cli, refs, wanted)


def wait_for(
    cli: Invocation, refs: Sequence[Ref], wanted: tuple[tuple[str, ...], ...], *, within_s: float = 600.0
) -> int:
    from areal.reconcilers import status

    return mutate(cli, status.wait, refs, wanted, cli.deadline_s(within_s))


def parse_alternatives(text: str) -> tuple[str, ...]:
    """Split ``a,b`` into (a, b), but not at commas inside quotes or brackets. Raises UsageFault."""
    parts = re.findall(_PART, text)
    if not parts or ",".join(parts) != text:
        raise UsageFault(f"cannot read --for {text!r}", hint=f"write {_FORMS}")
    return tuple(_condition(part.strip()) for part in parts)


def _condition(text: str) -> str:
    if text.lower() in _WORDS:
        return text.lower()
    if re.fullmatch(_CONDITION, text):
        return text
    if text.startswith("jsonpath="):
        from areal.resources.jsonpath import compile_template

        expression, equals, _ = text.removeprefix("jsonpath=").rpartition("=")
        if not equals:
            raise UsageFault(f"--for {text} names no value", hint="write jsonpath={.status.phase}=Running")
        compile_template(expression)
        return text
    if text.startswith("condition="):
        hint = f"conditions: {', '.join(_TYPES)}, each =True, =False or =Unknown; a job's success: completed"
        raise UsageFault(f'no condition "{text.removeprefix("condition=")}"', hint=hint)
    raise UsageFault(f'no condition "{text}"{did_you_mean(text, _WORDS)}', hint=f"write {_FORMS}")


_FINDINGS = (
    field("SEVERITY", "severity", state=True),
    field("FIXED", "fixed"),
    field("WHAT", "what"),
    field("WHY", "why", wide=True),
    field("FIX", "fixCommand"),
)


@click.command()
@click.option(
    "--fix", is_flag=True, help="Make the repairs that lose nothing; with --yes also those that end a process."
)
@click.option("--security", is_flag=True, help="Also: exposed ports, file modes, keys in the environment.")
@stack(options.yes, options.lock_timeout, options.print_options)
def doctor(cli: Invocation, fix: bool, security: bool) -> int:
    """Find strays, open journals, stale leases, GPU squatters, a home on NFS, damaged files.

    Exit status 1 when something is left to repair.
    """
    from areal.reconcilers.doctor import doctor as examine

    with mutation(cli, changes=fix) as context:
        findings = examine(context, fix, security, lambda what: confirmed(cli, f"end the process? {what}"))
    if cli.format.kind == "table":
        for item in findings:
            show(f"{'fixed' if item.fixed else item.severity}: {item.what}")
            if item.why:
                show(f"  {item.why}")
            if item.fix_command and not item.fixed:
                show(f"  hint: {item.fix_command}")
        if not findings:
            cli.info("nothing found")
    else:
        rows = [
            {"severity": item.severity, "what": item.what, "why": item.why, "fixCommand": item.fix_command}
            | {"fixed": item.fixed}
            for item in findings
        ]
        emit_rows(cli, rows, _FINDINGS, name="{what}".format_map)
    return 1 if any(not item.fixed and item.severity != "info" for item in findings) else 0
