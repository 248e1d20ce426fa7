"""Kernel locks on open files, as every part of the state uses them.

``flock`` belongs to the open file: it is freed when the last descriptor of it closes, so by any death of its owner.
Descriptors are close-on-exec: a child that a command starts never keeps the command's locks.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path


def try_lock(fd: int, *, shared: bool = False) -> bool:
    """Lock an open file now; False when another holds it. Raises OSError where the file system has no locks."""
    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


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
