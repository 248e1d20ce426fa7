"""Log lines of many processes as one stream, in order of time, each with the process it came from."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from heapq import merge
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from areal.runtime.follow import TimedLine, timed_lines

if TYPE_CHECKING:
    from areal.runtime.backends.base import RunState

_FIRST_WINDOW_S = 16.0
_WIDER = 8
_WIDEST_S = 1e9
_RESOLUTION_S = 1.0  # a line's time is that of its log's last time mark, which is at most this much older


class Line(NamedTuple):
    at: float  # seconds since the epoch; 0 when it is not known
    process: RunState
    text: str


def last_lines(paths: Sequence[str], count: int, since: float = 0.0) -> list[TimedLine]:
    """The last ``count`` lines written at ``since`` or later. Looks back ever further, so that the end of a long log
    is found without reading its beginning."""
    newest = _last_write(paths)
    window = _FIRST_WINDOW_S
    while True:
        start = max(since, newest - window)
        lines = (line for line in timed_lines(paths, start) if not line.at or line.at + _RESOLUTION_S >= since)
        found = deque(lines, maxlen=count)
        if len(found) == count or start == since or window > _WIDEST_S:
            return list(found)
        window *= _WIDER


def of(process: RunState, lines: Iterable[TimedLine]) -> Iterator[Line]:
    return (Line(line.at, process, line.text) for line in lines)


def merged(streams: Sequence[Iterable[Line]]) -> Iterator[Line]:
    """By time; the lines of one process keep their order (their times never go back)."""
    return merge(*streams, key=lambda line: line.at)


def not_yet_shown(shown: Sequence[str], polled: Sequence[str]) -> list[str]:
    """``polled`` without its beginning that ``shown`` ends with: what was written between opening and reading."""
    for overlap in range(min(len(shown), len(polled)), 0, -1):
        if list(shown[-overlap:]) == list(polled[:overlap]):
            return list(polled[overlap:])
    return list(polled)


def _last_write(paths: Sequence[str]) -> float:
    times = [Path(path).stat().st_mtime for path in paths if Path(path).exists()]
    return max(times, default=0.0)
