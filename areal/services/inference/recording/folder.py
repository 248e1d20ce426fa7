"""A journal's folder, and the lock that says who serves it.

The lock is the kernel's (``flock``): it ends with the process that holds it, however that ends. So a journal whose
lock is free has lost its process, and whoever takes the lock takes over. The lock's file holds the holder's pid until
it leaves in good order: then nobody will come back for the journal.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from areal.services.inference.recording.names import is_tag

DATABASE = "journal.db"
REGISTRATIONS = ".models.json"  # beside the folders: what was registered at the run of this uid
PUBLISHED = "published.json"  # beside the folders: the weights that the model's workers are to serve
_LOCK = "lock"
_TAG = "tag"


@dataclass(frozen=True)
class Folder:
    """A folder that this process holds. ``left``: its last holder gave it up."""

    path: Path
    descriptor: int
    left: bool = False

    @property
    def database(self) -> Path:
        return self.path / DATABASE

    def show_tag(self, tag: str) -> None:
        """Say whose sessions lie here to those who do not hold it."""
        (self.path / _TAG).write_text(tag, encoding="ascii")

    def release(self) -> None:
        """Let go, as if this process had never held it."""
        os.close(self.descriptor)

    def leave(self) -> None:
        """Let go for good: anybody may take over at once."""
        os.ftruncate(self.descriptor, 0)
        self.release()

    def remove(self) -> None:
        """Delete it, then let go: who waits for the lock finds that the folder is gone."""
        shutil.rmtree(self.path)
        self.release()


def hold(path: Path) -> Folder | None:
    """Take the folder, made if need be. None when another process holds it. Raises OSError."""
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    lock = path / _LOCK
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        still_there = os.fstat(descriptor).st_ino == lock.stat().st_ino
    except (BlockingIOError, FileNotFoundError):
        os.close(descriptor)
        return None
    if not still_there:
        os.close(descriptor)
        return None
    left = os.fstat(descriptor).st_size == 0
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    return Folder(path, descriptor, left)


def hold_soon(path: Path, patience_s: float) -> Folder | None:
    """As ``hold``, but somebody who only looks whether the lock is free is waited for."""
    deadline = time.monotonic() + patience_s
    while (folder := hold(path)) is None and time.monotonic() < deadline:
        time.sleep(0.02)
    return folder


def shown_tag(path: Path) -> str | None:
    try:
        tag = (path / _TAG).read_text(encoding="ascii")
    except (OSError, ValueError):
        return None
    return tag if is_tag(tag) else None


def others(root: Path, held: set[Path]) -> list[Path]:
    """Folders under ``root`` with a journal that this process does not hold."""
    with contextlib.suppress(FileNotFoundError):
        return sorted(path for path in root.iterdir() if path not in held and (path / DATABASE).is_file())
    return []
