"""What ``apply --no-wait`` leaves to do is done by one process: ``python -m areal.reconcilers.background HOME SECONDS
REF...``. It runs under a supervisor as every process of a home does, so it is seen (`areal get processes`), started
again when it is killed, and ends by itself when nothing is left.

It begins when whoever started it has let go of its locks, finished or dead. A command that is to change one of its
objects ends it first, does what it would have done there, and starts another for the rest.
"""

from __future__ import annotations

import os
import secrets
import signal
import sys
import threading
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from types import FrameType

from areal.errors import ArealError
from areal.reconcilers.context import Context
from areal.resources.kinds import Ref, parse_ref
from areal.runtime.backends.base import Phase, RestartPolicy, RunSpec, RunState
from areal.runtime.backends.local import LocalBackend
from areal.state.actor import actor, command_line
from areal.state.events import EventLog
from areal.state.home import Home
from areal.state.journal import Transaction
from areal.state.locks import lock_objects
from areal.state.objects import ObjectStore

COMPONENT = "reconcile"
_LIVING = (Phase.INTENDED, Phase.STARTING, Phase.RUNNING, Phase.BACKOFF)
_ENDED = (Phase.EXITED, Phase.DEAD, Phase.CRASHLOOP)
_GRACE_S = 60.0  # an operation that has begun is finished
_TRY_AGAIN = (6, 7, 130)  # locked, timed out, interrupted; whatever else fails would fail again
_FINAL = tuple(code for code in range(1, 128) if code not in _TRY_AGAIN)
_RESTARTS = 20


def start(ctx: Context, backend: LocalBackend, tx: Transaction, refs: Collection[Ref], seconds: float) -> None:
    """Start the process that converges ``refs`` once our locks are free; journaled in ``tx``."""
    names = sorted(map(str, refs))
    uid = f"{COMPONENT}-{secrets.token_hex(4)}"
    spec = RunSpec(
        uid=uid,
        owner="",
        component=COMPONENT,
        replica=0,
        argv=(sys.executable, "-m", __name__, str(ctx.home.root), f"{seconds:g}", *names),
        env={"PYTHONUNBUFFERED": "1"},
        inputs={"refs": names, "seconds": seconds},
        restart=RestartPolicy("OnFailure", 1.0, 2.0, 10.0, budget_count=_RESTARTS, final_exit_codes=_FINAL),
        stop_grace_s=_GRACE_S,
    )
    number = tx.begin("spawn", ref=", ".join(names), target=f"{COMPONENT}/0", run=uid)
    backend.start(spec, on_pid=lambda pid: tx.note(number, pid=pid))
    tx.end(number)
    for ref in refs:
        message = f"process {uid} goes on: it waits for what was started and ends by itself"
        EventLog(ctx.home).record(ref, "Normal", "GoesOn", message, actor=ctx.actor)


def take_over(backend: LocalBackend, touched: Collection[Ref]) -> frozenset[Ref]:
    """End those processes that have one of ``touched`` in hand, and forget those that have ended: what they were to
    converge."""
    left: set[Ref] = set()
    for uid, state in backend.observe().items():
        if state.spec.component != COMPONENT or uid == os.environ.get("AREAL_RUN_UID"):
            continue
        if state.phase in _ENDED:
            backend.forget(uid)
        elif state.phase in _LIVING and (refs := _refs(state)) & set(touched):
            backend.stop(uid, grace_s=_GRACE_S)
            backend.forget(uid)
            left |= refs
    return frozenset(left)


def _refs(state: RunState) -> frozenset[Ref]:
    return frozenset(map(parse_ref, state.spec.inputs.get("refs", ())))


def converge_rest(ctx: Context, refs: Iterable[Ref], seconds: float) -> int:
    """Converge those of ``refs`` that are still recorded; the exit status."""
    from areal.reconcilers.reconcile import reconcile_once

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
