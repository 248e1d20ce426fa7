"""Log lines of many processes as one stream: times read off the lines, merged, prefixed.

A line without a time (a traceback, a progress bar) belongs to the one before it and stays with it.
"""

from __future__ import annotations

import calendar
import os
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from heapq import merge
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from areal.runtime.backends.base import RunState

_STAMP = re.compile(
    rb"^(?:\[areal\] |\S+ |[\[(])?"
    rb"(?P<second>\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d)(?:[.,](?P<part>\d{1,9}))?(?P<zone>Z|[+-]\d\d:?\d\d)?"
)
_BLOCK = 1 << 16


class Line(NamedTuple):
    at: float  # seconds since the epoch; 0 when nothing before it had a time
    process: str
    text: str


def time_of(raw: bytes) -> float | None:
    """When a line says it was written: ISO 8601 near its start; without a zone it is local time."""
    match = _STAMP.match(raw)
    if match is None:
        return None
    try:
        moment = time.strptime(match["second"].decode().replace("T", " "), "%Y-%m-%d %H:%M:%S")
    except ValueError:
        return None
    zone = match["zone"]
    seconds = float(time.mktime(moment)) if zone is None else float(calendar.timegm(moment)) - _offset(zone.decode())
    return seconds + float(f"0.{match['part'].decode()}" if match["part"] else 0)


def _offset(zone: str) -> int:
    if zone == "Z":
        return 0
    sign = -1 if zone[0] == "-" else 1
    return sign * (int(zone[1:3]) * 3600 + int(zone[-2:]) * 60)


def stamped(process: str, lines: Iterable[str], at: float = 0.0) -> Iterator[Line]:
    """Each line with its time; times never go back, so that a merge keeps a process's own order."""
    for text in lines:
        found = time_of(text.encode("utf-8", "replace"))
        at = max(at, found) if found is not None else at
        yield Line(at, process, text)


def merged(streams: Sequence[Iterable[Line]]) -> Iterator[Line]:
    return merge(*streams, key=lambda line: line.at)


def process_label(state: RunState, *, several_owners: bool) -> str:
    short = f"{state.spec.component}/{state.spec.replica}"
    return f"{state.spec.owner.partition('/')[2]} {short}" if several_owners else short


class Follower:
    """New whole lines of one growing, rotating file. Holds the file open, so that a rotation loses nothing."""

    def __init__(self, path: str, *, from_end: bool) -> None:
        self._path = path
        self._fd: int | None = None
        self._rest = b""
        self._from_end = from_end

    def lines(self) -> list[str]:
        if self._fd is None and not self._open():
            return []
        lines = self._drain()
        if self._rotated():
            lines += self._drain()
            self.close()
            self._from_end = False
            if self._open():
                lines += self._drain()
        return lines

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _open(self) -> bool:
        try:
            self._fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        if self._from_end:
            os.lseek(self._fd, 0, os.SEEK_END)
        return True

    def _rotated(self) -> bool:
        assert self._fd is not None
        try:
            return os.stat(self._path).st_ino != os.fstat(self._fd).st_ino  # noqa: PTH116 - polled for every process
        except FileNotFoundError:
            return False

    def _drain(self) -> list[str]:
        assert self._fd is not None
        data = self._rest
        while part := os.read(self._fd, _BLOCK):
            data += part
        *whole, self._rest = data.split(b"\n")
        return [line.decode("utf-8", "replace").rstrip("\r") for line in whole]
