"""Files that are replaced whole: a reader, or a crash at any instant, sees the old bytes or the new ones. A draft that
a killed process left has a name beginning with a dot, and ``.tmp-`` in it. Locks of files.

Imported by the shim: no ``dataclasses``, no ``typing``, no ``pathlib``.
"""

# ruff: noqa: PTH104, PTH108, PTH116, PTH118

from __future__ import annotations

import errno
import fcntl
import json
import os
import time
from contextlib import suppress

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from typing import Any


def replace_file(path: Path | str, content: bytes, *, mode: int = 0o600, durable: bool = False) -> None:
    """``mode``: readable by its owner alone by default. ``durable``: the new bytes survive a power cut.
    Raises OSError, and then ``path`` is as it was."""
    folder, name = os.path.split(path)
    draft = os.path.join(folder, f".{name}.tmp-{os.getpid()}")
    try:
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode)
        try:
            write_all(fd, content)
            if durable:
                os.fsync(fd)
        finally:
            os.close(fd)
        os.rename(draft, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(draft)
        raise
    if durable:
        sync_folder(folder)


def parse_json(text: str | bytes) -> Any:
    """``json.loads``, whose only error is ValueError: for a value with many levels it raises RecursionError."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it has too many levels") from None


def write_all(fd: int, content: bytes) -> None:
    """``os.write`` until nothing is left: a nearly full disk takes a part and refuses the rest. Raises OSError."""
    view = memoryview(content)
    while view:
        view = view[os.write(fd, view) :]


def append_line(path: str, line: bytes, merged: Callable[[bytes], bytes | None] | None = None) -> None:
    """Append to a file that others lock, cut and replace. A lock that is held longer than a moment is not waited for:
    a line may then be lost with the file that it replaces. ``merged`` gets the last line of the file and returns what
    to write in its place, or None to append. Raises OSError where the folder is gone."""
    for attempt in range(_TRIES):
        fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            locked = try_lock(fd)
            if (locked and still_named(fd, path)) or attempt == _TRIES - 1:
                instead = _take_last_line(fd, merged) if locked and merged is not None else None
                write_all(fd, line if instead is None else instead)
                return
        finally:
            os.close(fd)
        time.sleep(_PAUSE_S)


def _take_last_line(fd: int, merged: Callable[[bytes], bytes | None]) -> bytes | None:
    """Remove the last line of a locked file if ``merged`` returns another one for it, and return that."""
    size = os.fstat(fd).st_size
    tail = os.pread(fd, _LONGEST_LINE, max(0, size - _LONGEST_LINE))
    start = tail[:-1].rfind(b"\n") + 1
    if not tail.endswith(b"\n") or (start == 0 and size > len(tail)):
        return None
    instead = merged(tail[start:])
    if instead is not None:
        os.ftruncate(fd, size - len(tail) + start)
    return instead


_TRIES, _PAUSE_S = 10, 0.01
_LONGEST_LINE = 16_384


def try_lock(fd: int, *, shared: bool = False) -> bool:
    """Lock an open file now; False when another holds it. Raises OSError where the file system has no locks."""
    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def still_named(fd: int, path: Path | str) -> bool:
    """Return whether ``path`` leads to the open file: the holder of its lock may remove or replace it."""
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False


def stat_of(path: Path | str) -> os.stat_result | None:
    """None where there is no such file, or it cannot be looked at."""
    try:
        return os.stat(path)
    except OSError:
        return None


def size_of(path: Path | str) -> int:
    """0 where there is no file."""
    found = stat_of(path)
    return found.st_size if found is not None else 0


def stamp(path: Path | str) -> tuple[int, int, int] | None:
    """Size, time of the last write and inode, which tell a file from a later one at its path; None where there is no
    file."""
    found = stat_of(path)
    return (found.st_size, found.st_mtime_ns, found.st_ino) if found is not None else None


def sync_folder(path: Path | str) -> None:
    """Make the names in a folder durable. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network file systems cannot; the rename itself is then all there is
            raise
    finally:
        os.close(fd)
