"""Follow logs while they are written and rotated, and put their lines in order of time.

Times come from the ``.times`` file beside each log, one entry about every second: good enough to merge the output
of several processes and to cut it, without a stamp in front of every line.
"""

from __future__ import annotations

import bisect
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from areal.runtime import records
from areal.runtime.logs import run_log_paths
from areal.runtime.shim.log import TIMES, TIMES_STEP_S

_BLOCK = 1 << 16


@dataclass(frozen=True, slots=True)
class TimedLine:
    at: float  # seconds since the epoch, 0.0 when not known
    text: str


def timed_lines(paths: Sequence[str], since: float = 0.0) -> Iterator[TimedLine]:
    """Every line of the files (oldest file first) that was written at ``since`` or later, within a second."""
    for path in paths:
        times, offsets = _times(path)
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


def _times(path: str) -> tuple[list[float], list[int]]:
    try:
        with open(path + TIMES, "rb") as file:
            pairs = [line.split() for line in file.read().splitlines()]
        return [int(pair[0]) / 1000 for pair in pairs], [int(pair[1]) for pair in pairs]
    except (OSError, ValueError, IndexError):
        return [], []


def _offset_at(times: Sequence[float], offsets: Sequence[int], since: float, size: int) -> int:
    """Where the output of ``since`` begins: what follows an entry was written within a step after it."""
    if not times:
        return 0
    index = bisect.bisect_right(times, since - TIMES_STEP_S)
    return offsets[index] if index < len(offsets) else size


class Follower:
    """New whole lines of one run's log, each call of ``poll``; a rotation in between loses nothing.

    Starts at the end, or at the beginning of the current file when ``from_start``. The file being read is held
    open: after a rotation the rest of it is read before the new one is opened.
    """

    def __init__(self, run_dir: str, *, from_start: bool = False) -> None:
        self._run_dir = run_dir
        self._path = os.path.join(run_dir, records.LOG_FOLDER, records.CURRENT_LOG)
        self._fd = -1
        self._rest = b""
        self._open(self._path)
        if self._fd >= 0 and not from_start:
            os.lseek(self._fd, 0, os.SEEK_END)

    def poll(self) -> list[str]:
        data = self._read()
        for newer in self._newer_files():
            data += self._read()  # what was written between the last read and the rotation
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
        while self._fd >= 0 and (part := os.read(self._fd, _BLOCK)):
            parts.append(part)
        return b"".join(parts)

    def _newer_files(self) -> list[str]:
        """Files begun after the one being read, oldest first: several when it was rotated more than once."""
        paths = run_log_paths(self._run_dir)
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
