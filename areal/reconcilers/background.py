"""What ``apply --no-wait`` leaves to do is done by one process: ``python -m areal.reconcilers.background HOME SECONDS
REF...``. It runs under a supervisor as every process of a home does, so it is seen (`areal get processes`), started
again when it is killed, and ends by itself when nothing is left.

It begins when whoever started it has let go of its locks, finished or dead. A command that is to change one of its
objects ends it first, does what it would have done there, and starts another for the rest.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import FrameType

from areal.errors import ArealError
from areal.reconcilers.context import Context
from areal.reconcilers.operations import reconcile_once
from areal.resources.kinds import Ref, parse_ref
from areal.state.home import Home
from areal.state.locks import actor, command_line, lock_objects
from areal.state.objects import ObjectStore


def converge_rest(ctx: Context, refs: Iterable[Ref], seconds: float) -> int:
    """Converge those of ``refs`` that are still recorded; the exit status."""
    with lock_objects(ctx.home, sorted(refs), seconds, ctx.command, interrupted=ctx.interrupted):
        pass  # the command that left this to us has recorded everything, or is dead
    store = ObjectStore(ctx.home)
    there = [ref for ref in refs if store.get(ref) is not None]
    if not there:
        return 0
    outcome = reconcile_once(ctx, there, seconds)
    for item in outcome.objects:
        if item.error is not None:
            sys.stderr.write(f"{item.ref}: {item.error.message}\n")
    for note in outcome.notes:
        sys.stderr.write(f"{note}\n")
    return outcome.exit_code


def main(argv: Sequence[str]) -> int:
    home, seconds, *refs = argv
    interrupted = threading.Event()

    def interrupt(number: int, frame: FrameType | None) -> None:
        interrupted.set()

    signal.signal(signal.SIGTERM, interrupt)
    ctx = Context(Home(Path(home)), actor(), command_line(), float(seconds), interrupted=interrupted)
    try:
        return converge_rest(ctx, [parse_ref(ref) for ref in refs], float(seconds))
    except KeyboardInterrupt:
        return 130
    except ArealError as error:
        sys.stderr.write(f"error: {error.message}\n")
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
