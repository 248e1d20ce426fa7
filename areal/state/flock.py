"""Kernel locks on open files, as every part of the state uses them.

``flock`` belongs to the open file: it is freed when the last descriptor of it closes, so by any death of its owner.
Descriptors are close-on-exec: a child that a command starts never keeps the command's locks.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable
from pathlib import Path

_POLL_S = (0.01, 0.2)  # a waiter asks again after this long, growing from the first to the second


def try_lock(fd: int, *, shared: bool = False) -> bool:
    """Lock an open file now; False when another holds it. Raises OSError where the file system has no locks."""
    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def acquire(path: Path, timeout_s: float, pause: Callable[[float], object] = time.sleep) -> int | None:
    """The descriptor of ``path``, created if need be, open for appending and locked; None when another holds the lock
    for longer than ``timeout_s``. ``pause`` is called between attempts with the seconds to let pass. Raises OSError."""
    deadline = time.monotonic() + timeout_s
    wait, longest = _POLL_S
    while True:
        fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            if try_lock(fd) and still_named(fd, path):
                return fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)
        if time.monotonic() >= deadline:
            return None
        pause(wait)
        wait = min(wait * 2, longest)


def still_named(fd: int, path: Path) -> bool:
    """Whether ``path`` leads to the open file: a file may be removed or replaced by whoever holds its lock."""
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except FileNotFoundError:
        return False


def flock_owner(path: Path) -> int:
    """The pid that holds an exclusive lock on ``path``; 0 when none can be seen (another host or pid namespace)."""
    try:
        inode = path.stat().st_ino
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return 0
    for line in lines:
        fields = line.split()
        if fields[1:2] == ["FLOCK"] and fields[3] == "WRITE" and fields[5].endswith(f":{inode}"):
            return max(int(fields[4]), 0)
    return 0
