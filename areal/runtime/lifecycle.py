"""Start a run and stop it: a shim waits at a gate, signals go only to a verified process, and none is left behind.

    caller                                     shim
    fork, exec with a gate and an ack pipe --> imports, then blocks on the gate
    on_pid (the caller journals the pid)
    write "G"                              --> id.json, component, child.json
    read the ack                           <-- "A"

If the caller dies before the "G", the shim exits with status 70, and nothing was started; later, all is recorded.

To stop a run, the shim is asked to end its component within the grace period. A shim that takes longer is killed, and
the kernel kills the component with it. In either case the session is swept afterwards, since engines leave workers
behind. Every step may be repeated: the next stop finishes one that was killed half-way.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from areal.dataclasses import asdict, replace
from areal.errors import ArealError, Conflict, TimedOut
from areal.runtime import gpus, procfs, records
from areal.runtime.backends.base import STOPPED_DEAD, Phase, RunSpec, StopReport
from areal.runtime.environment import inherited
from areal.runtime.identity import Liveness, ProcessIdentity, liveness, same_boot, where
from areal.runtime.observation import supervisor_of
from areal.runtime.runs import DAMAGED, EndRecord, Intent, RunStore, copy_reason, read_child, read_end, read_intent
from areal.runtime.shim import ACK, GO

if TYPE_CHECKING:
    import subprocess

SHIM_PATH = str(Path(__file__).with_name("shim") / "__main__.py")
_ACK_TIMEOUT_S = 60.0
_KILL_S = 5.0
_BETWEEN_GO_AND_ID_S = 20.0
_SWEEP_MARGIN_S = 15.0
MEMORY_TIMEOUT_S = 10.0  # for a driver to give a dead process's memory back
_MEMORY_SHARE = 0.9  # of the memory free before the start; drivers keep a little


class Shim:
    """A shim between fork and ack. ``process`` is kept so that a long-lived caller can reap it."""

    def __init__(self, uid: str, run_dir: str, process: subprocess.Popen[bytes], gate: int, ack: int) -> None:
        self.uid = uid
        self.run_dir = run_dir
        self.process = process
        self._gate = os.fdopen(gate, "wb", buffering=0)
        self._ack = os.fdopen(ack, "rb", buffering=0)

    def go(self) -> None:
        with suppress(BrokenPipeError), self._gate:  # if the shim is already dead, reading the ack will show it
            self._gate.write(GO)

    def close(self) -> None:
        """Close the pipes, at any time. A shim that has not received the "G" exits."""
        self._gate.close()
        self._ack.close()

    def wait_ack(self) -> None:
        """Wait until the shim has recorded itself and started the component."""
        deadline = time.monotonic() + _ACK_TIMEOUT_S
        poller = select.poll()
        poller.register(self._ack, select.POLLIN)
        with self._ack:
            while not poller.poll(max(0.0, deadline - time.monotonic()) * 1000):
                if time.monotonic() >= deadline:
                    raise TimedOut(f"the supervisor of run {self.uid} did not start within {_ACK_TIMEOUT_S:g} s")
            if self._ack.read(1) == ACK:
                return
        code = self.process.wait(10)
        try:
            log = Path(self.run_dir, records.LOG_FOLDER, records.SHIM_LOG).read_text("utf-8", "replace")
        except OSError:
            log = ""
        raise ArealError(
            f"the supervisor of run {self.uid} failed to start (exit {code})",
            detail=log.strip()[-4000:],
            hint="free space, or check the file modes of the home folder",
        )


def fork_shim(uid: str, run_dir: str, held_fds: Sequence[int], environment: Mapping[str, str]) -> Shim:
    """Start a shim that waits at its gate. It takes over ``held_fds`` (the life lock first)."""
    import subprocess

    gate_read, gate_write = os.pipe()
    ack_read, ack_write = os.pipe()
    log = os.open(f"{run_dir}/{records.LOG_FOLDER}/{records.SHIM_LOG}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    passed = (gate_read, ack_write, *held_fds)
    try:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", SHIM_PATH, run_dir, *map(str, passed)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=passed,
            start_new_session=True,
            env={**inherited(environment), procfs.RUN_UID_VARIABLE: uid, procfs.RUN_DIR_VARIABLE: run_dir},
        )
    except OSError as error:
        os.close(gate_write)
        os.close(ack_read)
        raise ArealError(f"cannot start a supervisor for run {uid}: {error.strerror}")
    finally:
        for fd in (gate_read, ack_write, log):
            os.close(fd)
    return Shim(uid, run_dir, process, gate_write, ack_read)


def _open(identity: ProcessIdentity) -> int | None:
    """Return a pidfd, or None if the process is dead. Raises ArealError if its state cannot be determined from here."""
    state = liveness(identity)
    if state is Liveness.UNKNOWN:
        raise ArealError(
            f"process {identity.pid} cannot be signalled from here: it was {where(identity)}",
            hint="run the command on the machine (or in the container) that started it",
        )
    if state is Liveness.DEAD:
        return None
    return procfs.open_verified(identity.pid, identity.start_ticks)


def send(identity: ProcessIdentity, number: int) -> bool:
    """Send a signal. Return False if the process is already gone (nothing was signalled)."""
    fd = _open(identity)
    if fd is None:
        return False
    try:
        signal.pidfd_send_signal(fd, number)
    except ProcessLookupError:
        return False
    except PermissionError:
        uid = procfs.owner_uid(identity.pid)
        raise ArealError(f"process {identity.pid} belongs to user id {uid}: not allowed to signal it")
    finally:
        os.close(fd)
    return True


def wait_dead(identity: ProcessIdentity, timeout_s: float) -> bool:
    """Wait for the process to end. Return True if it is dead, which a zombie is."""
    fd = _open(identity)
    if fd is None:
        return True
    try:
        return procfs.wait_gone([fd], timeout_s)
    finally:
        os.close(fd)


def request_end(identity: ProcessIdentity) -> bool:
    """Send SIGTERM, and SIGCONT, since a stopped process cannot act on SIGTERM. Return False if it is gone."""
    return send(identity, signal.SIGTERM) and (send(identity, signal.SIGCONT) or True)


def ensure_dead(identity: ProcessIdentity, patience_s: float) -> None:
    """Wait for the process to end, and kill it if that takes longer than ``patience_s``."""
    if not wait_dead(identity, patience_s):
        send(identity, signal.SIGKILL)
        wait_dead(identity, _KILL_S)


def sweep_run(identity: ProcessIdentity | None, run_dir: str) -> tuple[int, ...]:
    """Kill whatever is left of a run: the members of its session, and processes that left the session but have the
    run's folder in their environment. Return the killed pids. Raises TimedOut if some do not die.

    ``identity`` is the shim's, or None if it is unknown (then only the environment identifies processes).
    """
    if identity is not None and not _is_here(identity):
        return ()
    sid = identity.session_id if identity is not None and session_is_ours(identity) else procfs.NO_SESSION
    by_run = procfs.run_members(sid, run_dir, frozenset({os.getpid()}))

    def belongs(stat: procfs.Stat) -> bool:
        return by_run(stat) and (identity is None or not _is_foreign(stat, identity, run_dir))

    killed, left = procfs.sweep(belongs)
    if left:
        pids = ", ".join(f"{pid} ({procfs.command_line(pid)})" for pid in left)
        raise TimedOut(
            f"processes of run {Path(run_dir).name} would not die: {pids}",
            hint="a process in uninterruptible sleep (state D in ps) waits for a device or a network file system",
        )
    return tuple(killed)


def session_is_ours(identity: ProcessIdentity) -> bool:
    """Return whether the session with the shim's number can still be the shim's own.

    A number in use as a session id is not given to a new process: while any member lives, the process with that number
    is the old leader (perhaps a zombie) or there is none. If another process has it, our session is empty.
    """
    if not _is_here(identity):
        return False
    leader = procfs.read_stat(identity.session_id)
    return leader is None or leader.start_ticks == identity.start_ticks


def _is_here(identity: ProcessIdentity) -> bool:
    return same_boot(identity) and identity.pid_namespace == procfs.pid_namespace()


def _is_foreign(stat: procfs.Stat, identity: ProcessIdentity, run_dir: str) -> bool:
    """Return whether a member of a session with our number is provably not ours: it reused the number."""
    if stat.session != identity.session_id:
        return False
    if stat.start_ticks < identity.start_ticks:
        return True
    group = procfs.autogroup(stat.pid)
    if identity.autogroup and group and group != identity.autogroup:
        return True
    return procfs.environment(stat.pid).get(procfs.RUN_DIR_VARIABLE, run_dir) != run_dir


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
    started_in, is_copy = store.started_in(uid)
    swept = () if is_copy else sweep_run(identity, started_in)  # a copied run's processes belong to the original
    if identity is not None:
        swept += _record_end(folder, swept)
    note = _await_memory(folder, list_gpus)
    crash("stop-after")
    return StopReport(uid, alive, tuple(sorted(set(swept))), note)


def shim_identity(store: RunStore, uid: str) -> ProcessIdentity | None:
    """Return the supervisor of the run, living or dead; None if nothing was started.

    Between the "go" and its record, a shim holds the life lock and has no identity yet; this waits for the record. A
    damaged record is replaced by what /proc says about the process that supervises this very folder. Raises Conflict if
    the living supervisor belongs to another home of which this one is a copy.
    """
    deadline = time.monotonic() + _BETWEEN_GO_AND_ID_S
    while True:
        held = store.is_held(uid)
        identity, lost = supervisor_of(store, uid)
        if identity is None and lost and held:
            raise Conflict(f"run {uid} cannot be stopped from here: its record is lost, and it does not run here")
        if (
            identity is not None
            and liveness(identity) is Liveness.ALIVE
            and (other := store.original_of(uid, identity))
        ):
            why = copy_reason(store.folder(uid), other)
            raise Conflict(f"run {uid} cannot be signalled from here: {why}")
        if identity is not None or not held:
            return identity
        if time.monotonic() > deadline:
            raise TimedOut(f"run {uid} is being started by another command", hint="wait for it, or interrupt it")
        time.sleep(0.01)


def _end_shim(
    store: RunStore, uid: str, identity: ProcessIdentity, grace_s: float | None, crash: Callable[[str], None]
) -> bool:
    """End the shim. Return True if it was alive."""
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
            intent = _intent(folder)
            grace_s = float(intent.spec.stop_grace_s if intent is not None else RunSpec.stop_grace_s)
        with suppress(OSError):  # a full disk must not keep a process alive: the shim then uses its own grace period
            records.write_json(folder, records.STOP, {"grace_s": grace_s}, durable=False)
        alive = request_end(identity)
    crash("stop-signalled")
    if alive:
        ensure_dead(identity, (grace_s or 0.0) + _SWEEP_MARGIN_S)
    return alive


def _record_end(folder: str, swept: tuple[int, ...]) -> tuple[int, ...]:
    """Return the pids that the shim itself swept. If it left no exit record, write one in its place."""
    end = EndRecord(Phase.EXITED, STOPPED_DEAD, logged_at=records.logged_at(folder), swept=swept)
    try:
        ended = read_end(folder)
        if ended is not None:
            return ended.swept
        child = read_child(folder)
        if child is not None:
            end = replace(end, restarts=child.restarts, last_exit=child.last_exit)
    except DAMAGED:
        pass  # replaced below
    with suppress(OSError):  # without the record it is reported as dead, which it is
        records.write_json(folder, records.EXIT, asdict(end))
    return ()


def _await_memory(folder: str, list_gpus: Callable[[], gpus.GpuListing]) -> str:
    """Wait until the run's GPUs have their memory back. Return a sentence about missing memory, or ""."""
    intent = _intent(folder)
    if intent is None or not intent.gpu_free_bytes:
        return ""
    wanted = {uuid: int(free * _MEMORY_SHARE) for uuid, free in intent.gpu_free_bytes.items()}
    missing = gpus.wait_for_memory(wanted, list_gpus, MEMORY_TIMEOUT_S)
    return "; ".join(f"{uuid} has not got {size / 2**30:.1f} GiB back" for uuid, size in sorted(missing.items()))


def _intent(folder: str) -> Intent | None:
    try:
        return read_intent(folder)
    except DAMAGED:
        return None
