"""Where the attention of a decode step is cut into spans of consecutive rows, each as wide as its own longest; pure.

Attention over a rectangle of rows costs what its longest row makes of all of them. Rows whose lengths differ much are
cheaper in several rectangles, each of which costs a call; rows of one length need no mask besides. All rows of a batch
grow together, so a cut stays the best one for as long as the batch is the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

_MOST_RUNS = 32  # looked at; beyond it, lengths count by the ``_COARSE`` of them
_COARSE = 32


@dataclass(frozen=True, slots=True)
class Span:
    """Rows start:stop, the longest of which has ``width`` positions. ``even``: all of them have."""

    start: int
    stop: int
    width: int
    even: bool

    def grown(self, by: int) -> Span:
        return Span(self.start, self.stop, self.width + by, self.even)

    def cost(self, call: int) -> int:
        """In positions looked at; a call is worth so many, and a mask half as many."""
        return _cost(self.stop - self.start, self.width, self.even, call)


def _cost(rows: int, width: int, even: bool, call: int) -> int:
    return rows * width + (call if even else call + call // 2)


def cut(lengths: Sequence[int], call: int) -> tuple[Span, ...]:
    """The rows 0, 1, ... of these lengths in the spans that cost least, where there are not too many lengths to tell;
    ``call`` as in ``Span.cost``."""
    runs = _runs(lengths, 1)
    if len(runs) > _MOST_RUNS:
        runs = _runs(lengths, _COARSE)
    least, begins = [0], [0]  # of the runs before each: what they cost, and where the last span of them begins
    for end in range(1, len(runs) + 1):
        stop, width, even = runs[end - 1].stop, 0, True
        best, begin = -1, 0
        for at in range(end - 1, -1, -1):
            run = runs[at]
            even = even and run.even and width in (0, run.width)
            width = max(width, run.width)
            cost = least[at] + _cost(stop - run.start, width, even, call)
            if best < 0 or cost < best:
                best, begin = cost, at
        least.append(best)
        begins.append(begin)
    spans: list[Span] = []
    end = len(runs)
    while end:
        spans.append(_joined(runs[begins[end] : end]))
        end = begins[end]
    return tuple(reversed(spans))


def _runs(lengths: Sequence[int], coarse: int) -> list[Span]:
    """Neighbours of one length."""
    runs: list[Span] = []
    start = 0
    for _, group in groupby(lengths, key=lambda length: length // coarse):
        of_run = list(group)
        widest = max(of_run)
        runs.append(Span(start, start + len(of_run), widest, min(of_run) == widest))
        start += len(of_run)
    return runs


def _joined(runs: Sequence[Span]) -> Span:
    widest = max(run.width for run in runs)
    even = all(run.even and run.width == widest for run in runs)
    return Span(runs[0].start, runs[-1].stop, widest, even)
