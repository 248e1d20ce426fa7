"""All numbers of a training job as columns, read once and then only as far as the file has grown.

A row is a step, in order; a column is a metric, an array of doubles. 100,000 steps of fifty metrics take 40 MB. As in
``job_metrics``, a job that resumes writes some steps again and those of its last attempt count, lines of one step and
attempt are merged, and torn lines are skipped. The writer replaces the file when it amends or rewinds it: a file that
is another one, or shorter, or that ends differently where the last read stopped, is read again from its beginning.
"""

from __future__ import annotations

import math
import os
import sys
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from areal.files import parse_json

ABSENT = -sys.float_info.max
"""The value of a metric at a step that has none. NaN is a value: a run that diverges writes it."""

_BLOCK = 1 << 20
_LONGEST_LINE = 16 << 20
_TAIL = 64  # bytes before the cursor that identify the file
_MOST_METRICS = 1_000
_GREATEST_STEP = 1 << 53
_WORDS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_WHOLE = ("attempt", "total_steps")


class Points(NamedTuple):
    """A metric over buckets of steps. None where a bucket has no finite value. ``low`` and ``high`` are empty where
    each bucket is one step."""

    mean: list[float | None]
    low: list[float | None]
    high: list[float | None]


class Reduced(NamedTuple):
    """Curves over the buckets that begin at the steps ``starts``, each of ``size`` steps."""

    size: int
    starts: list[int]
    curves: dict[str, Points]


_WholeBuckets = dict[tuple[str, int, int], Points]
"""Metric, size of a bucket and first row -> its buckets but the last. Snapshots share them: appended rows leave
them as they are, and where other rows change there is a new dict."""
_MOST_KEPT = 128


class JobCurves(Sequence[dict[str, float]]):
    """The steps of one file. As a sequence it has the numbers of each step, as ``steps_of`` returns them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._reset()

    def _reset(self) -> None:
        self.steps = array("q")
        self.columns: dict[str, array[float]] = {}
        self.not_finite: dict[str, int] = {}  # metric -> the first step with NaN or infinity
        self.cursor = 0
        self._whole: _WholeBuckets = {}
        self._is_shared = False
        self._inode = -1
        self._tail = b""

    # Reading

    def update(self, most: int | None = None) -> bool:
        """Read what was appended, at most about ``most`` bytes. Return whether anything changed. A missing file has no
        steps. Raises OSError if the file cannot be read."""
        try:
            stream = self.path.open("rb")
        except FileNotFoundError:
            changed = self.cursor > 0
            self._reset()
            return changed
        with stream:
            about = os.fstat(stream.fileno())
            changed = not self._continues(stream, about)
            if changed:
                self._reset()
                self._inode = about.st_ino
            end = about.st_size if most is None else min(about.st_size, self.cursor + most)
            while self.cursor < end and self._read_block(stream, about.st_size):
                changed = True
            return changed

    def _continues(self, stream: Any, about: os.stat_result) -> bool:
        if about.st_ino != self._inode or about.st_size < self.cursor:
            return False
        stream.seek(self.cursor - len(self._tail))
        return bool(stream.read(len(self._tail)) == self._tail)

    def _read_block(self, stream: Any, size: int) -> bool:
        """Read the whole lines of the next block. Return False if there is none yet."""
        stream.seek(self.cursor)
        length = _BLOCK
        while True:
            block = stream.read(length)
            end = block.rfind(b"\n") + 1
            if end or self.cursor + len(block) >= size:
                break
            if len(block) >= _LONGEST_LINE:  # no step: its beginning is skipped
                end = len(block)
                break
            length = len(block) * 4
            stream.seek(self.cursor)
        if not end:
            return False
        for line in block[:end].splitlines():
            self._take(line)
        self.cursor += end
        self._tail = block[max(0, end - _TAIL) : end]
        return True

    def snapshot(self) -> JobCurves:
        """Return the steps so far, for other threads: later updates add numbers to the last of them at most. It shares
        the columns, which hold what is appended beyond its own steps, until an earlier step is written again."""
        found = copy(self)
        found.steps, found.not_finite, found.columns = self.steps[:], dict(self.not_finite), dict(self.columns)
        self._is_shared = True
        return found

    def _unshare(self) -> None:
        if self._is_shared:
            self.columns = {name: column[:] for name, column in self.columns.items()}
            self._is_shared = False

    def sample(self, count: int) -> JobCurves:
        """About ``count`` steps, evenly spaced over the file: a first look at one that takes seconds to read."""
        found = JobCurves(self.path)
        size = self.path.stat().st_size
        with self.path.open("rb") as stream:
            for place in range(count):
                stream.seek(size * place // count)
                stream.readline(_LONGEST_LINE)  # the rest of a line
                found._take(stream.readline(_LONGEST_LINE))
            stream.seek(max(0, size - _BLOCK))
            for line in stream.read().splitlines()[-2:]:
                found._take(line)
        return found

    def _take(self, text: bytes) -> None:
        try:
            line = parse_json(text)
            step = step_number(line["step"])
            del line["step"]
        except (ValueError, KeyError, TypeError):
            return
        row = len(self.steps)
        if row and step <= self.steps[-1]:
            row = self._older_row(step, line)
        else:
            self.steps.append(step)
        columns = self.columns
        for name, value in line.items():
            if value.__class__ is not float and (value := _number(value)) is None:
                continue
            column = columns.get(name)
            if column is None:
                if len(columns) == _MOST_METRICS:
                    continue
                column = columns[name] = array("d")
            length = len(column)
            if length == row:
                column.append(value)
            elif length > row:
                column[row] = value
            else:
                column.extend([ABSENT] * (row - length))
                column.append(value)
            if value - value != 0.0:  # NaN or infinite
                self.not_finite[name] = min(step, self.not_finite.get(name, step))

    def _older_row(self, step: int, line: dict[str, object]) -> int:
        """Return the row of a step that is not the newest: emptied where another attempt takes the step again."""
        row = bisect_left(self.steps, step)
        known = row < len(self.steps) and self.steps[row] == step
        if row < len(self.steps) - 1 or not known:
            self._unshare()
            self._whole = {}  # buckets before the last one change
        if known:
            attempt = self._value("attempt", row)
            if attempt is None or attempt != line.get("attempt"):
                self._unshare()
                for name, column in self.columns.items():
                    if row < len(column):
                        column[row] = ABSENT
                        if self.not_finite.get(name) == step:
                            self._next_not_finite(name, row)
        else:
            self.steps.insert(row, step)
            for column in self.columns.values():
                if row < len(column):
                    column.insert(row, ABSENT)
        return row

    def _next_not_finite(self, name: str, row: int) -> None:
        """Let ``not_finite`` have the first step after ``row`` with such a value, or none."""
        del self.not_finite[name]
        column = self.columns[name]
        for later in range(row + 1, len(column)):
            if column[later] != ABSENT and not math.isfinite(column[later]):
                self.not_finite[name] = self.steps[later]
                return

    # The steps

    def __len__(self) -> int:
        return len(self.steps)

    def __getitem__(self, row: Any) -> Any:
        if isinstance(row, slice):
            return [self._row(each) for each in range(*row.indices(len(self)))]
        return self._row(range(len(self))[row])

    def __iter__(self) -> Iterator[dict[str, float]]:
        return map(self._row, range(len(self)))

    def _row(self, row: int) -> dict[str, float]:
        found: dict[str, float] = {"step": self.steps[row]}
        for name, column in self.columns.items():
            if row < len(column) and column[row] != ABSENT:
                found[name] = int(column[row]) if name in _WHOLE and math.isfinite(column[row]) else column[row]
        return found

    def _value(self, name: str, row: int) -> float | None:
        column = self.columns.get(name, ())
        return column[row] if row < len(column) and column[row] != ABSENT else None

    def at(self, step: int) -> dict[str, float] | None:
        """Return the numbers of ``step``; None if it was not taken."""
        row = bisect_left(self.steps, step)
        return self._row(row) if row < len(self.steps) and self.steps[row] == step else None

    def curve(self, name: str) -> list[tuple[int, float]]:
        """(step, value) wherever the metric is finite."""
        return [
            (step, value)
            for step, value in zip(self.steps, self.columns.get(name, ()), strict=False)
            if value != ABSENT and math.isfinite(value)
        ]

    # Reduction

    def reduced(
        self, names: Iterable[str], most: int = 1000, *, first: int | None = None, last: int | None = None
    ) -> Reduced:
        """Return the curves between the steps ``first`` and ``last``, in at most ``most`` buckets of a power of two
        steps: their borders stay where they are while a run goes on."""
        if not self.steps:
            return Reduced(1, [], {})
        first = self.steps[0] if first is None else max(first, self.steps[0])
        last = self.steps[-1] if last is None else min(last, self.steps[-1])
        size = 1
        while (last // size) - (first // size) >= most:
            size *= 2
        begin, end = bisect_left(self.steps, first), bisect_left(self.steps, last + 1)
        starts: list[int] = []
        rows: list[int] = []
        while begin < end:
            start = self.steps[begin] // size * size
            starts.append(start if size > 1 else self.steps[begin])
            rows.append(begin)
            begin = bisect_left(self.steps, start + size, begin, end)
        rows.append(end)
        known = {name: self.columns[name] for name in names if name in self.columns}
        return Reduced(size, starts, {name: self._points(name, column, rows, size) for name, column in known.items()})

    def _points(self, name: str, column: array[float], rows: Sequence[int], size: int) -> Points:
        if size == 1:
            return Points([_finite(column, row) for row in rows[:-1]], [], [])
        key = name, size, rows[0]
        kept = self._whole.get(key, Points([], [], []))
        found = Points(*(each[: len(rows) - 2] for each in kept))
        rows = rows[len(found.mean) :]
        origin = rows[0]
        values = column[origin : rows[-1]].tolist()
        has_gaps = ABSENT in values or not math.isfinite(sum(values))
        for begin, end in pairwise(rows):
            bucket = values[begin - origin : end - origin]
            if has_gaps:
                bucket = [value for value in bucket if value != ABSENT and math.isfinite(value)]
            if bucket:
                found.mean.append(_short(sum(bucket) / len(bucket)))
                found.low.append(_short(min(bucket)))
                found.high.append(_short(max(bucket)))
            else:
                for each in found:
                    each.append(None)
        if len(self._whole) >= _MOST_KEPT:
            self._whole.clear()
        self._whole[key] = Points(*(each[:-1] for each in found))  # the last bucket may grow
        return found


def read_curves(path: Path) -> JobCurves:
    """Return all steps of a file; none if it does not exist. Raises OSError."""
    found = JobCurves(path)
    found.update()
    return found


def step_number(value: Any) -> int:
    """Raise ValueError unless it is the number of a step."""
    if value.__class__ not in (int, float) or not abs(value) <= _GREATEST_STEP:
        raise ValueError(f"{value!r} is not a step")
    return int(value)


def _number(value: Any) -> float | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        try:
            return float(value)
        except OverflowError:
            return None
    return _WORDS.get(value) if isinstance(value, str) else None


def _finite(column: Sequence[float], row: int) -> float | None:
    value = column[row] if row < len(column) else ABSENT
    return _short(value) if value != ABSENT and math.isfinite(value) else None


def _short(value: float) -> float | None:
    """Return the value rounded to seven digits, more than a screen can show."""
    return float(f"{value:.7g}") if math.isfinite(value) else None
