"""TCP ports: which are free, who has the others.

Leases keep areal's own processes apart; the bind test keeps away from everybody else's. Automatic ports come from a
range below the kernel's ephemeral ports, so that an outgoing connection cannot take one between claim and start.
"""

from __future__ import annotations

import errno
import os
import pwd
import re
import socket
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from areal.runtime import procfs

FIRST_PORT = 20000
LAST_PORT = 29999
_LISTEN = "0A"
_NO_SUCH_ADDRESS = frozenset({errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT})
_SOCKET_LINK = re.compile(r"socket:\[(\d+)\]")


@dataclass(frozen=True)
class PortOwner:
    """Who listens on a port. ``pid`` is None when its process may not be inspected or is in another namespace."""

    port: int
    pid: int | None
    command: str
    user: str

    def __str__(self) -> str:
        if self.pid is None:
            return f"a process of user {self.user} that cannot be inspected"
        return f"pid {self.pid} ({self.command}) of user {self.user}"


def bind_error(port: int) -> OSError | None:
    """Why no server could listen on it now on any address; None when one could. TIME_WAIT does not count."""
    for family, address in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):
        try:
            probe = socket.socket(family, socket.SOCK_STREAM)
        except OSError:
            continue  # this address family does not exist here
        with probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            try:
                probe.bind((address, port))
            except OSError as error:
                if error.errno not in _NO_SUCH_ADDRESS:
                    return error
    return None


def candidates(owner: str) -> Iterator[int]:
    """The automatic range, from a place of the owner's own: a port just given back is not the next one given out."""
    low, high = map(int, procfs.read_bytes("/proc/sys/net/ipv4/ip_local_port_range").split())
    usable = [port for port in range(FIRST_PORT, LAST_PORT + 1) if not low <= port <= high]
    start = zlib.crc32(owner.encode()) % max(1, len(usable))
    yield from usable[start:]
    yield from usable[:start]


def port_owner(port: int) -> PortOwner | None:
    """Who listens on the port; None when nobody does."""
    for inode, uid in _listeners(port):
        pid = next((pid for pid, found in _open_sockets() if found == inode), None)
        command = procfs.command_line(pid) if pid is not None else ""
        return PortOwner(port, pid, command, _user_name(uid))
    return None


def listening_pids(port: int) -> frozenset[int]:
    """Every process that holds a listening socket of the port, as far as it may be inspected."""
    wanted = {inode for inode, _ in _listeners(port)}
    return frozenset(pid for pid, inode in _open_sockets() if inode in wanted) if wanted else frozenset()


def ports_of(pid: int) -> tuple[int, ...]:
    """The ports a process listens on, in ascending order; none when it is gone or may not be inspected."""
    inodes = set(_sockets_of(pid))
    return tuple(sorted({port for port, inode, _ in _all_listeners(f"/proc/{pid}/net") if inode in inodes}))


def session_listens(port: int, session_id: int) -> bool:
    """Whether a member of the session owns the port: a stranger's answer to a probe is not ours."""
    stats = (procfs.read_stat(pid) for pid in listening_pids(port))
    return any(stat is not None and stat.session == session_id for stat in stats)


def _listeners(port: int) -> Iterator[tuple[int, int]]:
    """(socket inode, user id) of each listening socket of the port."""
    return ((inode, uid) for found, inode, uid in _all_listeners("/proc/net") if found == port)


def _all_listeners(tables: str) -> Iterator[tuple[int, int, int]]:
    """(port, socket inode, user id) of each listening socket of a network namespace."""
    for table in ("tcp", "tcp6"):
        try:
            text = procfs.read_table(f"{tables}/{table}").decode()
        except OSError:
            continue
        for line in text.splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTEN:
                yield int(fields[1].rpartition(":")[2], 16), int(fields[9]), int(fields[7])


def _open_sockets() -> Iterator[tuple[int, int]]:
    """(pid, socket inode) of every descriptor we may look at."""
    return ((pid, inode) for pid in procfs.pids() for inode in _sockets_of(pid))


def _sockets_of(pid: int) -> Iterator[int]:
    """The inodes of a process's sockets, as far as it may be inspected."""
    with suppress(OSError):
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                match = _SOCKET_LINK.fullmatch(os.readlink(f"/proc/{pid}/fd/{fd}"))
                if match:
                    yield int(match[1])


def _user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
