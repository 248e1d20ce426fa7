"""Background commands: ``python -m areal.reconcilers.background``.

``HOME SECONDS REF...`` converges objects that ``apply --no-wait`` left unfinished. It runs under a supervisor like all
processes of a home: `areal get processes` lists it, it is started again when it is killed, and it exits when nothing is
left to do. It begins when the command that started it has released its locks or died. A command that changes one of its
objects ends it first, converges that object itself, and starts another for the rest.

``HOME job-end TrainJob/NAME`` is started by a driver's supervisor when the driver has ended: it suspends the service
that the job created, and starts the objects that waited for the job. If it fails, the next reconcile does its work.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path

from areal import interrupt
from areal.errors import ArealError
from areal.reconcilers.context import Context
from areal.reconcilers.operations import reconcile_once, rest, start_dependents
from areal.resources.kinds import Ref, parse_ref
from areal.state.home import Home
from areal.state.locks import HOUSEKEEPING, actor, command_line, lock_objects
from areal.state.objects import ObjectStore

_JOB_END_LOCK_S = 3600.0  # of a command that loads a model beside an object that the job's end starts


def converge_rest(ctx: Context, refs: Iterable[Ref], seconds: float) -> int:
    """Converge those of ``refs`` that are still recorded; the exit status."""
    with lock_objects(ctx.home, sorted(refs), seconds, ctx.command, interrupted=ctx.interrupted):
        pass  # the command that started this process has recorded everything, or is dead
    store = ObjectStore(ctx.home)
    recorded = [ref for ref in refs if store.get(ref) is not None]
    if not recorded:
        return 0
    outcome = reconcile_once(ctx, recorded, seconds)
    for item in outcome.objects:
        if item.error is not None:
            sys.stderr.write(f"{item.ref}: {item.error.message}\n")
    sys.stderr.writelines(f"{note}\n" for note in outcome.notes)
    return outcome.exit_code


def end_job(home: Home, job: Ref) -> int:
    ctx = Context(home, actor(), f"{HOUSEKEEPING} {job}", lock_timeout_s=_JOB_END_LOCK_S)
    try:
        rest(ctx, job)
        start_dependents(ctx, job)
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
