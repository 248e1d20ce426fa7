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
from areal.runtime.shim.log import TIMES

_BLOCK = 1 << 16


@dataclass(frozen=True, slots=True)
class TimedLine:
    at: float  # seconds since the epoch, 0.0 when not known
    text: str


def timed_lines(paths: Sequence[str], since: float = 0.0) -> Iterator[TimedLine]:
    """Every line of the files (oldest file first) that was written at ``since`` or later, within a second."""
    for path in paths:
        times, offsets = _times(path)
        offset = _offset_at(times, offsets, since)
        try:
            file = open(path, "rb")  # noqa: SIM115 (closed below; a generator cannot hold it open in a with of its caller)
        except FileNotFoundError:
            continue  # rotated away
        with file:
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


def _offset_at(times: Sequence[float], offsets: Sequence[int], since: float) -> int:
    """Where the output of ``since`` begins: at the last entry before it."""
    index = bisect.bisect_left(times, since) - 1
    return offsets[index] if index >= 0 and since > 0 else 0


class Follower:
    """New whole lines of one run's log, each call of ``poll``; a rotation in between loses nothing.

    Starts at the end, or at the beginning of the current file when ``from_start``. The file being read is held
    open: after a rotation the rest of it is read before the new one is opened.
    """

    def __init__(self, run_dir: str, *, from_start: bool = False) -> None:
        self._path = os.path.join(run_dir, records.LOG_FOLDER, records.CURRENT_LOG)
        self._fd = -1
        self._rest = b""
        self._open()
        if self._fd >= 0 and not from_start:
            os.lseek(self._fd, 0, os.SEEK_END)

    def poll(self) -> list[str]:
        data = self._read()
        if self._rotated():
            data += self._read()  # what was written between the read and the rotation
            self._open()
            data += self._read()
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [line.decode("utf-8", "replace") for line in lines]

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _open(self) -> None:
        self.close()
        try:
            self._fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            self._fd = -1

    def _read(self) -> bytes:
        parts: list[bytes] = []
        while self._fd >= 0 and (part := os.read(self._fd, _BLOCK)):
            parts.append(part)
        return b"".join(parts)

    def _rotated(self) -> bool:
        try:
            present = os.stat(self._path).st_ino
        except FileNotFoundError:
            return False  # between two renames, or not written yet
        return self._fd < 0 or os.fstat(self._fd).st_ino != present
