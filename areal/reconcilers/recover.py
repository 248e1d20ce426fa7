"""Finish or roll back what an interrupted command left, before doing anything new; say so.

Only starting a process can leave something that the next plan does not see: a shim between its fork and its
identity. Every other operation is idempotent and level-triggered, so planning again is its recovery.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

from areal.errors import ArealError
from areal.reconcilers.context import Context
from areal.runtime.backends.base import Backend, Phase
from areal.state.journal import Journal, OpenTransaction, Operation, orphans

IDENTITY_GRACE_S = 2.0  # a shim that was told "go" writes its identity within milliseconds


def recover(ctx: Context, backend: Backend) -> tuple[str, ...]:
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


def _settle(backend: Backend, operation: Operation) -> str:
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
