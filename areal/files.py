"""Atomic replacement of files, and file locks. A reader, and a crash at any moment, sees either the old content or the
new content. A killed process may leave a draft, whose name begins with a dot and contains ``.tmp-``.

Imported by the shim: no ``dataclasses``, no ``typing``, no ``pathlib``.
"""

# ruff: noqa: PTH104, PTH108, PTH116, PTH118

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import time
from contextlib import suppress

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path
    from typing import Any


def replace_file(path: Path | str, content: bytes, *, mode: int = 0o600, durable: bool = False) -> None:
    """Replace a file atomically. ``mode``: by default only its owner can read it. ``durable``: the new content survives
    a power failure. Raises OSError, in which case ``path`` is unchanged."""
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


def lacks_room(error: OSError) -> bool:
    """Return whether a write failed for lack of room: the disk, a quota or the limit of a file's size. Of safetensors,
    which is written in Rust, only the message has the number of the error."""
    named = re.search(r"\(os error (\d+)\)", str(error)) if error.errno == errno.EIO else None
    return (int(named[1]) if named else error.errno) in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def disk_remedy(error: OSError | None) -> str:
    """Return the next step after a failed write, for a hint. None: it failed in another process."""
    return "free space" if error is None or lacks_room(error) else "check the disk"


def parse_json(text: str | bytes) -> Any:
    """Parse JSON as ``json.loads`` does, but raise ValueError where that raises RecursionError for a deeply nested
    value."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it has too many levels") from None


def read_bytes(path: str) -> bytes:
    """Return the contents of a small file with three system calls: a command may read thousands of files."""
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


def end_of_file(path: Path | str, most_bytes: int) -> tuple[bytes, bool]:
    """Return the last ``most_bytes`` of a file, and whether they are all of it. Raises OSError."""
    with open(path, "rb") as file:
        start = max(0, os.fstat(file.fileno()).st_size - most_bytes)
        file.seek(start)
        return file.read(), start == 0


def last_lines(path: Path | str, most_bytes: int) -> tuple[list[bytes], bool]:
    """Return the lines in the last ``most_bytes`` of a file, without the first if it may be cut, and whether they are
    all lines. Raises OSError."""
    data, is_all = end_of_file(path, most_bytes)
    return data.splitlines()[0 if is_all else 1 :], is_all


def write_all(fd: int, content: bytes) -> None:
    """Call ``os.write`` until everything is written: on a nearly full disk it writes a part. Raises OSError."""
    view = memoryview(content)
    while view:
        view = view[os.write(fd, view) :]


def append_line(path: str, line: bytes, merged: Callable[[bytes], bytes | None] | None = None) -> None:
    """Append to a file that other processes lock, truncate and replace. Waits only a moment for a lock; after that, the
    line may be lost together with the file that is replaced. ``merged`` is called with the last line of the file, and
    returns the line to write in its place, or None to append. Raises OSError if the folder does not exist."""
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
    """Lock an open file without waiting. Returns False if another process holds the lock. Raises OSError if the file
    system has no locks."""
    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def still_named(fd: int, path: Path | str) -> bool:
    """Return whether ``path`` still names the open file, which the holder of its lock may have removed or replaced."""
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False


def lock_named(path: Path | str, opened: Callable[[], int], attempts: Iterable[object]) -> int | None:
    """Open and lock a file that the holder of its lock may remove. Return its descriptor, or None if another process
    holds the lock at each of ``attempts``, between which the iterable pauses. Raises OSError."""
    for _ in attempts:
        fd = opened()
        try:
            if try_lock(fd) and still_named(fd, path):
                return fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)
    return None


def stat_of(path: Path | str) -> os.stat_result | None:
    """Return the status of a file; None if it does not exist or is not accessible."""
    try:
        return os.stat(path)
    except OSError:
        return None


def size_of(path: Path | str) -> int:
    """Return the size of a file; 0 if it does not exist."""
    found = stat_of(path)
    return found.st_size if found is not None else 0


def stamp(path: Path | str) -> tuple[int, int, int] | None:
    """Return size, modification time and inode, which distinguish a file from a later one at its path; None if it does
    not exist."""
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
