"""Processes as /proc shows them, and ending every process of a run.

A process is identified by ``(pid, start_ticks)``: field 22 of ``/proc/PID/stat`` is its start in clock ticks since
boot, which neither a renamed process nor a changed clock affects. psutil provides neither that nor the session.

Engines fork workers that survive them and rename themselves. A run's processes are the members of its shim's session,
and those with the run's unique id in their initial environment (they left the session by ``setsid``). Each one is held
by a pidfd, stopped so that it cannot fork, and only then killed.

The shim imports this module: no ``dataclasses`` and no ``typing``, which would double its start-up time.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache

from areal.files import read_bytes

_DEAD_STATES = frozenset("ZXx")


class Stat:
    """The fields of ``/proc/PID/stat`` that identify a process, its place in the tree, and what it uses: ``cpu_ticks``
    in user and kernel mode, ``resident_pages``."""

    __slots__ = ("comm", "cpu_ticks", "pid", "ppid", "resident_pages", "session", "start_ticks", "state", "threads")

    def __init__(
        self,
        pid: int,
        comm: str,
        state: str,
        ppid: int,
        session: int,
        start_ticks: int,
        threads: int = 1,
        cpu_ticks: int = 0,
        resident_pages: int = 0,
    ) -> None:
        self.pid = pid
        self.comm = comm
        self.state = state
        self.ppid = ppid
        self.session = session
        self.start_ticks = start_ticks
        self.threads = threads
        self.cpu_ticks = cpu_ticks
        self.resident_pages = resident_pages

    @property
    def alive(self) -> bool:
        """A zombie holds no memory, no lock and no port: for us it is dead. The first thread of a process is a zombie
        before the others have ended, which the kernel may need a second for if the process has much memory."""
        return self.state not in _DEAD_STATES or self.threads > 1


def read_stat(pid: int) -> Stat | None:
    """Return the process's stat; None without the process. A command name may have spaces and parentheses."""
    try:
        data = read_bytes(f"/proc/{pid}/stat")
    except (FileNotFoundError, ProcessLookupError):
        return None
    head, _, tail = data.rpartition(b")")
    state, *fields = tail.split()
    ppid, session, start_ticks, threads = (int(fields[number]) for number in (0, 2, 18, 16))
    cpu_ticks, resident_pages = int(fields[10]) + int(fields[11]), int(fields[20])
    comm = head.partition(b"(")[2].decode("utf-8", "replace")
    return Stat(pid, comm, state.decode(), ppid, session, start_ticks, threads, cpu_ticks, resident_pages)


def pids() -> list[int]:
    """Return all pids, highest first: those are likely the newest, and the most likely to be gone soon."""
    return sorted((int(name) for name in os.listdir("/proc") if name.isdigit()), reverse=True)


def processes() -> Iterator[Stat]:
    """Yield every visible process that is not a zombie."""
    for pid in pids():
        stat = read_stat(pid)
        if stat is not None and stat.alive:
            yield stat


def environment(pid: int) -> dict[str, str]:
    """Return the initial environment of the process; empty if it may not be read or was overwritten.

    Absence proves nothing (``setproctitle`` wipes it); presence of a run's unique id does.
    """
    try:
        data = read_bytes(f"/proc/{pid}/environ")
    except OSError:
        return {}
    pairs = (entry.partition(b"=") for entry in data.split(b"\0") if b"=" in entry)
    return {os.fsdecode(key): os.fsdecode(value) for key, _, value in pairs}


def command_line(pid: int) -> str:
    """Return the command for display, never for a decision; the short name if the arguments cannot be read."""
    try:
        text = read_bytes(f"/proc/{pid}/cmdline").replace(b"\0", b" ").decode("utf-8", "replace").strip()
    except OSError:
        text = ""
    if text:
        return text
    stat = read_stat(pid)
    return f"[{stat.comm}]" if stat else "[gone]"


def open_files(pid: int) -> Iterator[str]:
    """Yield the targets of the process's descriptors, as far as it may be inspected."""
    with suppress(OSError):
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                yield os.readlink(f"/proc/{pid}/fd/{fd}")


def owner_uid(pid: int) -> int | None:
    try:
        return os.stat(f"/proc/{pid}").st_uid
    except OSError:
        return None


def autogroup(pid: int) -> str:
    """Return the kernel's scheduling group: a number given once to each session and never again until reboot.

    Empty if the kernel has no autogroups. Two sessions with the same recycled number have different groups.
    """
    try:
        return read_bytes(f"/proc/{pid}/autogroup").split(b" ")[0].decode()
    except OSError:
        return ""


@cache  # constant for the life of the process
def boot_id() -> str:
    return read_bytes("/proc/sys/kernel/random/boot_id").decode().strip()


@cache
def machine_id() -> str:
    """Return ``/etc/machine-id``, or the host name in images without one, which is at least local."""
    for path in ("/etc/machine-id", "/var/lib/dbus/machine-id"):
        try:
            text = read_bytes(path).decode("ascii", "replace").strip()
        except OSError:
            continue
        if text and text != "uninitialized":
            return text
    return f"host:{os.uname().nodename}"


@cache
def pid_namespace() -> str:
    return os.readlink("/proc/self/ns/pid")


def identity_fields(pid: int) -> dict[str, str | int]:
    """Return the identity of a live process as it is stored. Raises ProcessLookupError if there is none."""
    stat = read_stat(pid)
    if stat is None:
        raise ProcessLookupError(pid)
    return {
        "machine_id": machine_id(),
        "boot_id": boot_id(),
        "pid_namespace": pid_namespace(),
        "pid": pid,
        "start_ticks": stat.start_ticks,
        "session_id": stat.session,
        "autogroup": autogroup(pid),
    }


RUN_DIR_VARIABLE = "AREAL_RUN_DIR"
RUN_UID_VARIABLE = "AREAL_RUN_UID"
NO_SESSION = -1
_UNSTEADY_SCANS = 16  # a busy machine may never be steady: this many scans must then suffice


def open_verified(pid: int, start_ticks: int) -> int | None:
    """Return a pidfd of exactly that process, or None if it is gone or another process has its number.

    The ticks are read again after opening the descriptor, which from then on can refer to no other process.
    """
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return None
    stat = read_stat(pid)
    if stat is None or not stat.alive or stat.start_ticks != start_ticks:
        os.close(fd)
        return None
    return fd


def wait_gone(fds: list[int], timeout_s: float) -> bool:
    """Wait until every process behind these pidfds is dead."""
    deadline = time.monotonic() + timeout_s
    poller = select.poll()
    for fd in fds:
        poller.register(fd, select.POLLIN)
    waiting = set(fds)
    while waiting:
        remaining = deadline - time.monotonic()
        ready = poller.poll(max(0.0, remaining) * 1000)
        for fd, _ in ready:
            poller.unregister(fd)
            waiting.discard(fd)
        if not ready and remaining <= 0:
            return False
    return True


def run_members(sid: int, run_dir: str, exclude: frozenset[int]) -> Callable[[Stat], bool]:
    """Return a predicate for the processes of a run: by session, or by the run's folder in the initial environment."""

    def belongs(stat: Stat) -> bool:
        if stat.pid in exclude or stat.pid == 1:
            return False
        if stat.session == sid:
            return True
        return stat.session != 0 and environment(stat.pid).get(RUN_DIR_VARIABLE) == run_dir

    return belongs


def sweep(belongs: Callable[[Stat], bool], timeout_s: float = 10.0) -> tuple[list[int], list[int]]:
    """Kill every process that ``belongs``. Return the killed pids, and those still there at the deadline."""
    deadline = time.monotonic() + timeout_s
    killed: list[int] = []
    while True:
        held, refused = _freeze(belongs)
        if not held:
            return killed, refused
        try:
            for fd in held.values():
                _send(fd, signal.SIGKILL)
            wait_gone(list(held.values()), max(0.0, deadline - time.monotonic()))
            killed += [pid for pid in held if pid not in killed]
        finally:
            for fd in held.values():
                os.close(fd)
        if time.monotonic() >= deadline:
            return killed, sorted({*refused, *(stat.pid for stat in processes() if belongs(stat))})


def _freeze(belongs: Callable[[Stat], bool]) -> tuple[dict[int, int], list[int]]:
    """Stop members until a scan finds no new one. Return pidfds by pid, and the pids that may not be signalled.

    A process that forks and leaves during a scan may be missed in both its old and its new place. The session is proved
    empty only by a scan during which no process vanished and no member became a zombie. Scans skip strangers that two
    earlier scans have seen, since strangers do not create members (one scan is not enough: during exec, a member
    briefly has no environment). This makes scans short, so that few processes vanish during one.
    """
    held: dict[int, int] = {}
    refused: list[int] = []
    unsteady_scans = 0
    zombies: set[int] = set()
    once: set[int] = set()
    strangers: set[int] = set()
    while True:
        found = vanished = 0
        listed = pids()
        once.intersection_update(listed)  # a number that was free may be a member's next
        strangers.intersection_update(listed)
        for pid in listed:
            if pid in held or pid in refused or pid in strangers:
                continue
            stat = read_stat(pid)
            vanished += stat is None
            if stat is None:
                continue
            if not belongs(stat):
                (strangers if pid in once else once).add(pid)
                continue
            if not stat.alive:
                vanished += pid not in zombies
                zombies.add(pid)
                continue
            found += 1
            fd = _hold(stat, refused)
            if fd is not None:
                held[pid] = fd
        unsteady_scans += vanished > 0
        if not found and (not vanished or unsteady_scans > _UNSTEADY_SCANS):
            return held, refused


def _hold(stat: Stat, refused: list[int]) -> int | None:
    """Return a pidfd of the process, which is now stopped; None if it is gone or may not be signalled."""
    fd = open_verified(stat.pid, stat.start_ticks)
    if fd is None:
        return None
    try:
        _send(fd, signal.SIGSTOP)
    except PermissionError:
        os.close(fd)
        refused.append(stat.pid)
        return None
    return fd


def _send(fd: int, number: int) -> None:
    with suppress(ProcessLookupError):  # it died first
        signal.pidfd_send_signal(fd, number)
