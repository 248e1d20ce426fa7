"""What earlier commands left: interrupted operations, finished or rolled back before anything new is done, and the
processes that go on for commands that did not wait.

Only starting a process can leave something that the next plan does not see: a shim between its fork and its
identity. Every other operation is idempotent and level-triggered, so planning again is its recovery.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
import time
from collections.abc import Collection
from pathlib import Path

from areal.errors import ArealError
from areal.reconcilers.context import Context
from areal.resources.kinds import Ref, parse_ref
from areal.runtime.backends import Backends
from areal.runtime.backends.base import Phase, RestartPolicy, RunControl, RunSpec
from areal.state.events import EventLog
from areal.state.journal import Journal, OpenTransaction, Operation, Transaction, orphans

IDENTITY_GRACE_S = 2.0  # a shim that was told "go" writes its identity within milliseconds


def recover(ctx: Context, backend: RunControl) -> tuple[str, ...]:
    """Settle every orphaned journal; one sentence each. Writes nothing when there is none."""
    sentences = []
    for orphan in orphans(ctx.home):
        taken = Journal.resume(orphan)
        if taken is None:
            continue
        found, transaction = taken
        settled = []
        for operation in found.unfinished:
            settled.append(_settle(backend, operation))
            transaction.end(operation.n)
        transaction.commit()
        sentences.append(_sentence(found, [item for item in settled if item]))
    return tuple(sentences)


def _settle(backend: RunControl, operation: Operation) -> str:
    if operation.op != "spawn":
        return ""
    uid, target = str(operation.data.get("run", "")), f"{operation.data.get('ref')} {operation.data.get('target')}"
    pid = operation.data.get("pid")
    deadline = time.monotonic() + IDENTITY_GRACE_S
    while True:
        state = backend.observe([uid]).get(uid)
        if state is None:
            return ""
        if state.phase is not Phase.INTENDED:
            return f"{target} is {state.phase}, kept"
        if pid is None or not Path(f"/proc/{pid}").exists() or time.monotonic() > deadline:
            break
        time.sleep(0.02)
    with contextlib.suppress(ArealError):
        backend.stop(uid, grace_s=0)
    backend.forget(uid)
    return f"{target} had not started, forgotten"


def _sentence(found: OpenTransaction, settled: list[str]) -> str:
    when = time.strftime("%H:%M:%S", time.localtime(found.at))
    detail = f": {'; '.join(settled)}" if settled else ""
    return f"recovered an interrupted `{found.command}` of {when}{detail}"


# -- processes in the background

COMPONENT = "reconcile"
_LIVING = (Phase.INTENDED, Phase.STARTING, Phase.RUNNING, Phase.BACKOFF)
_ENDED = (Phase.EXITED, Phase.DEAD, Phase.CRASHLOOP)
_GRACE_S = 60.0  # an operation that has begun is finished
_TRY_AGAIN = (6, 7, 130)  # locked, timed out, interrupted; whatever else fails would fail again
_FINAL = tuple(code for code in range(1, 128) if code not in _TRY_AGAIN)
_RESTARTS = 20


def start_background(ctx: Context, backend: Backends, tx: Transaction, refs: Collection[Ref], seconds: float) -> None:
    """Start the process that converges ``refs`` once our locks are free; journaled in ``tx``."""
    names = sorted(map(str, refs))
    uid = f"{COMPONENT}-{secrets.token_hex(4)}"
    spec = RunSpec(
        uid=uid,
        owner="",
        component=COMPONENT,
        replica=0,
        argv=(sys.executable, "-m", "areal.reconcilers.background", str(ctx.home.root), f"{seconds:g}", *names),
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


def take_over(backend: RunControl, touched: Collection[Ref]) -> frozenset[Ref]:
    """End those processes that have one of ``touched`` in hand, and forget those that have ended: what they were to
    converge."""
    left: set[Ref] = set()
    for uid, state in backend.observe().items():
        if state.spec.component != COMPONENT or uid == os.environ.get("AREAL_RUN_UID"):
            continue
        if state.phase in _ENDED:
            backend.forget(uid)
            continue
        refs = frozenset(map(parse_ref, state.spec.inputs.get("refs", ())))
        if state.phase in _LIVING and refs & set(touched):
            backend.stop(uid, grace_s=_GRACE_S)
            backend.forget(uid)
            left |= refs
    return frozenset(left)
