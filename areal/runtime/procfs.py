"""What /proc says about processes, read without psutil and without guessing.

A process is known by ``(pid, start_ticks)``: field 22 of ``/proc/PID/stat`` is its start in clock ticks since
boot, which neither a renamed process nor a stepped clock can change. The shim imports this module, so it stays
free of ``dataclasses`` and ``typing``: they would double its start-up time.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

_DEAD_STATES = frozenset("ZXx")


class Stat:
    """The fields of ``/proc/PID/stat`` that identify a process and its place in the tree."""

    __slots__ = ("comm", "pid", "ppid", "session", "start_ticks", "state")

    def __init__(self, pid: int, comm: str, state: str, ppid: int, session: int, start_ticks: int) -> None:
        self.pid = pid
        self.comm = comm
        self.state = state
        self.ppid = ppid
        self.session = session
        self.start_ticks = start_ticks

    @property
    def alive(self) -> bool:
        """A zombie holds no memory, no lock and no port: for us it is dead."""
        return self.state not in _DEAD_STATES


def read_bytes(path: str) -> bytes:
    """The whole of a small file, with three system calls: an observation reads thousands of them."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        data = os.read(fd, 65536)
        if len(data) < 65536:
            return data
        parts = [data]
        while part := os.read(fd, 1 << 20):
            parts.append(part)
        return b"".join(parts)
    finally:
        os.close(fd)


def read_table(path: str) -> bytes:
    """The whole of a file that the kernel gives out in pieces: a short read of a table is not its end."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        parts = []
        while part := os.read(fd, 1 << 20):
            parts.append(part)
        return b"".join(parts)
    finally:
        os.close(fd)


def read_stat(pid: int) -> Stat | None:
    """None when no such process exists. The command name may hold spaces and brackets: split after the last one."""
    try:
        data = read_bytes(f"/proc/{pid}/stat")
    except (FileNotFoundError, ProcessLookupError):
        return None
    head, _, tail = data.rpartition(b")")
    fields = tail.split()
    comm = head.partition(b"(")[2].decode("utf-8", "replace")
    return Stat(pid, comm, fields[0].decode(), int(fields[1]), int(fields[3]), int(fields[19]))


def pids() -> list[int]:
    """Newest first, as far as numbers tell: they are the likeliest to be gone before they are looked at."""
    return sorted((int(name) for name in os.listdir("/proc") if name.isdigit()), reverse=True)


def processes() -> Iterator[Stat]:
    """Every process that can be seen and is not a zombie."""
    for pid in pids():
        stat = read_stat(pid)
        if stat is not None and stat.alive:
            yield stat


def session_members(sid: int) -> list[Stat]:
    return [stat for stat in processes() if stat.session == sid]


def environment(pid: int) -> dict[str, str]:
    """The environment the process was started with; empty when it may not be read or was overwritten.

    Absence proves nothing (``setproctitle`` wipes it); presence of a run's unique id does.
    """
    try:
        data = read_bytes(f"/proc/{pid}/environ")
    except OSError:
        return {}
    pairs = (entry.partition(b"=") for entry in data.split(b"\0") if b"=" in entry)
    return {os.fsdecode(key): os.fsdecode(value) for key, _, value in pairs}


def command_line(pid: int) -> str:
    """The command for a human, never for a decision; the short name when the arguments cannot be read."""
    try:
        text = read_bytes(f"/proc/{pid}/cmdline").replace(b"\0", b" ").decode("utf-8", "replace").strip()
    except OSError:
        text = ""
    if text:
        return text
    stat = read_stat(pid)
    return f"[{stat.comm}]" if stat else "[gone]"


def owner_uid(pid: int) -> int | None:
    try:
        return os.stat(f"/proc/{pid}").st_uid
    except OSError:
        return None


def autogroup(pid: int) -> str:
    """The kernel's scheduling group: a number given once to each session and never again until reboot.

    Empty where the kernel has no autogroups. Two sessions that carried the same recycled number differ in it.
    """
    try:
        return read_bytes(f"/proc/{pid}/autogroup").split(b" ")[0].decode()
    except OSError:
        return ""


def boot_id() -> str:
    return read_bytes("/proc/sys/kernel/random/boot_id").decode().strip()


def machine_id() -> str:
    """``/etc/machine-id``; images without one fall back to the host name, which is at least local."""
    for path in ("/etc/machine-id", "/var/lib/dbus/machine-id"):
        try:
            text = read_bytes(path).decode("ascii", "replace").strip()
        except OSError:
            continue
        if text and text != "uninitialized":
            return text
    return f"host:{os.uname().nodename}"


def pid_namespace() -> str:
    return os.readlink("/proc/self/ns/pid")


def identity_fields(pid: int) -> dict[str, str | int]:
    """The identity tuple of a live process as it is stored; raises ProcessLookupError when there is none."""
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
