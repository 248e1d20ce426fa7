"""Logs of a run: their end, lines by time, and new lines while they are written. ``causes`` has what failed in them.

Times come from the ``.times`` file beside each log, one entry about every second:
enough to merge and cut the output of several processes without a stamp in front of every line.
"""

from __future__ import annotations

import bisect
import os
from collections.abc import Callable, Iterator, Sequence

from areal.dataclasses import dataclass
from areal.runtime.shim.log import TIMES, TIMES_STEP_S

_BLOCK = 65536


def tail(paths: Sequence[str], n: int) -> list[str]:
    """The last ``n`` lines over all files, without line ends; reads no more than it needs."""
    lines: list[str] = []
    for path in reversed(paths):
        if len(lines) >= n:
            break
        lines = _tail_of_file(path, n - len(lines)) + lines
    return lines


def _tail_of_file(path: str, n: int) -> list[str]:
    try:
        with open(path, "rb") as file:
            position = os.fstat(file.fileno()).st_size
            data = b""
            while position > 0 and data.count(b"\n") <= n:
                step = min(_BLOCK, position)
                position -= step
                file.seek(position)
                data = file.read(step) + data
    except FileNotFoundError:
        return []
    return data.decode("utf-8", "replace").splitlines()[-n:] if n > 0 else []


_READ_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class TimedLine:
    at: float  # seconds since the epoch, 0.0 when not known
    text: str


def timed_lines(paths: Sequence[str], since: float = 0.0) -> Iterator[TimedLine]:
    """Every line of the files (oldest file first) that was written at ``since`` or later, within a second."""
    for path in paths:
        times, offsets = log_times(path)
        try:
            file = open(path, "rb")  # noqa: SIM115 (the with below closes it; only the opening may fail)
        except FileNotFoundError:
            continue  # rotated away
        with file:
            offset = _offset_at(times, offsets, since, os.fstat(file.fileno()).st_size)
            file.seek(offset)
            for raw in file:
                index = bisect.bisect_right(offsets, offset) - 1
                at = times[index] if index >= 0 else 0.0
                yield TimedLine(at, raw.decode("utf-8", "replace").rstrip("\r\n"))
                offset += len(raw)


def log_times(path: str) -> tuple[list[float], list[int]]:
    """The times of the marks of a log, and the offsets at which its output of each began."""
    try:
        with open(path + TIMES, "rb") as file:
            pairs = [line.split() for line in file.read().splitlines()]
        return [int(pair[0]) / 1000 for pair in pairs], [int(pair[1]) for pair in pairs]
    except (OSError, ValueError, IndexError):
        return [], []


def _offset_at(times: Sequence[float], offsets: Sequence[int], since: float, size: int) -> int:
    """The offset at which the output of ``since`` begins. Output after an entry was written within a step of it."""
    if not times:
        return 0
    index = bisect.bisect_right(times, since - TIMES_STEP_S)
    return offsets[index] if index < len(offsets) else size


class LogFollower:
    """New whole lines of one run's log, each call of ``poll``; a rotation in between loses nothing. ``log_paths`` is
    asked each time: its files oldest first, the one being written last.

    Starts at the end, or at the beginning of the current file when ``from_start``. The file being read is held
    open: after a rotation the rest of it is read before the new one is opened.
    """

    def __init__(self, log_paths: Callable[[], Sequence[str]], *, from_start: bool = False) -> None:
        self._log_paths = log_paths
        self._fd = -1
        self._rest = b""
        for path in log_paths()[-1:]:
            self._open(path)
        if self._fd >= 0 and not from_start:
            os.lseek(self._fd, 0, os.SEEK_END)

    def poll(self) -> list[str]:
        data = self._read()
        for newer in self._newer_files():
            data += self._read()  # written between the last read and the rotation
            self._open(newer)
            data += self._read()
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [line.decode("utf-8", "replace") for line in lines]

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _open(self, path: str) -> None:
        self.close()
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            self._fd = -1

    def _read(self) -> bytes:
        parts: list[bytes] = []
        while self._fd >= 0 and (part := os.read(self._fd, _READ_BYTES)):
            parts.append(part)
        return b"".join(parts)

    def _newer_files(self) -> list[str]:
        """Files begun after the one being read, oldest first: several when it was rotated more than once."""
        paths = self._log_paths()
        if self._fd < 0:
            return list(paths[-1:])
        own = os.fstat(self._fd).st_ino
        inodes = [_inode(path) for path in paths]
        position = inodes.index(own) if own in inodes else -1  # not there: it was deleted, all others are newer
        return list(paths[position + 1 :])


def _inode(path: str) -> int:
    try:
        return os.stat(path).st_ino
    except FileNotFoundError:
        return 0
