"""Signals that reach exactly the process that was recorded, or none.

A pid alone is never signalled: between the look and the signal it may have been given to another process. The
pidfd is opened first and the start ticks are read again after it.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from areal.errors import ArealError, TimedOut
from areal.runtime import procfs
from areal.runtime.identity import Liveness, ProcessIdentity, liveness, same_boot, this_host, where
from areal.runtime.sweep import RUN_DIR_VARIABLE, open_verified, run_members, sweep, wait_gone


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


def session_is_ours(identity: ProcessIdentity) -> bool:
    """Whether members of ``identity.session_id`` can only be this run's.

    A number in use as a session id is not given to a new process, so: while any member lives, the pid ``session_id``
    is the old leader (dead or alive) or nobody. Somebody else under that number means our session is empty.
    """
    if not same_boot(identity) or identity.pid_namespace != this_host().pid_namespace:
        return False
    leader = procfs.read_stat(identity.session_id)
    return leader is None or identity.session_id != identity.pid or leader.start_ticks == identity.start_ticks


def sweep_session(identity: ProcessIdentity, run_dir: str, timeout_s: float = 10.0) -> tuple[int, ...]:
    """Kill whatever is left of a run: its session, and processes that left the session with the run's folder
    in their environment. Returns the pids killed; raises TimedOut when some would not die."""
    if not same_boot(identity) or identity.pid_namespace != this_host().pid_namespace:
        return ()
    me = frozenset({os.getpid()})
    ours = session_is_ours(identity)
    by_run = run_members(identity.session_id if ours else -1, run_dir, me)

    def belongs(stat: procfs.Stat) -> bool:
        return by_run(stat) and not _is_foreign(stat, identity, run_dir)

    killed, left = sweep(belongs, timeout_s)
    if left:
        pids = ", ".join(f"{pid} ({procfs.command_line(pid)})" for pid in left)
        raise TimedOut(
            f"processes of run {Path(run_dir).name} would not die: {pids}",
            hint="a process in uninterruptible sleep (state D in ps) waits for a device or a network file system",
        )
    return tuple(killed)


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


def terminate(identity: ProcessIdentity, grace_s: float) -> bool:
    """SIGTERM, up to ``grace_s`` to end, then SIGKILL. True when it had been alive."""
    if not send(identity, signal.SIGTERM):
        return False
    send(identity, signal.SIGCONT)  # a stopped process cannot act on SIGTERM
    started = time.monotonic()
    if not wait_dead(identity, grace_s):
        send(identity, signal.SIGKILL)
        wait_dead(identity, max(5.0, grace_s - (time.monotonic() - started)))
    return True
