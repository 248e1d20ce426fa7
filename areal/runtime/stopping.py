"""Stop one run, whatever state it is in, and leave nothing of it behind.

The shim is asked to end its component within the grace; one that does not keep the time is killed, and the kernel
kills the component with it. In either case the session is swept afterwards, since engines leave workers behind.
Every step may be repeated: a stop that was killed half-way is finished by the next.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from areal.errors import Conflict, TimedOut
from areal.runtime import gpus, records
from areal.runtime.backends.base import Phase, RunSpec, StopReport
from areal.runtime.identity import Liveness, ProcessIdentity, liveness, where
from areal.runtime.observation import read_identity
from areal.runtime.runs import DAMAGED, RunStore, read_intent
from areal.runtime.signals import ensure_dead, find_shim, request_end, sweep_run

_BETWEEN_GO_AND_ID_S = 20.0
_SWEEP_MARGIN_S = 15.0
MEMORY_TIMEOUT_S = 10.0  # for a driver to give a dead process's memory back
_MEMORY_SHARE = 0.9  # of what was free before the start; drivers keep a little


def stop_run(
    store: RunStore,
    uid: str,
    grace_s: float | None,
    crash: Callable[[str], None],
    list_gpus: Callable[[], gpus.GpuListing],
) -> StopReport:
    folder = store.folder(uid)
    crash("stop-before")
    identity = shim_identity(store, uid)
    alive = identity is not None and _end_shim(store, uid, identity, grace_s, crash)
    swept = sweep_run(identity, folder)
    if identity is not None:
        swept += _record_end(folder, swept)
    note = _await_memory(folder, list_gpus)
    crash("stop-after")
    return StopReport(uid, alive, tuple(sorted(set(swept))), note)


def shim_identity(store: RunStore, uid: str) -> ProcessIdentity | None:
    """Who supervises or supervised the run; None when nothing was started.

    Between the "go" and its record a shim holds the life lock and has no identity yet: it is waited for. A record
    that was damaged is replaced by what /proc says about the process that was told to supervise this very folder.
    """
    folder = store.folder(uid)
    deadline = time.monotonic() + _BETWEEN_GO_AND_ID_S
    while True:
        held = store.is_held(uid)
        try:
            identity = read_identity(folder)
        except DAMAGED:
            return find_shim(folder)
        if identity is not None or not held:
            return identity
        if time.monotonic() > deadline:
            raise TimedOut(f"run {uid} is being started by another command", hint="wait for it, or interrupt it")
        time.sleep(0.01)


def _end_shim(
    store: RunStore, uid: str, identity: ProcessIdentity, grace_s: float | None, crash: Callable[[str], None]
) -> bool:
    """True when it had been alive."""
    state = liveness(identity)
    if state is Liveness.UNKNOWN and not store.is_provably_over(uid, identity):
        raise Conflict(
            f"run {uid} cannot be stopped from here: it was {where(identity)}",
            hint="stop it where it was started; forget it if that place is gone",
        )
    alive = False
    if state is Liveness.ALIVE:
        folder = store.folder(uid)
        if grace_s is None:
            grace_s = float(_intent(folder).get("stop_grace_s", RunSpec.stop_grace_s))
        with suppress(OSError):  # a full disk must not keep a process alive: the shim then uses its own grace
            records.write_json(folder, records.STOP, {"grace_s": grace_s}, durable=False)
        alive = request_end(identity)
    crash("stop-signalled")
    if alive:
        ensure_dead(identity, (grace_s or 0.0) + _SWEEP_MARGIN_S)
    return alive


def _record_end(folder: str, swept: tuple[int, ...]) -> tuple[int, ...]:
    """The pids that the shim itself swept; when it left no exit record, write one in its place."""
    child: Mapping[str, Any] = {}
    try:
        ended = records.read_object(folder, records.EXIT)
        if ended is not None:
            return tuple(int(pid) for pid in ended["swept"])
        child = records.read_object(folder, records.CHILD) or {}
    except DAMAGED:
        pass  # replaced below
    record = {
        "phase": Phase.EXITED,
        "reason": "stopped after its supervisor had died",
        "restarts": child.get("restarts", 0),
        "last_exit": child.get("last_exit"),
        "swept": list(swept),
    }
    with suppress(OSError):  # without the record it is reported as dead, which it is
        records.write_json(folder, records.EXIT, record)
    return ()


def _await_memory(folder: str, list_gpus: Callable[[], gpus.GpuListing]) -> str:
    """Wait until the run's GPUs have their memory back; a sentence about what is missing, or nothing."""
    baseline: Mapping[str, int] = _intent(folder).get("gpu_free_bytes") or {}
    if not baseline:
        return ""
    wanted = {uuid: int(free * _MEMORY_SHARE) for uuid, free in baseline.items()}
    missing = gpus.wait_for_memory(wanted, list_gpus, MEMORY_TIMEOUT_S)
    return "; ".join(f"{uuid} has not got {size / 2**30:.1f} GiB back" for uuid, size in sorted(missing.items()))


def _intent(folder: str) -> Mapping[str, Any]:
    try:
        found = read_intent(folder)
    except DAMAGED:
        return {}
    return found[0] if found is not None else {}
