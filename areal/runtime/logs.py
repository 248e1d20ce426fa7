"""Logs of a run: the end of a log, lines by time, new lines while they are written, and windows of lines before or
after a position, without reading the rest of the file. ``causes`` finds what failed in them.

Times come from the ``.times`` file beside each log, which has about one entry per second: enough to merge and cut the
output of several processes without a timestamp in front of every line.

A place is the inode of a file and an offset in it, so that it denotes the same line after the log is rotated. A line is
whole when it has ended; the last line of an ended run is taken as it is.
"""

from __future__ import annotations

import bisect
import io
import os
import re
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from areal.dataclasses import dataclass
from areal.files import stat_of
from areal.runtime.causes import ERROR_LINE, TRACEBACK
from areal.runtime.shim.log import TIMES, TIMES_STEP_S
from areal.terminal import without_colours

_BLOCK = 1 << 16
_LONGEST = 4000  # characters of a line that are given out


def tail(paths: Sequence[str], n: int) -> list[str]:
    """Return the last ``n`` lines over all files, without line ends. Reads no more than needed."""
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


@dataclass(frozen=True, slots=True)
class TimedLine:
    at: float  # seconds since the epoch, 0.0 when not known
    text: str


def timed_lines(paths: Sequence[str], since: float = 0.0) -> Iterator[TimedLine]:
    """Yield every line of the files (oldest file first) that was written at ``since`` or later, to within a second."""
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
    """Return the times of a log's marks, and the offset at which the output after each began."""
    try:
        with open(path + TIMES, "rb") as file:
            pairs = [line.split() for line in file.read().splitlines()]
        return [int(pair[0]) / 1000 for pair in pairs], [int(pair[1]) for pair in pairs]
    except (OSError, ValueError, IndexError):
        return [], []


def _offset_at(times: Sequence[float], offsets: Sequence[int], since: float, size: int) -> int:
    """Return the offset at which the output of ``since`` begins. It is exact to one step."""
    if not times:
        return 0
    index = bisect.bisect_right(times, since - TIMES_STEP_S)
    return offsets[index] if index < len(offsets) else size


class LogFollower:
    """Yields new whole lines of one run's log at each call of ``poll``, losing nothing in rotations. ``log_paths`` is
    called each time and returns the log's files, oldest first.

    Starts at the end, or with ``from_start`` at the beginning of the current file. The file being read is held open:
    after a rotation, the rest of it is read before the new one is opened.
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
        while self._fd >= 0 and (part := os.read(self._fd, _BLOCK)):
            parts.append(part)
        return b"".join(parts)

    def _newer_files(self) -> list[str]:
        """Return the files begun after the one being read, oldest first: several after several rotations."""
        paths = self._log_paths()
        if self._fd < 0:
            return list(paths[-1:])
        own = os.fstat(self._fd).st_ino
        inodes = [found.st_ino if (found := stat_of(path)) is not None else 0 for path in paths]
        position = inodes.index(own) if own in inodes else -1  # not there: it was deleted, all others are newer
        return list(paths[position + 1 :])


_WARNING = re.compile(r"\b(?:WARN|WARNING|Warning)\b|\w+Warning:")


class Place(NamedTuple):
    """The beginning of a line, or the end of the last one read."""

    inode: int
    offset: int

    def __str__(self) -> str:
        return f"{self.inode:x}.{self.offset:x}"

    @classmethod
    def parse(cls, text: str) -> Place:
        """Raise ValueError."""
        inode, offset = (int(part, 16) for part in text.split("."))
        if not 0 <= min(inode, offset) <= max(inode, offset) < 1 << 63:
            raise ValueError(f"{text[:40]} is no place in a file")
        return cls(inode, offset)


class PlacedLine(NamedTuple):
    """A line. ``at``: seconds since the epoch, 0.0 if unknown. ``end``: the offset after it. ``cut``: left out."""

    at: float
    text: str
    place: Place
    end: int = 0
    cut: int = 0

    @property
    def level(self) -> str:
        return level_of(self.text)


class Older(NamedTuple):
    """``lines`` oldest first. ``start``: where to continue; None at the beginning of the log."""

    lines: list[PlacedLine]
    start: Place | None


class Newer(NamedTuple):
    """``end``: where to continue; None without a file. ``more``: there are lines that were not read."""

    lines: list[PlacedLine]
    end: Place | None
    more: bool


Matches = Callable[[PlacedLine], bool]


def level_of(text: str) -> str:
    """Return ``error``, ``warning`` or ``info``, as the line itself states."""
    if TRACEBACK in text or ERROR_LINE.match(text):
        return "error"
    return "warning" if _WARNING.search(text) else "info"


def end_of(paths: Sequence[str], *, ended: bool) -> Place | None:
    """Return the end of the last line, of the last whole one in a log that is being written; None without a log."""
    for path in reversed(paths):
        if (found := stat_of(path)) is None:
            continue
        position = found.st_size
        while not ended and position > 0:
            start = max(0, position - _BLOCK)
            last = _read(path, start, position - start).rfind(b"\n")
            position = start + last + 1 if last >= 0 else start
            if last >= 0:
                break
        return Place(found.st_ino, position)
    return None


def lines_before(paths: Sequence[str], end: Place, count: int, matches: Matches, *, most_bytes: int) -> Older:
    """Return the last ``count`` matching lines before ``end``, from at most ``most_bytes``."""
    files = [(path, found.st_ino, found.st_size) for path in paths if (found := stat_of(path)) is not None]
    known = next((index for index, (_, inode, _) in enumerate(files) if inode == end.inode), None)
    if known is None:
        return Older([], None)  # rotated away
    path, inode, size = files[known]
    files = [*files[:known], (path, inode, min(size, end.offset))]
    lines: list[PlacedLine] = []
    for path, inode, size in reversed(files):
        position = size
        while position > 0:
            if most_bytes <= 0:
                return Older(lines, Place(inode, position))
            position, block = _block_before(path, position)
            most_bytes -= len(block)
            chosen = [line for line in _placed(path, inode, position, block) if matches(line)]
            room = count - len(lines)
            if len(chosen) >= room:
                kept = chosen[len(chosen) - room :]
                return Older(kept + lines, kept[0].place if kept else Place(inode, position))
            lines = chosen + lines
    return Older(lines, None)


def lines_after(paths: Sequence[str], start: Place | None, matches: Matches, *, most_bytes: int, ended: bool) -> Newer:
    """Return the matching lines after ``start``, from at most ``most_bytes``; None or rotated away: from the oldest."""
    files = [(path, found.st_ino, found.st_size) for path in paths if (found := stat_of(path)) is not None]
    inodes = [inode for _, inode, _ in files]
    first = inodes.index(start.inode) if start is not None and start.inode in inodes else 0
    offset = start.offset if start is not None and start.inode in inodes else 0
    lines: list[PlacedLine] = []
    end, window = start, most_bytes
    for path, inode, size in files[first:]:
        data = _read(path, offset, min(size - offset, most_bytes))
        limited = len(data) < size - offset
        if limited or (path == paths[-1] and not ended):
            whole = data[: data.rfind(b"\n") + 1]
            # A line longer than the whole window is returned in pieces; one that begins late in it waits for the next
            # window.
            data = data if limited and not whole and most_bytes == window else whole
        lines += [line for line in _placed(path, inode, offset, data) if matches(line)]
        most_bytes -= len(data)
        end = Place(inode, offset + len(data))
        if limited:
            return Newer(lines, end, True)
        offset = 0
    return Newer(lines, end, False)


def _block_before(path: str, position: int) -> tuple[int, bytes]:
    """Return the beginning of whole lines that end at ``position``, and their bytes. A longer line is read whole."""
    size = _BLOCK
    while True:
        start = max(0, position - size)
        data = _read(path, start, position - start)
        if start == 0:
            return 0, data
        cut = data.find(b"\n") + 1
        if 0 < cut < len(data):
            return start + cut, data[cut:]
        size *= 2


def _placed(path: str, inode: int, start: int, data: bytes) -> list[PlacedLine]:
    """Return the lines of a block. Only ``\n`` ends a line: the carriage returns of a progress bar stay in its line."""
    times, offsets = log_times(path)
    lines, offset = [], start
    for raw in io.BytesIO(data):
        index = bisect.bisect_right(offsets, offset) - 1
        text = without_colours(raw.decode("utf-8", "replace").rstrip("\r\n"))
        at, cut = times[index] if index >= 0 else 0.0, max(0, len(text) - _LONGEST)
        lines.append(PlacedLine(at, text[:_LONGEST], Place(inode, offset), offset + len(raw), cut))
        offset += len(raw)
    return lines


def _read(path: str, start: int, size: int) -> bytes:
    try:
        with open(path, "rb") as file:
            file.seek(start)
            return file.read(max(0, size))
    except FileNotFoundError:
        return b""
