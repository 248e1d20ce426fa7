"""From a run's files and /proc to one ``RunState``: read-only, never raising, dead only on proof.

Order matters: the shim writes ``exit.json`` before it dies, so its life is looked at first and the exit record
after; a run found dead without one then truly has none. A thousand runs are observed in a fraction of a second:
only the files that the answer needs are opened.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from areal.runtime import procfs, records
from areal.runtime.backends.base import LastExit, Phase, RunSpec, RunState
from areal.runtime.identity import Liveness, ProcessIdentity, liveness, same_boot, where
from areal.runtime.runs import DAMAGED, RunStore, last_exit_from_record, read_intent

_HALTED = "Tt"  # by a signal (SIGSTOP), or by a debugger
_SETTLE_TRIES = 60  # a quarter of a second: a supervisor on a loaded machine may have to wait for its turn
_SETTLE_STEP_S = 0.004


def observe_run(store: RunStore, uid: str) -> RunState | None:
    """None when there is no such run."""
    folder = f"{store.root}/{uid}"
    try:
        intent = read_intent(folder)
    except DAMAGED as error:
        return _unreadable(uid, f"{records.INTENT} cannot be read: {error!r}")
    if intent is None:
        return _missing_intent(store, uid)
    _, spec = intent
    try:
        identity = read_identity(folder)
        if identity is None:
            return RunState(spec, Phase.INTENDED)
        return _observe_identified(store, folder, spec, identity)
    except DAMAGED as error:
        return RunState(spec, Phase.UNKNOWN, reason=f"a record cannot be read: {error!r}")


def read_identity(folder: str) -> ProcessIdentity | None:
    """The shim's; raises ValueError, KeyError or TypeError on a damaged record."""
    record = records.read_object(folder, records.ID)
    return None if record is None else ProcessIdentity.from_record(record)


def _observe_identified(store: RunStore, folder: str, spec: RunSpec, identity: ProcessIdentity) -> RunState:
    state = liveness(identity)
    ended = records.read_object(folder, records.EXIT)
    if ended is not None:
        return _ended(spec, identity, ended)
    if state is Liveness.ALIVE:
        return _living(folder, spec, identity)
    if state is Liveness.UNKNOWN and not store.is_provably_over(spec.uid, identity):
        return RunState(spec, Phase.UNKNOWN, shim_pid=identity.pid, reason=where(identity))
    return _dead(folder, spec, identity)


def _ended(spec: RunSpec, identity: ProcessIdentity, record: Mapping[str, Any]) -> RunState:
    return RunState(
        spec,
        Phase(record["phase"]),
        shim_pid=identity.pid,
        restarts=int(record["restarts"]),
        last_exit=last_exit_from_record(record["last_exit"]),
        reason=str(record["reason"]),
    )


def _dead(folder: str, spec: RunSpec, identity: ProcessIdentity) -> RunState:
    reason = "its supervisor died without a word" if same_boot(identity) else "the machine was restarted"
    restarts, last_exit = 0, None
    try:
        child = records.read_object(folder, records.CHILD)
        if child:
            restarts, last_exit = int(child["restarts"]), last_exit_from_record(child["last_exit"])
    except DAMAGED:
        pass  # written without fsync: after a power cut it may be empty, and the verdict does not need it
    return RunState(spec, Phase.DEAD, shim_pid=identity.pid, restarts=restarts, last_exit=last_exit, reason=reason)


def _living(folder: str, spec: RunSpec, identity: ProcessIdentity) -> RunState:
    """The shim lives. A component that has just died is given a moment to be noticed by it."""
    child = records.read_object(folder, records.CHILD)
    for _ in range(_SETTLE_TRIES):
        if child is None or child["state"] != "running" or _living_child(child) is not None:
            break
        time.sleep(_SETTLE_STEP_S)
        if ended := records.read_object(folder, records.EXIT):
            return _ended(spec, identity, ended)
        child = records.read_object(folder, records.CHILD)
    if child is None:
        return RunState(spec, Phase.STARTING, shim_pid=identity.pid)
    last_exit = last_exit_from_record(child["last_exit"])
    stat = _living_child(child) if child["state"] == "running" else None
    if stat is not None:
        return RunState(
            spec,
            Phase.RUNNING,
            pid=int(child["pid"]),
            shim_pid=identity.pid,
            started_at=float(child["started_at"]),
            restarts=int(child["restarts"]),
            last_exit=last_exit,
            halted=stat.state in _HALTED,
        )
    return RunState(
        spec,
        Phase.BACKOFF,
        shim_pid=identity.pid,
        restarts=int(child["restarts"]),
        last_exit=last_exit,
        reason=_backoff_reason(child, last_exit),
    )


def _living_child(child: Mapping[str, Any]) -> procfs.Stat | None:
    """None when the recorded child is gone."""
    stat = procfs.read_stat(int(child["pid"]))
    return stat if stat is not None and stat.alive and stat.start_ticks == int(child["start_ticks"]) else None


def _backoff_reason(child: Mapping[str, Any], last_exit: LastExit | None) -> str:
    if child["state"] == "running":
        return "the component has died and its supervisor has not noticed yet"
    wait_s = max(0.0, float(child["next_start_at"]) - time.time())
    return f"{last_exit.reason if last_exit else 'not started'}; next start in {wait_s:.0f} s"


def _missing_intent(store: RunStore, uid: str) -> RunState | None:
    if uid not in store.uids():
        return None
    return _unreadable(uid, f"{records.INTENT} is missing")


def _unreadable(uid: str, reason: str) -> RunState:
    spec = RunSpec(uid=uid, owner="", component="", replica=0, argv=())
    return RunState(spec, Phase.UNKNOWN, reason=reason)
