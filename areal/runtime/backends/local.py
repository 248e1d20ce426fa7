"""Processes of this machine: each one a shim with its component, known by the folder ``runs/<uid>/``.

``crash`` is called at each point where a caller may die (``areal.state.files.CRASH_POINTS`` names them). After a death
at any of them there is no process without a record, and repeating the call finishes the job.

Most commands only observe: leases, GPUs and what starts and stops processes are imported where they are used.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from areal.errors import Conflict, NotFound
from areal.runtime import procfs
from areal.runtime.backends.base import (
    LOOPBACK,
    MAY_LIVE,
    Capacity,
    Phase,
    Problem,
    ProblemKind,
    RunSpec,
    RunState,
    Stage,
    StopReport,
)
from areal.runtime.identity import Liveness, liveness
from areal.runtime.observation import find_shim, observe_run, repair_run
from areal.runtime.procfs import RUN_DIR_VARIABLE
from areal.runtime.runs import RunStore, check_uid, record_problems, repair_record

if TYPE_CHECKING:
    import subprocess

    from areal.runtime.gpus import GpuListing
    from areal.runtime.leases import Claims, LeaseDir

_STRAY_GRACE_S = 10.0
_ENDING_S = 5.0


def find_problems(store: RunStore, leases: LeaseDir, states: Mapping[str, RunState]) -> tuple[Problem, ...]:
    by_folder: dict[str, list[int]] = {}  # processes that were started for a run of this home
    for stat in procfs.processes():
        folder = procfs.environment(stat.pid).get(RUN_DIR_VARIABLE, "")
        if os.path.dirname(folder) == store.root:
            by_folder.setdefault(folder, []).append(stat.pid)
    problems: list[Problem] = []
    for folder, pids in sorted(by_folder.items()):
        problems += _judge_processes(folder, pids, states)
    named = {pid for problem in problems for pid in problem.pids}  # which hold their leases until they end
    problems += record_problems(
        store, states.values(), lambda state: "" if store.is_held(state.spec.uid) else "was planned and not started"
    )
    problems += [problem for problem in _judge_leases(leases, states) if not named.issuperset(problem.pids or (0,))]
    return tuple(problems)


def _judge_processes(folder: str, pids: list[int], states: Mapping[str, RunState]) -> list[Problem]:
    uid = os.path.basename(folder)
    named = ", ".join(f"{pid} ({procfs.command_line(pid)[:80]})" for pid in pids)
    state = states.get(uid)
    if state is None:
        return [Problem(ProblemKind.STRAY_PROCESS, uid, f"run {uid} has no record and lives: {named}", tuple(pids))]
    if state.phase in MAY_LIVE or state.phase is Phase.INTENDED:
        return []
    return [Problem(ProblemKind.ORPHANS, uid, f"run {uid} is {state.phase} and left processes: {named}", tuple(pids))]


def _judge_leases(leases: LeaseDir, states: Mapping[str, RunState]) -> list[Problem]:
    """Find held leases whose run has ended: another process has inherited the descriptor."""
    problems = []
    for name in leases.names():
        holder = leases.holder(name)
        if holder is None or not leases.is_of_this_home(holder) or not holder.uid:
            continue
        state = states.get(holder.uid)
        if _is_port_shared(name, holder.owner, states):
            continue  # the file names the first of its holders, which may have ended since
        if (state is None or state.phase not in MAY_LIVE) and leases.is_held(name):
            pids = tuple(leases.holding_pids(name))
            who = ", ".join(f"{pid} ({procfs.command_line(pid)[:80]})" for pid in pids) or "a process out of sight"
            message = f"{name} is held for run {holder.uid}, which does not live, by {who}"
            problems.append(Problem(ProblemKind.LEASE_WITHOUT_RUN, name, message, pids, repairable=False))
    return problems


def _is_port_shared(name: str, owner: str, states: Mapping[str, RunState]) -> bool:
    from areal.runtime.leases import port_lease

    return any(
        state.phase in MAY_LIVE
        and state.spec.owner == owner
        and name in (port_lease(port) for port in state.spec.shared_ports)
        for state in states.values()
    )


def end_stray(folder: str) -> str:
    """End a run without a record: first its shim with SIGTERM, so that the component may finish, then the rest."""
    from areal.runtime.lifecycle import ensure_dead, request_end, sweep_run

    shim = find_shim(folder)
    if shim is not None and request_end(shim):
        ensure_dead(shim, _STRAY_GRACE_S)
    swept = sweep_run(shim, folder)
    return f"ended the processes of {folder}" + (f", killed {len(swept)}" if swept else "")


def _list_gpus() -> GpuListing:
    from areal.runtime.gpus import list_gpus

    return list_gpus()


_claiming = threading.Lock()  # two claims that each hold a part would both be refused


class LocalBackend:
    """See ``base.Backend``. One instance may be used from several threads."""

    name = "local"
    host = LOOPBACK

    def __init__(
        self,
        home_root: Path,
        lease_dir: Path | None = None,
        crash: Callable[[str], None] = lambda point: None,
        list_gpus: Callable[[], GpuListing] = _list_gpus,
    ) -> None:
        home = Path(home_root).resolve()  # processes get its path: one spelling
        self.store = RunStore(home / "runs")
        self._lease_dir, self._scope = lease_dir, str(home)
        self._crash = crash
        self._list_gpus = list_gpus
        self._shims: list[subprocess.Popen[bytes]] = []

    @cached_property
    def leases(self) -> LeaseDir:
        from areal.runtime.leases import LeaseDir

        return LeaseDir(self._lease_dir, scope=self._scope)

    @property
    def _claims(self) -> Claims:
        from areal.runtime.leases import Claims

        found: Claims = vars(self).setdefault("_all_claims", Claims(self.leases))  # the same one in every thread
        return found

    def capacity(self) -> Capacity:
        return self._capacity(self._list_gpus())

    def _capacity(self, listing: GpuListing) -> Capacity:
        from areal.runtime import gpus
        from areal.runtime.leases import gpu_lease

        free: list[str] = []
        leased: list[str] = []
        squatters: dict[str, str] = {}
        for gpu in gpus.visible(listing.gpus):
            if self.leases.is_held(gpu_lease(gpu.uuid)):
                leased.append(gpu.uuid)
            elif who := gpus.squatter(gpu):
                squatters[gpu.uuid] = who
            else:
                free.append(gpu.uuid)
        return Capacity(tuple(free), tuple(leased), squatters)

    def require_possible(
        self, scheduler: Mapping[str, object], *, gpus: int, nodes: int, cpus: float = 0, memory_bytes: float = 0
    ) -> None:
        """Do nothing: a plan counts the GPUs of this machine."""

    def claim_ports(self, count: int, *, owner: str, prefer: Sequence[int] = ()) -> tuple[int, ...]:
        return self._claims.choose_ports(count, owner, prefer)

    def claim_gpus(self, count: int, *, owner: str) -> tuple[str, ...]:
        listing = self._list_gpus()
        with _claiming:
            return self._claims.choose_gpus(count, owner, self._capacity(listing).gpus)

    def release_claims(self) -> None:
        self._claims.release()

    def start(self, spec: RunSpec, *, on_pid: Callable[[int], None] = lambda pid: None) -> RunState:
        from areal.runtime.lifecycle import shim_identity

        self._reap()
        env = dict(spec.env)
        if spec.gpus:
            env["CUDA_VISIBLE_DEVICES"] = ",".join(spec.gpus)  # by UUID, never by index
        spec = replace(self.store.with_config(spec), env=env)
        listed = self._list_gpus().gpus if spec.gpus else ()
        baseline = {gpu.uuid: gpu.free_bytes for gpu in listed if gpu.uuid in spec.gpus}
        self._crash("intent-before")
        life = self.store.create(spec, gpu_free_bytes=baseline)
        self._crash("intent-after")
        held = [life]
        try:
            leases = self._claims.take(spec)
            held += [lease.fd for lease in leases]
            self._crash("lease-after")
            self._launch(spec, held, on_pid)
        except BaseException:
            _close_all(held)  # a lease that is still held is held by a shim
            if shim_identity(self.store, spec.uid) is None:  # nothing was started: leave no record of it
                self.store.remove(spec.uid)
            raise
        _close_all(held)
        state = observe_run(self.store, spec.uid)
        if state is None:
            raise Conflict(f"run {spec.uid} was forgotten by another command while it started")
        return state

    def _launch(self, spec: RunSpec, held_fds: Sequence[int], on_pid: Callable[[int], None]) -> None:
        from areal.runtime.lifecycle import fork_shim

        shim = fork_shim(spec.uid, self.store.folder(spec.uid), held_fds, os.environ)
        self._shims.append(shim.process)
        try:
            self._crash("fork-after")
            on_pid(shim.process.pid)
            self._crash("pid-after")
            shim.go()
            self._crash("go-after")
            shim.wait_ack()
            self._crash("ack-after")
        finally:
            shim.close()

    def observe(self, uids: Sequence[str] | None = None) -> dict[str, RunState]:
        self._reap()
        states: dict[str, RunState] = {}
        for uid in self.store.uids() if uids is None else uids:
            state = observe_run(self.store, check_uid(uid))
            if state is not None:
                states[uid] = state
        return states

    def stage(self, uid: str) -> Stage | None:
        return self.store.stage(uid)

    def log_paths(self, uid: str) -> tuple[str, ...]:
        from areal.runtime.causes import run_log_paths

        return run_log_paths(self.store.folder(uid))

    def kick(self, uid: str) -> None:
        from areal.runtime.lifecycle import send, shim_identity

        identity = shim_identity(self.store, uid)
        if identity is None:
            raise NotFound(f"run {uid} has no living process to start again")
        if not send(identity, signal.SIGUSR1):
            raise Conflict(f"run {uid} has ended: it cannot be started again", hint="apply starts a new run")

    def stop(self, uid: str, *, grace_s: float | None = None) -> StopReport:
        from areal.runtime.lifecycle import stop_run

        self._reap()
        report = stop_run(self.store, uid, grace_s, self._crash, self._list_gpus)
        self._reap()
        return report

    def forget(self, uid: str, *, unprovable: bool = False) -> None:
        from areal.runtime.leases import port_lease

        self._crash("forget-before")
        state = observe_run(self.store, check_uid(uid))
        if state is not None:
            self._refuse_living(uid, state, unprovable)
            self.store.remove(uid)
            for port in (*state.spec.ports, *state.spec.shared_ports):
                self.leases.tidy(port_lease(port))
        self._crash("forget-after")

    def _refuse_living(self, uid: str, state: RunState, unprovable: bool) -> None:
        if state.phase is Phase.UNKNOWN and state.shim_pid is not None:
            if unprovable:
                return
            raise Conflict(f"run {uid} may be alive: {state.reason}", hint="stop it where it runs")
        if state.phase is Phase.INTENDED and self.store.is_held(uid):
            raise Conflict(f"run {uid} is being started", hint="stop it first")
        from areal.runtime.lifecycle import shim_identity, wait_dead

        identity = shim_identity(self.store, uid)
        if identity is None:
            return
        if state.phase in (Phase.EXITED, Phase.CRASHLOOP):
            wait_dead(identity, _ENDING_S)  # its record is written just before it leaves
        if liveness(identity) is Liveness.ALIVE:
            raise Conflict(f"run {uid} is alive ({state.phase})", hint="stop it first")

    def inspect(self) -> tuple[Problem, ...]:
        return find_problems(self.store, self.leases, self.observe())

    def repair(self, problem: Problem) -> str:
        if problem.trouble is ProblemKind.STRAY_PROCESS:
            return end_stray(os.path.join(self.store.root, problem.subject))
        if problem.trouble is ProblemKind.DAMAGED_RECORD:
            repair_run(self.store, problem.subject)
            return f"wrote the record of run {problem.subject} again"
        return repair_record(self, problem)

    def _reap(self) -> None:
        """Collect ended shims, which are zombies of this process if it lives long."""
        self._shims = [process for process in self._shims if process.poll() is None]


def _close_all(fds: list[int]) -> None:
    while fds:
        os.close(fds.pop())
