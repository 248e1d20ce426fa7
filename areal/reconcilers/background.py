"""Background commands: ``python -m areal.reconcilers.background``.

``HOME SECONDS REF...`` converges objects that ``apply --no-wait`` left unfinished, or whose wait for a job has ended.
Each that can be started is; the others have an event with the reason. It runs under a supervisor like all
processes of a home: `areal get processes` lists it, it is started again when it is killed, and it exits when nothing is
left to do. It begins when the command that started it has released its locks or died. A command that changes one of its
objects ends it first, converges that object itself, and starts another for the rest.

``HOME job-end TrainJob/NAME`` is started by a driver's supervisor when the driver has ended: it suspends the service
that the job created, and starts such a process for the objects that waited for the job; on the node of a cluster,
where no other command would find that, it converges them itself. If it fails, the next reconcile does its work.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path

from areal import interrupt
from areal.errors import ArealError, Locked
from areal.reconcilers.context import Context
from areal.reconcilers.converge import TRY_AGAIN, start_background
from areal.reconcilers.desired import needs_of
from areal.reconcilers.operations import DEFAULT_TIMEOUT_S, dependents, reconcile_once, rest
from areal.reconcilers.prepare import CommandContext
from areal.resources.kinds import KINDS, Ref, parse_ref
from areal.runtime.backends import LOCAL
from areal.state.events import EventLog
from areal.state.home import Home
from areal.state.locks import HOUSEKEEPING, actor, command_line, lock_objects
from areal.state.objects import ObjectStore

_JOB_END_LOCK_S = 3600.0  # of a command that loads a model beside an object that the job's end changes


def converge_rest(ctx: Context, refs: Iterable[Ref], seconds: float) -> int:
    """Converge those of ``refs`` that are still recorded. Return the exit status."""
    with lock_objects(ctx.home, sorted(refs), ctx.lock_timeout_s, ctx.command, interrupted=ctx.interrupted):
        pass  # the command that started this process has recorded everything, or is dead
    store = ObjectStore(ctx.home)
    recorded = sorted(filter(None, map(store.get, refs)), key=lambda item: KINDS[item.kind].order)
    if not recorded:
        return 0
    try:
        return _converge(ctx, [item.ref for item in recorded], seconds)
    except Locked:
        raise
    except ArealError as error:
        if len(recorded) == 1:
            _note(ctx, recorded[0].ref, error.message)
            raise
    failed: dict[str, ArealError] = {}
    codes = set[int]()
    for item in recorded:  # one by one: each that can start does
        try:
            if need := next((need for need in needs_of(item) if need in failed), None):
                raise ArealError(f"{need} does not run: {failed[need].message}")
            codes.add(_converge(ctx, [item.ref], seconds))
        except ArealError as error:
            failed[str(item.ref)] = error
            codes.add(error.exit_code)
            _note(ctx, item.ref, error.message)
    return max(codes, key=lambda code: (code in TRY_AGAIN, code))


def _converge(ctx: Context, refs: Sequence[Ref], seconds: float) -> int:
    outcome = reconcile_once(ctx, refs, seconds)
    for item in outcome.objects:
        if item.exit_code and not ctx.interrupted.is_set():
            _note(ctx, parse_ref(item.ref), item.message if item.error is None else item.error.message)
    sys.stderr.writelines(f"{note}\n" for note in outcome.notes)
    return outcome.exit_code


def _note(ctx: Context, ref: Ref, fault: str) -> None:
    sys.stderr.write(f"{ref}: {fault}\n")
    EventLog(ctx.home).record(ref, "Warning", "NotStarted", fault, actor=ctx.actor)


def end_job(home: Home, job: Ref) -> int:
    ctx = Context(home, actor(), f"{HOUSEKEEPING} {job}", lock_timeout_s=_JOB_END_LOCK_S)
    try:
        rest(ctx, job)
        command = CommandContext.open(ctx)
        refs = dependents(command, job)
        if command.scheduler_of({}, str(job))["type"] != LOCAL:
            return converge_rest(ctx, refs, DEFAULT_TIMEOUT_S)
        start_background(command, refs, DEFAULT_TIMEOUT_S)
    except ArealError as error:
        return error.exit_code
    return 0


def main(argv: Sequence[str]) -> int:
    home, seconds, *names = argv
    refs = [parse_ref(name) for name in names]
    if seconds == "job-end":
        return end_job(Home(Path(home)), refs[0])
    interrupted = threading.Event()
    signal.signal(signal.SIGTERM, lambda number, frame: interrupt.set_in_handler(interrupted))
    ctx = Context(Home(Path(home)), actor(), command_line(), float(seconds), interrupted=interrupted)
    try:
        return converge_rest(ctx, refs, float(seconds))
    except KeyboardInterrupt:
        return interrupt.STATUS
    except ArealError as error:
        sys.stderr.write(f"error: {error.message}\n")
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
