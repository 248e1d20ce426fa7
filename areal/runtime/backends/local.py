"""Processes of this machine: each one a shim with its component, known by the folder ``runs/<uid>/``.

Named points where a caller may die (``crash`` is called at each): intent-before, intent-after, lease-after,
fork-after, pid-after, go-after, ack-after, stop-before, stop-signalled, stop-after, forget-before, forget-after.
After a death at any of them there is no process without a record, and repeating the call finishes the job.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from areal.errors import Conflict, NotFound
from areal.runtime import gpus
from areal.runtime.backends.base import Capacity, Phase, RunSpec, RunState, StopReport
from areal.runtime.claims import Claims, gpu_lease, port_lease
from areal.runtime.identity import Liveness, liveness
from areal.runtime.launch import fork_shim
from areal.runtime.leases import LeaseDir
from areal.runtime.logs import run_log_paths
from areal.runtime.observation import observe_run
from areal.runtime.runs import RunStore, Stage, check_uid
from areal.runtime.signals import send, wait_dead
from areal.runtime.stopping import shim_identity, stop_run

CRASH_POINTS = (
    "intent-before",
    "intent-after",
    "lease-after",
    "fork-after",
    "pid-after",
    "go-after",
    "ack-after",
    "stop-before",
    "stop-signalled",
    "stop-after",
    "forget-before",
    "forget-after",
)
_ENDING_S = 5.0


def _no_crash(name: str) -> None:
    """Nobody injects faults."""


class LocalBackend:
    """See ``base.Backend``. One instance may be used from several threads."""

    name = "local"

    def __init__(
        self,
        home_root: Path,
        lease_dir: Path | None = None,
        crash: Callable[[str], None] = _no_crash,
        list_gpus: Callable[[], gpus.GpuListing] = gpus.list_gpus,
    ) -> None:
        home = Path(home_root).resolve()  # processes are told its path: one spelling
        self.store = RunStore(home / "runs")
        self.leases = LeaseDir(lease_dir, scope=str(home))
        self._claims = Claims(self.leases)
        self._crash = crash
        self._list_gpus = list_gpus
        self._shims: list[subprocess.Popen[bytes]] = []

    # -- capacity

    def capacity(self) -> Capacity:
        free: list[str] = []
        squatters: dict[str, str] = {}
        for gpu in gpus.visible(self._list_gpus().gpus):
            if self.leases.is_held(gpu_lease(gpu.uuid)):
                continue
            who = gpus.squatter(gpu)
            if who is None:
                free.append(gpu.uuid)
            else:
                squatters[gpu.uuid] = who
        return Capacity(tuple(free), squatters)

    def claim_ports(self, count: int, *, owner: str, prefer: Sequence[int] = ()) -> tuple[int, ...]:
        return self._claims.choose_ports(count, owner, prefer)

    def claim_gpus(self, count: int, *, owner: str, prefer: Sequence[str] = ()) -> tuple[str, ...]:
        free = self.capacity().gpus
        preferred = [uuid for uuid in prefer if uuid in free]
        return self._claims.choose_gpus(count, owner, [*preferred, *(uuid for uuid in free if uuid not in preferred)])

    def release_claims(self, ports: Iterable[int] | None = None) -> None:
        """Give back claimed ports that were not started; all claimed ports and GPUs when None."""
        self._claims.release(None if ports is None else [port_lease(port) for port in ports])

    # -- start

    def start(self, spec: RunSpec, *, on_pid: Callable[[int], None] = lambda pid: None) -> RunState:
        self._reap()
        spec = _complete(spec)
        baseline = self._free_memory(spec.gpus)
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
            _close_all(held)  # what is still held afterwards is held by a shim
            if shim_identity(self.store, spec.uid) is None:  # nothing was started: leave no record of it
                self.store.remove(spec.uid)
            raise
        _close_all(held)
        state = observe_run(self.store, spec.uid)
        if state is None:
            raise Conflict(f"run {spec.uid} was forgotten by another command while it started")
        return state

    def _launch(self, spec: RunSpec, held_fds: Sequence[int], on_pid: Callable[[int], None]) -> None:
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

    def _free_memory(self, uuids: Sequence[str]) -> dict[str, int]:
        if not uuids:
            return {}
        return {gpu.uuid: gpu.free_bytes for gpu in self._list_gpus().gpus if gpu.uuid in uuids}

    # -- observe

    def observe(self, uids: Sequence[str] | None = None) -> dict[str, RunState]:
        self._reap()
        states: dict[str, RunState] = {}
        for uid in self.store.uids() if uids is None else uids:
            state = observe_run(self.store, check_uid(uid))
            if state is not None:
                states[uid] = state
        return states

    def stage(self, uid: str) -> Stage | None:
        """What the component says it is doing while it starts."""
        return self.store.stage(uid)

    def log_paths(self, uid: str) -> tuple[str, ...]:
        return run_log_paths(self.store.folder(uid))

    # -- act

    def kick(self, uid: str) -> None:
        identity = shim_identity(self.store, uid)
        if identity is None:
            raise NotFound(f"run {uid} has no living process to start again")
        if not send(identity, signal.SIGUSR1):
            raise Conflict(f"run {uid} has ended: it cannot be started again", hint="apply starts a new run")

    def stop(self, uid: str, *, grace_s: float | None = None) -> StopReport:
        self._reap()
        report = stop_run(self.store, uid, grace_s, self._crash, self._list_gpus)
        self._reap()
        return report

    def forget(self, uid: str, *, unprovable: bool = False) -> None:
        """``unprovable`` also forgets a run of a machine or container that nothing can be learnt about: it is for
        a person who knows that the place is gone."""
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
        identity = shim_identity(self.store, uid)
        if identity is None:
            return
        if state.phase in (Phase.EXITED, Phase.CRASHLOOP):
            wait_dead(identity, _ENDING_S)  # its record is written just before it leaves
        if liveness(identity) is Liveness.ALIVE:
            raise Conflict(f"run {uid} is alive ({state.phase})", hint="stop it first")

    def _reap(self) -> None:
        """Shims that ended are our zombies: a caller that lives long must collect them."""
        self._shims = [process for process in self._shims if process.poll() is None]


def _close_all(fds: list[int]) -> None:
    while fds:
        os.close(fds.pop())


def _complete(spec: RunSpec) -> RunSpec:
    """The caller's working folder when none is named; its GPUs by UUID, never by index."""
    env = dict(spec.env)
    if spec.gpus:
        env.setdefault("CUDA_VISIBLE_DEVICES", ",".join(spec.gpus))
    return replace(spec, env=env, cwd=spec.cwd or os.getcwd())
