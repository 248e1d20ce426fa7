"""A file in memory that dies with its process: no ``kill -9`` leaves gigabytes behind in /dev/shm.

It has no name of its own. A symbolic link leads to it through /proc, for processes of the same user on this machine; a
link whose process is gone leads nowhere.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path


class MemoryFile:
    """``size`` bytes of zeros, found at ``link`` while this process lives; mapped whole as ``map``."""

    def __init__(self, link: Path, size: int) -> None:
        self.link = link
        self._file = os.memfd_create(f"areal-{link.name}", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self._file, size)
            self.map = mmap.mmap(self._file, size)
            aside = link.with_name(f".{link.name}.{os.getpid()}")
            aside.unlink(missing_ok=True)
            aside.symlink_to(f"/proc/{os.getpid()}/fd/{self._file}")
            aside.rename(link)
        except BaseException:
            os.close(self._file)
            raise

    def remove(self) -> None:
        """The link goes, and our hold on the memory; whoever has it mapped keeps it. Idempotent."""
        if self._file < 0:
            return
        self.link.unlink(missing_ok=True)
        os.close(self._file)
        self._file = -1
