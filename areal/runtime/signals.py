"""Signals that reach exactly the process that was recorded, or none.

A pid alone is never signalled: between the look and the signal it may have been given to another process. The
pidfd is opened first and the start ticks are read again after it.
"""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

from areal.errors import ArealError, TimedOut
from areal.runtime import procfs
from areal.runtime.identity import Liveness, ProcessIdentity, identify, liveness, same_boot, this_host, where
from areal.runtime.sweep import NO_SESSION, RUN_DIR_VARIABLE, open_verified, run_members, sweep, wait_gone

_KILL_S = 5.0


def _open(identity: ProcessIdentity) -> int | None:
    """A pidfd, or None when the process is dead; refuses what cannot be judged from here."""
    state = liveness(identity)
    if state is Liveness.UNKNOWN:
        raise ArealError(
            f"process {identity.pid} cannot be signalled from here: it was {where(identity)}",
            hint="run the command on the machine (or in the container) that started it",
        )
    if state is Liveness.DEAD:
        return None
    return open_verified(identity.pid, identity.start_ticks)


def send(identity: ProcessIdentity, number: int) -> bool:
    """Send a signal; False when the process is already gone (nothing was signalled)."""
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
    """Wait for the process to end; True when it is dead (a zombie is)."""
    fd = _open(identity)
    if fd is None:
        return True
    try:
        return wait_gone([fd], timeout_s)
    finally:
        os.close(fd)


def request_end(identity: ProcessIdentity) -> bool:
    """SIGTERM, and SIGCONT since one that was stopped cannot act on it; False when it is already gone."""
    return send(identity, signal.SIGTERM) and (send(identity, signal.SIGCONT) or True)


def ensure_dead(identity: ProcessIdentity, patience_s: float) -> None:
    """Wait for the process to end, and kill it when it takes longer."""
    if not wait_dead(identity, patience_s):
        send(identity, signal.SIGKILL)
        wait_dead(identity, _KILL_S)


def find_shim(run_dir: str) -> ProcessIdentity | None:
    """The living supervisor of a run folder, found without its record: the session leader that was told the folder.

    Shims never rename themselves, and only a shim leads a session with that folder in its first environment.
    """
    for stat in procfs.processes():
        if stat.session == stat.pid and procfs.environment(stat.pid).get(RUN_DIR_VARIABLE) == run_dir:
            with suppress(ProcessLookupError):
                return identify(stat.pid)
    return None


def sweep_run(identity: ProcessIdentity | None, run_dir: str, timeout_s: float = 10.0) -> tuple[int, ...]:
    """Kill whatever is left of a run: the members of its session, and processes that left the session with the
    run's folder in their environment. Returns the pids killed; raises TimedOut when some would not die.

    ``identity`` is the shim's, or None when it is not known (then only the environment tells).
    """
    if identity is not None and not _is_here(identity):
        return ()
    sid = identity.session_id if identity is not None and session_is_ours(identity) else NO_SESSION
    by_run = run_members(sid, run_dir, frozenset({os.getpid()}))

    def belongs(stat: procfs.Stat) -> bool:
        return by_run(stat) and (identity is None or not _is_foreign(stat, identity, run_dir))

    killed, left = sweep(belongs, timeout_s)
    if left:
        pids = ", ".join(f"{pid} ({procfs.command_line(pid)})" for pid in left)
        raise TimedOut(
            f"processes of run {Path(run_dir).name} would not die: {pids}",
            hint="a process in uninterruptible sleep (state D in ps) waits for a device or a network file system",
        )
    return tuple(killed)


def session_is_ours(identity: ProcessIdentity) -> bool:
    """Whether the session with the shim's number can be its own still.

    A number in use as a session id is not given to a new process: while any member lives, the process of that
    number is the old leader (perhaps a zombie) or nobody. Somebody else under it means our session is empty.
    """
    if not _is_here(identity):
        return False
    leader = procfs.read_stat(identity.session_id)
    return leader is None or leader.start_ticks == identity.start_ticks


def _is_here(identity: ProcessIdentity) -> bool:
    return same_boot(identity) and identity.pid_namespace == this_host().pid_namespace


def _is_foreign(stat: procfs.Stat, identity: ProcessIdentity, run_dir: str) -> bool:
    """Proof that a member of a session with our number is not ours: a leaderless session that reused the number."""
    if stat.session != identity.session_id:
        return False
    if stat.start_ticks < identity.start_ticks:
        return True
    group = procfs.autogroup(stat.pid)
    if identity.autogroup and group and group != identity.autogroup:
        return True
    return procfs.environment(stat.pid).get(RUN_DIR_VARIABLE, run_dir) != run_dir
