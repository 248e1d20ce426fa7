"""Weights in memory that several processes use: files without a name on any disk, leases on them, and how far weights
that are still being written have come.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import resource
import threading
from collections.abc import Mapping
from pathlib import Path

from areal.errors import ArealError


class TransferProgress:
    """``ends``: at which byte each tensor is whole. Written by one thread, waited for by another."""

    def __init__(self, ends: Mapping[str, int]) -> None:
        self.ends = ends
        self._changed = threading.Condition()
        self._bytes = 0
        self._failure: str | None = None

    @property
    def is_whole(self) -> bool:
        return self._bytes >= max(self.ends.values(), default=0)

    def reach(self, count: int) -> None:
        """The first ``count`` bytes are there."""
        with self._changed:
            self._bytes = count
            self._changed.notify_all()

    def fail(self, why: str) -> None:
        """No more will come."""
        with self._changed:
            self._failure = self._failure or why
            self._changed.notify_all()

    def wait(self, name: str) -> None:
        """Return when the tensor is there. Raises ArealError when it will not come; one that nobody announced is
        waited for as all of them."""
        self.wait_for(self.ends.get(name, max(self.ends.values(), default=0)))

    def wait_all(self) -> None:
        self.wait_for(max(self.ends.values(), default=0))

    def wait_for(self, end: int) -> None:
        """Return when the first ``end`` bytes are there. Raises ArealError when they will not come."""
        with self._changed:
            self._changed.wait_for(lambda: self._bytes >= end or self._failure is not None)
            if self._bytes < end:
                raise ArealError(f"the weights did not arrive: {self._failure}")


# A file in memory that dies with its process: no ``kill -9`` leaves gigabytes behind in /dev/shm. It has no name of
# its own: /proc leads to it, for processes of the same user on this machine, and so does a symbolic link, which leads
# nowhere once the process is gone.
#
# A reader may compute with what it has mapped: a ``MemoryLease`` keeps the file as it is, and a writer that cannot
# ``seize`` it writes to another one. Locks of the kernel (flock), so that no death leaves one behind. The file is
# sealed against a change of length: no reader's mapping ends in a SIGBUS.

_FIRST = 10_000
_last = [0]


class MemoryFile:
    """``size`` bytes of zeros, found at ``path`` and ``link`` while this process lives; mapped whole as ``map``."""

    def __init__(self, link: Path | None, size: int) -> None:
        self.link = link
        name = "areal" if link is None else f"areal-{link.name}"
        self._file = _with_own_number(os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
        self.path = Path(f"/proc/{os.getpid()}/fd/{self._file}")
        try:
            os.ftruncate(self._file, size)
            fcntl.fcntl(self._file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            self.map = mmap.mmap(self._file, size)
            if link is not None:
                aside = link.with_name(f".{link.name}.{os.getpid()}")
                aside.unlink(missing_ok=True)
                aside.symlink_to(self.path)
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
        if self.link is not None:
            self.link.unlink(missing_ok=True)
        os.close(self._file)
        self._file = -1


def _with_own_number(file: int) -> int:
    """``file`` as a descriptor that no other of this process had or gets soon: who comes late with the path of one that
    was removed must not find the next. Others are given low numbers, these are counted upwards."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    first = _FIRST if soft == resource.RLIM_INFINITY else min(_FIRST, soft // 2)
    try:
        _last[0] = fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, max(first, _last[0] + 1))
    except OSError:  # the highest that we may have was reached: from the beginning
        _last[0] = fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, first)
    os.close(file)
    return _last[0]


class MemoryLease:
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
