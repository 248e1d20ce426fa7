"""A file in memory that dies with its process: no ``kill -9`` leaves gigabytes behind in /dev/shm.

It has no name of its own. A symbolic link leads to it through /proc, for processes of the same user on this machine; a
link whose process is gone leads nowhere.

One writes and others read, and who reads may go on computing with what it has mapped: a ``Lease`` keeps the file as it
is, and a writer that cannot ``seize`` it writes to another one. Locks of the kernel (flock), so that no death leaves
one behind. The file is sealed against a change of length: no reader's mapping ends in a SIGBUS.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from pathlib import Path


class MemoryFile:
    """``size`` bytes of zeros, found at ``link`` while this process lives; mapped whole as ``map``."""

    def __init__(self, link: Path, size: int) -> None:
        self.link = link
        self._file = os.memfd_create(f"areal-{link.name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self._file, size)
            fcntl.fcntl(self._file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            self.map = mmap.mmap(self._file, size)
            aside = link.with_name(f".{link.name}.{os.getpid()}")
            aside.unlink(missing_ok=True)
            aside.symlink_to(f"/proc/{os.getpid()}/fd/{self._file}")
            aside.rename(link)
        except BaseException:
            os.close(self._file)
            raise

    def seize(self) -> bool:
        """Keep readers out until ``yield_up``; False where one has it on lease."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def yield_up(self) -> None:
        fcntl.flock(self._file, fcntl.LOCK_UN)

    def remove(self) -> None:
        """The link goes, and our hold on the memory; whoever has it mapped keeps it. Idempotent."""
        if self._file < 0:
            return
        self.link.unlink(missing_ok=True)
        os.close(self._file)
        self._file = -1


class Lease:
    """The memory file at ``path`` stays as it is until ``end``, or the end of this process. Raises BlockingIOError
    while it is written, OSError where it is not there."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb")
        try:
            fcntl.flock(self._file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise

    def end(self) -> None:
        """Idempotent. Said to the kernel, for what is mapped from our file holds it open."""
        if not self._file.closed:
            fcntl.flock(self._file, fcntl.LOCK_UN)
            self._file.close()

    def __del__(self) -> None:
        self.end()

    @property
    def fileno(self) -> int:
        return self._file.fileno()


def is_memory_file(path: Path) -> bool:
    """Whether it is one of ours, whose writer respects a lease."""
    with path.open("rb") as file:
        try:
            return bool(fcntl.fcntl(file, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK)
        except OSError:  # a disk's
            return False
