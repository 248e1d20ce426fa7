"""What does not add up between records, processes and leases: found read-only, repaired one by one.

``inspect`` names each problem and what would repair it; ``repair`` does that, and only for what was proved.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from enum import StrEnum

from areal.errors import ArealError
from areal.runtime import procfs
from areal.runtime.backends.base import Phase, RunState
from areal.runtime.backends.local import LocalBackend
from areal.runtime.claims import port_lease
from areal.runtime.signals import ensure_dead, find_shim, request_end, sweep_run
from areal.runtime.sweep import RUN_DIR_VARIABLE

_LIVING = frozenset({Phase.STARTING, Phase.RUNNING, Phase.BACKOFF, Phase.UNKNOWN})
_STRAY_GRACE_S = 10.0


class Trouble(StrEnum):
    STRAY_PROCESS = "stray-process"  # a process of a run that has no record
    ORPHANS = "orphaned-processes"  # the supervisor is dead, parts of the component live
    DEAD_RECORD = "dead-record"  # the supervisor died without a word
    NEVER_STARTED = "never-started"  # an intent whose caller died before the "go"
    UNREADABLE = "unreadable-record"
    LEASE_WITHOUT_RUN = "lease-without-run"  # held on behalf of a run of this home that does not live
    LEFTOVER = "leftover-folder"  # of a start or forget that was killed


@dataclass(frozen=True)
class Problem:
    trouble: Trouble
    subject: str  # run uid, lease name or folder
    message: str
    pids: tuple[int, ...] = ()
    repairable: bool = True


def inspect(backend: LocalBackend) -> tuple[Problem, ...]:
    states = backend.observe()
    by_folder = _processes_by_folder(backend.store.root)
    problems: list[Problem] = []
    for folder, pids in sorted(by_folder.items()):
        problems += _judge_processes(folder, pids, states)
    for state in states.values():
        problems += _judge_record(backend, state)
    problems += _judge_leases(backend, states)
    for path in backend.store.leftovers():
        problems.append(Problem(Trouble.LEFTOVER, path, f"{path} was left by a command that was killed"))
    return tuple(problems)


def repair(backend: LocalBackend, problem: Problem) -> str:
    """Repair one problem; says what was done. Raises ArealError when it cannot be."""
    if not problem.repairable:
        raise ArealError(f"{problem.subject}: {problem.message}: this needs a person")
    if problem.trouble is Trouble.STRAY_PROCESS:
        return _end_stray(os.path.join(backend.store.root, problem.subject))
    if problem.trouble in (Trouble.ORPHANS, Trouble.DEAD_RECORD):
        swept = backend.stop(problem.subject).swept_pids
        return f"stopped run {problem.subject}, killed {len(swept)} processes"
    if problem.trouble is Trouble.NEVER_STARTED:
        backend.forget(problem.subject)
        return f"forgot run {problem.subject}, of which nothing was started"
    shutil.rmtree(problem.subject, ignore_errors=True)
    return f"removed {problem.subject}"


def _processes_by_folder(root: str) -> dict[str, list[int]]:
    """Processes that were started for a run of this home, by the run's folder."""
    found: dict[str, list[int]] = {}
    for stat in procfs.processes():
        folder = procfs.environment(stat.pid).get(RUN_DIR_VARIABLE, "")
        if os.path.dirname(folder) == root:
            found.setdefault(folder, []).append(stat.pid)
    return found


def _judge_processes(folder: str, pids: list[int], states: dict[str, RunState]) -> list[Problem]:
    uid = os.path.basename(folder)
    named = ", ".join(f"{pid} ({procfs.command_line(pid)[:80]})" for pid in pids)
    state = states.get(uid)
    if state is None:
        return [Problem(Trouble.STRAY_PROCESS, uid, f"run {uid} has no record and lives: {named}", tuple(pids))]
    if state.phase in _LIVING or state.phase is Phase.INTENDED:
        return []
    return [Problem(Trouble.ORPHANS, uid, f"run {uid} is {state.phase} and left processes: {named}", tuple(pids))]


def _judge_record(backend: LocalBackend, state: RunState) -> list[Problem]:
    uid = state.spec.uid
    if state.phase is Phase.DEAD:
        return [Problem(Trouble.DEAD_RECORD, uid, f"run {uid} of {state.spec.owner}: {state.reason}")]
    if state.phase is Phase.INTENDED and not backend.store.is_held(uid):
        return [Problem(Trouble.NEVER_STARTED, uid, f"run {uid} of {state.spec.owner} was planned and not started")]
    if state.phase is Phase.UNKNOWN:
        return [Problem(Trouble.UNREADABLE, uid, f"run {uid}: {state.reason}", repairable=False)]
    return []


def _judge_leases(backend: LocalBackend, states: dict[str, RunState]) -> list[Problem]:
    """A held lease names its run; a run that ended holds none, so somebody else has inherited the descriptor."""
    problems = []
    for name in backend.leases.names():
        holder = backend.leases.holder(name)
        if holder is None or holder.scope != backend.leases.scope or not holder.uid:
            continue
        state = states.get(holder.uid)
        if _is_shared_by_a_living_run(name, holder.owner, states):
            continue  # the file names the first of those who share it, who may have gone since
        if (state is None or state.phase not in _LIVING) and backend.leases.is_held(name):
            pids = tuple(backend.leases.holding_pids(name))
            who = ", ".join(f"{pid} ({procfs.command_line(pid)[:80]})" for pid in pids) or "a process out of sight"
            message = f"{name} is held for run {holder.uid}, which does not live, by {who}"
            problems.append(Problem(Trouble.LEASE_WITHOUT_RUN, name, message, pids, repairable=False))
    return problems


def _is_shared_by_a_living_run(name: str, owner: str, states: dict[str, RunState]) -> bool:
    return any(
        state.phase in _LIVING
        and state.spec.owner == owner
        and name in (port_lease(port) for port in state.spec.shared_ports)
        for state in states.values()
    )


def _end_stray(folder: str) -> str:
    """End a run without a record: its shim gently, so that the component may finish, then the rest."""
    shim = find_shim(folder)
    if shim is not None and request_end(shim):
        ensure_dead(shim, _STRAY_GRACE_S)
    swept = sweep_run(shim, folder)
    return f"ended the processes of {folder}" + (f", killed {len(swept)}" if swept else "")
