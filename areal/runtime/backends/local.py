"""Processes of this machine: each one a shim with its component, known by the folder ``runs/<uid>/``.

Named points where a caller may die (``crash`` is called at each): intent-before, intent-after, lease-after,
fork-after, pid-after, go-after, ack-after, stop-before, stop-signalled, stop-after, forget-before, forget-after.
After a death at any of them there is no process without a record, and repeating the call finishes the job.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from areal.errors import ArealError, Conflict, NotFound, TimedOut
from areal.runtime import gpus, records
from areal.runtime.backends.base import Capacity, Phase, RunSpec, RunState, StopReport
from areal.runtime.claims import Claims, gpu_lease
from areal.runtime.identity import Liveness, ProcessIdentity, liveness, same_boot, where
from areal.runtime.launch import fork_shim
from areal.runtime.leases import LeaseDir
from areal.runtime.logs import run_log_paths
from areal.runtime.observation import observe_run, read_identity
from areal.runtime.runs import RunStore, Stage, check_uid
from areal.runtime.signals import send, sweep_session, wait_dead

_BETWEEN_GO_AND_ID_S = 20.0
_SWEEP_MARGIN_S = 15.0
_ENDING_S = 5.0
_MEMORY_SHARE = 0.9  # of what was free before the start; drivers keep a little


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
        home = Path(home_root).absolute()
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
        return self._claims.choose(count, owner, prefer)

    def release_ports(self, ports: Iterable[int] | None = None) -> None:
        """Give back claimed ports that were not started (all of them when None)."""
        self._claims.release(ports)

    # -- start

    def start(self, spec: RunSpec, *, on_pid: Callable[[int], None] = lambda pid: None) -> RunState:
        self._reap()
        spec = _complete(spec)
        baseline = self._free_memory(spec.gpus)
        self._crash("intent-before")
        life = self.store.create(spec, gpu_free_bytes=baseline)
        self._crash("intent-after")
        try:
            leases = self._claims.take(spec)
        except ArealError:
            self.store.remove(spec.uid)
            os.close(life)
            raise
        self._crash("lease-after")
        try:
            self._launch(spec, [life, *(lease.fd for lease in leases)], on_pid)
        finally:
            os.close(life)
            for lease in leases:
                lease.close()
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
            shim.abort()

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
        identity = self._identity(uid)
        if identity is None:
            raise NotFound(f"run {uid} has no living process to start again")
        if not send(identity, signal.SIGUSR1):
            raise Conflict(f"run {uid} has ended: it cannot be started again", hint="apply starts a new run")

    def stop(self, uid: str, *, grace_s: float | None = None) -> StopReport:
        self._reap()
        folder = self.store.folder(uid)
        self._crash("stop-before")
        identity = self._identity_once_started(uid)
        if identity is None:
            self._crash("stop-after")
            return StopReport(uid, was_alive=False)
        was_alive = self._end_shim(uid, identity, grace_s)
        swept = sweep_session(identity, folder)
        swept += self._record_end(folder, swept)
        note = self._await_memory(folder)
        self._reap()
        self._crash("stop-after")
        return StopReport(uid, was_alive, tuple(sorted(set(swept))), note)

    def _end_shim(self, uid: str, identity: ProcessIdentity, grace_s: float | None) -> bool:
        """SIGTERM to the shim, which ends the component; SIGKILL when it does not keep the time."""
        if liveness(identity) is Liveness.UNKNOWN and not same_boot(identity):
            raise Conflict(f"run {uid} cannot be stopped from here: it was {where(identity)}")
        folder = self.store.folder(uid)
        if grace_s is None:
            grace_s = self._stop_grace(folder)
        if liveness(identity) is Liveness.ALIVE:
            records.write_json(folder, records.STOP, {"grace_s": grace_s}, durable=False)
        alive = send(identity, signal.SIGTERM)
        self._crash("stop-signalled")
        if alive:
            send(identity, signal.SIGCONT)
            if not wait_dead(identity, grace_s + _SWEEP_MARGIN_S):
                send(identity, signal.SIGKILL)
                wait_dead(identity, _ENDING_S)
        return alive

    def forget(self, uid: str) -> None:
        self._crash("forget-before")
        state = observe_run(self.store, check_uid(uid))
        if state is not None:
            self._refuse_living(uid, state)
            self.store.remove(uid)
        self._crash("forget-after")

    # -- details

    def _refuse_living(self, uid: str, state: RunState) -> None:
        identity = None if state.phase is Phase.UNKNOWN else self._identity(uid)
        if identity and state.phase in (Phase.EXITED, Phase.CRASHLOOP):
            wait_dead(identity, _ENDING_S)  # its record is written just before it leaves
        if (identity and liveness(identity) is not Liveness.DEAD) or self.store.is_held(uid):
            raise Conflict(f"run {uid} is alive ({state.phase})", hint="stop it first")
        if state.phase is Phase.UNKNOWN and state.shim_pid is not None:
            raise Conflict(f"run {uid} may be alive: {state.reason}")

    def _identity(self, uid: str) -> ProcessIdentity | None:
        try:
            return read_identity(self.store.folder(uid))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ArealError(f"the record of run {uid} cannot be read: {error!r}", hint="areal doctor")

    def _identity_once_started(self, uid: str) -> ProcessIdentity | None:
        """None when nothing was started. A shim between its "go" and its record is waited for."""
        deadline = time.monotonic() + _BETWEEN_GO_AND_ID_S
        while True:
            held = self.store.is_held(uid)
            identity = self._identity(uid)
            if identity is not None or not held:
                return identity
            if time.monotonic() > deadline:
                raise TimedOut(f"run {uid} is being started by another command", hint="wait for it, or interrupt it")
            time.sleep(0.01)

    def _stop_grace(self, folder: str) -> float:
        intent = records.read_object(folder, records.INTENT) or {}
        return float(intent.get("stop_grace_s", RunSpec.stop_grace_s))

    def _record_end(self, folder: str, swept: tuple[int, ...]) -> tuple[int, ...]:
        """The pids that the shim itself swept; when it left no exit record, write one in its place."""
        try:
            ended = records.read_object(folder, records.EXIT)
            if ended is not None:
                return tuple(int(pid) for pid in ended["swept"])
            child = records.read_object(folder, records.CHILD) or {}
        except (ValueError, KeyError, TypeError):
            child = {}
        record = {
            "phase": Phase.EXITED,
            "reason": "stopped after its supervisor had died",
            "restarts": child.get("restarts", 0),
            "last_exit": child.get("last_exit"),
            "swept": list(swept),
        }
        records.write_json(folder, records.EXIT, record)
        return ()

    def _await_memory(self, folder: str) -> str:
        intent = records.read_object(folder, records.INTENT) or {}
        baseline: Mapping[str, int] = intent.get("gpu_free_bytes") or {}
        if not baseline:
            return ""
        wanted = {uuid: int(free * _MEMORY_SHARE) for uuid, free in baseline.items()}
        missing = gpus.wait_for_memory(wanted, self._list_gpus)
        return "; ".join(f"{uuid} has not got {size / 2**30:.1f} GiB back" for uuid, size in sorted(missing.items()))

    def _reap(self) -> None:
        """Shims that ended are our zombies: a caller that lives long must collect them."""
        self._shims = [process for process in self._shims if process.poll() is None]


def _complete(spec: RunSpec) -> RunSpec:
    """The caller's working folder when none is named; its GPUs by UUID, never by index."""
    env = dict(spec.env)
    if spec.gpus:
        env.setdefault("CUDA_VISIBLE_DEVICES", ",".join(spec.gpus))
    return replace(spec, env=env, cwd=spec.cwd or str(Path.cwd()))
