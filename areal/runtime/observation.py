"""The state of a run, from its folder, /proc, and the scheduler if there is one.

Observation never raises, and reports DEAD only on proof. The shim writes ``exit.json`` before it dies, so its life is
checked first and the exit record afterwards: a run found dead without an exit record truly has none.
"""

from __future__ import annotations

import contextlib
import os
import time

from areal.dataclasses import replace
from areal.runtime import procfs, records
from areal.runtime.backends.base import Cause, Job, JobState, LastExit, Phase, RunSpec, RunState
from areal.runtime.identity import Liveness, ProcessIdentity, identify, liveness, same_boot, where
from areal.runtime.runs import (
    DAMAGED,
    ChildRecord,
    EndRecord,
    RunStore,
    copy_reason,
    is_copy,
    read_child,
    read_end,
    read_intent,
    read_stage,
)

_HALTED = "Tt"  # by a signal (SIGSTOP), or by a debugger
_SETTLE_TRIES = 60  # a quarter of a second: a supervisor on a loaded machine may have to wait for its turn
_SETTLE_STEP_S = 0.004
_RECORDED_S = 2.0  # the shim records a component at once after it starts it


def observe_run(store: RunStore, uid: str) -> RunState | None:
    """Return the run's state, or None if there is no such run."""
    folder = f"{store.root}/{uid}"
    try:
        intent = read_intent(folder)
    except DAMAGED as error:
        return _unreadable(uid, f"{records.INTENT} cannot be read: {_brief(error)}")
    if intent is None:
        return _unreadable(uid, f"{records.INTENT} is missing") if uid in store.uids() else None
    spec = intent.spec
    try:
        identity, lost = supervisor_of(store, uid)
        state = liveness(identity) if identity is not None else None
        if (ended := read_end(folder)) is not None:
            return _ended(spec, identity, ended)
        if identity is None and lost:
            reason = f"{folder}/{records.ID} is lost, and its supervisor is not here"
            return RunState(spec, Phase.UNKNOWN, reason=reason)
        if identity is None:
            return RunState(spec, Phase.INTENDED)
        if state is Liveness.ALIVE and (original := store.original_of(uid, identity)):
            reason = copy_reason(folder, original)
            return RunState(spec, Phase.UNKNOWN, shim_pid=identity.pid, reason=reason)
        if state is Liveness.ALIVE:
            found = _living(folder, spec, identity)
            damage = f"{folder}/{records.ID} is lost" if lost else _config_damage(folder, spec)
            return replace(found, damage=damage or found.damage)
        if state is Liveness.UNKNOWN and not store.is_provably_over(spec.uid, identity):
            return RunState(spec, Phase.UNKNOWN, shim_pid=identity.pid, reason=where(identity))
        return _dead(folder, spec, identity)
    except DAMAGED as error:
        return RunState(spec, Phase.UNKNOWN, reason=f"a record in {folder} cannot be read: {_brief(error)}")


def _brief(error: Exception) -> str:
    """Return what is wrong with a record, without the bytes of the file."""
    match error:
        case UnicodeError():
            return "it is not UTF-8"
        case KeyError():
            return f"the field {error} is missing"
        case OSError(strerror=str(reason)):
            return reason
    return str(error)


def read_identity(folder: str) -> ProcessIdentity | None:
    """Return the shim's identity. Raises ValueError, KeyError or TypeError for a damaged record."""
    record = records.read_object(folder, records.ID)
    return None if record is None else ProcessIdentity.from_record(record)


def repair_run(store: RunStore, uid: str) -> None:
    """Rewrite the lost identity of a living supervisor, its component's record and configuration. Raises OSError."""
    folder = store.folder(uid)
    identity, lost = supervisor_of(store, uid)
    if identity is not None and lost:
        _rewrite(folder, records.ID, procfs.identity_fields(identity.pid))
    intent = read_intent(folder)
    if intent is not None and _config_damage(folder, intent.spec):
        _rewrite(folder, records.CONFIG, intent.spec.config)
    if intent is None or identity is None or liveness(identity) is not Liveness.ALIVE:
        return
    try:
        is_lost = bool(_living(folder, intent.spec, identity).damage)
    except DAMAGED:  # the component has ended meanwhile: its supervisor writes the next record
        return
    component = _component_of(identity)
    if is_lost and component is not None:
        record = {"state": "running", "restarts": 0, "last_exit": None, "pid": component.pid}
        more = {"start_ticks": component.start_ticks, "started_at": time.time() - _age_s(component)}
        _rewrite(folder, records.CHILD, record | more)


def _rewrite(folder: str, name: str, value: object) -> None:
    if os.path.isdir(f"{folder}/{name}"):  # cannot be replaced by a file, and is not ours to delete
        os.rename(f"{folder}/{name}", f"{folder}/{name}.damaged-{os.getpid()}")
    records.write_json(folder, name, value)


def _config_damage(folder: str, spec: RunSpec) -> str:
    """Return why the component's next start could not read its configuration; "" if it can. Values may differ: the
    component itself writes settings that were changed while it ran."""
    try:
        found = records.read_object(folder, records.CONFIG)
    except DAMAGED:
        found = None
    is_whole = found is not None and found.keys() >= spec.config.keys() if spec.config else True
    return "" if is_whole else f"{folder}/{records.CONFIG} is not what it was started with"


def supervisor_of(store: RunStore, uid: str) -> tuple[ProcessIdentity | None, bool]:
    """Return the shim's identity, and whether its record is lost, in which case it is read from the process."""
    folder = store.folder(uid)
    try:
        identity = read_identity(folder)
        if identity is not None or not store.is_held(uid) or not os.path.exists(f"{folder}/{records.CHILD}"):
            return identity, False  # it failed to start, or has not started yet
    except DAMAGED:
        pass
    return find_shim(folder), True


def find_shim(run_dir: str) -> ProcessIdentity | None:
    """Return the living supervisor of a run folder, without its record: the session leader started with it.

    Shims never rename themselves, and only a shim leads a session with that folder in its first environment.
    """
    for stat in procfs.processes():
        if stat.session == stat.pid and procfs.environment(stat.pid).get(procfs.RUN_DIR_VARIABLE) == run_dir:
            with contextlib.suppress(ProcessLookupError):
                return identify(stat.pid)
    return None


def _ended(spec: RunSpec, identity: ProcessIdentity | None, end: EndRecord) -> RunState:
    return RunState(
        spec,
        end.phase,
        shim_pid=identity.pid if identity is not None else None,
        restarts=end.restarts,
        last_exit=end.last_exit,
        reason=end.reason,
        logged_at=end.logged_at,
    )


def _dead(folder: str, spec: RunSpec, identity: ProcessIdentity) -> RunState:
    reason = "its supervisor died without a word" if same_boot(identity) else "the machine was restarted"
    state = RunState(spec, Phase.DEAD, None, identity.pid, reason=reason, logged_at=records.logged_at(folder))
    with contextlib.suppress(*DAMAGED):  # written without fsync: after a power cut it may be empty, and is not needed
        if child := read_child(folder):
            return replace(state, started_at=child.started_at, restarts=child.restarts, last_exit=child.last_exit)
    return state


def _living(folder: str, spec: RunSpec, identity: ProcessIdentity) -> RunState:
    """Return the state of a run whose shim lives; without its record, of the process. Raises one of DAMAGED."""
    component = None
    try:
        state = _recorded(folder, spec, identity)
        if state.phase is not Phase.STARTING:
            return state
        component = _component_of(identity)
        if component is None or _age_s(component) < _RECORDED_S:
            return state
    except DAMAGED:
        component = _component_of(identity)
        if component is None:
            raise
    started_at, damage = time.time() - _age_s(component), f"{folder}/{records.CHILD} is lost"
    halted = component.state in _HALTED
    return RunState(spec, Phase.RUNNING, component.pid, identity.pid, started_at, halted=halted, damage=damage)


def _component_of(identity: ProcessIdentity) -> procfs.Stat | None:
    """Return the component of a living shim: its oldest child, since later ones are what the component left."""
    children = [stat for stat in procfs.processes() if stat.ppid == identity.pid]
    return min(children, key=lambda stat: stat.start_ticks, default=None)


def _age_s(stat: procfs.Stat) -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME) - stat.start_ticks / os.sysconf("SC_CLK_TCK")


def _recorded(folder: str, spec: RunSpec, identity: ProcessIdentity) -> RunState:
    """Return the recorded state of a run whose shim lives. If its component has just died, give it time to notice."""
    child = read_child(folder)
    for _ in range(_SETTLE_TRIES):
        if child is None or not child.runs or _living_child(child) is not None:
            break
        time.sleep(_SETTLE_STEP_S)
        if ended := read_end(folder):
            return _ended(spec, identity, ended)
        child = read_child(folder)
    if child is None:
        return RunState(spec, Phase.STARTING, shim_pid=identity.pid)
    stat = _living_child(child) if child.runs else None
    runs, halted = stat is not None, stat is not None and stat.state in _HALTED
    return _of_child(folder, spec, identity, child, runs=runs, halted=halted)


def _of_child(
    folder: str, spec: RunSpec, identity: ProcessIdentity, child: ChildRecord, *, runs: bool, halted: bool
) -> RunState:
    """Return the state of a run whose supervisor lives and has started the component."""
    restarts, last_exit = child.restarts, child.last_exit
    if runs:
        stage = None if spec.url else read_stage(folder)
        failing = stage.failing if stage is not None else ""
        pid, started_at = child.pid, child.started_at
        return RunState(
            spec, Phase.RUNNING, pid, identity.pid, started_at, restarts, last_exit, halted=halted, failing=failing
        )
    if child.runs:
        reason = "the component has died and its supervisor has not noticed yet"
    else:
        cause, wait_s = last_exit.reason if last_exit else "not started", max(0.0, child.next_start_at - time.time())
        reason = f"{cause}; next start in {wait_s:.0f} s"
    return RunState(spec, Phase.BACKOFF, None, identity.pid, None, restarts, last_exit, reason)


def _living_child(child: ChildRecord) -> procfs.Stat | None:
    """Return the stat of the recorded child, or None if it is gone."""
    stat = procfs.read_stat(child.pid)
    return stat if stat is not None and stat.alive and stat.start_ticks == child.start_ticks else None


def observe_job(store: RunStore, uid: str, job: Job | None) -> RunState | None:
    """Return the state of a run on another machine, from its records and the scheduler's information instead of /proc.
    ``job`` None: the scheduler does not know it. Return None if there is no such run."""
    folder = f"{store.root}/{uid}"
    try:
        intent = read_intent(folder)
        if intent is None:
            return _unreadable(uid, f"{records.INTENT} is missing") if uid in store.uids() else None
        # The order of the reads is that of a local run: life first (the scheduler was asked before), the end after.
        spec = intent.spec
        identity = read_identity(folder)
        child = read_child(folder)
        ended = read_end(folder)
        if job is not None and job.requeues:  # what its node program had not seen when it last started
            started = records.read_object(folder, records.NODE) or {}
            if int(started.get("requeues", 0)) != job.requeues:
                identity, child, ended = None, None, None
        if ended is None and is_copy(folder, intent.folder, intent.inode):
            return RunState(spec, Phase.UNKNOWN, reason=copy_reason(folder, intent.folder))
        since = intent.created_at
        if job is None and identity is None and ended is None:
            return RunState(spec, Phase.INTENDED, queued_at=since)
        job = job or Job(JobState.ENDED)
        asked = job.cause and records.read_object(folder, records.STOP)  # by us: no accident
        state, cause = _of_job(folder, spec, identity, child, ended, job), Cause.NONE if asked else job.cause
        if cause and job.reason and state.reason == "stopped":  # its supervisor knew no more
            last = state.last_exit or LastExit(None, None, job.ended_at or time.time())
            state = replace(state, last_exit=replace(last, reason=job.reason))
        return replace(
            state, node=job.node, job_id=job.job_id, gpus=job.gpus, cause=cause, queued_at=job.queued_at or since
        )
    except DAMAGED as error:
        return _unreadable(uid, f"a record cannot be read: {_brief(error)}")


def _of_job(
    folder: str,
    spec: RunSpec,
    identity: ProcessIdentity | None,
    child: ChildRecord | None,
    ended: EndRecord | None,
    job: Job,
) -> RunState:
    if ended is not None and job.state is not JobState.QUEUED:
        return _ended(spec, identity, ended)
    if job.state is JobState.QUEUED:
        return RunState(spec, Phase.QUEUED, reason=job.reason)
    shim_pid = identity.pid if identity is not None else None
    restarts, last_exit = (child.restarts, child.last_exit) if child is not None else (0, None)
    if job.state is not JobState.RUNNING:
        phase = Phase.UNKNOWN if job.state is JobState.UNKNOWN else Phase.DEAD
        reason = job.reason or "its job is gone without a word of its supervisor"
        if phase is Phase.DEAD and job.ended_at is not None:
            last_exit = LastExit(None, None, job.ended_at, reason)
        return RunState(spec, phase, shim_pid=shim_pid, restarts=restarts, last_exit=last_exit, reason=reason)
    if identity is None or child is None:
        return RunState(spec, Phase.STARTING, shim_pid=shim_pid)
    state = _of_child(folder, spec, identity, child, runs=child.runs, halted=job.suspended)
    return replace(state, reason=job.reason) if job.suspended else state


def _unreadable(uid: str, reason: str) -> RunState:
    spec = RunSpec(uid=uid, owner="", component="", replica=0, argv=())
    return RunState(spec, Phase.UNKNOWN, reason=reason)
