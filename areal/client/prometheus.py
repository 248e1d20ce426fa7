"""Parser of Prometheus text pages; increases of counters and quantiles of histograms between two pages. No I/O.

The arithmetic is Prometheus's: a counter that decreased was reset, so its increase is its value; a quantile is
interpolated within its bucket, and is the last finite bound if it lies in the bucket +Inf.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping

from areal.dataclasses import dataclass, field

Labels = tuple[tuple[str, str], ...]
_SAMPLE = re.compile(r"(?P<name>[a-zA-Z_:][\w:]*)(?:\{(?P<labels>.*)\})?\s+(?P<value>\S+)(?:\s+-?\d+)?\s*$")
_LABEL = re.compile(r'([a-zA-Z_]\w*)="((?:[^"\\]|\\.)*)",?')
_ESCAPED = {"\\\\": "\\", '\\"': '"', "\\n": "\n"}


@dataclass(frozen=True)
class Page:
    """The metrics of one process at one time: ``samples`` by metric name and sorted labels."""

    samples: Mapping[str, Mapping[Labels, float]] = field(default_factory=dict)

    def total(self, name: str, matches: Callable[[Mapping[str, str]], bool] = lambda labels: True) -> float | None:
        """Return the sum of the series of ``name`` whose labels match; None if there are none."""
        found = [value for labels, value in self.samples.get(name, {}).items() if matches(dict(labels))]
        return math.fsum(found) if found else None


def parse(text: str) -> Page:
    """Parse a page. Malformed lines are skipped, because the page may come from any version of another process."""
    samples: dict[str, dict[Labels, float]] = {}
    for line in text.splitlines():
        match = _SAMPLE.match(line)
        if match is None:
            continue
        labels = tuple(sorted(_labels(match["labels"] or "")))
        try:
            samples.setdefault(match["name"], {})[labels] = float(match["value"])
        except ValueError:
            continue
    return Page(samples)


def _labels(text: str) -> Iterator[tuple[str, str]]:
    for name, value in _LABEL.findall(text):
        yield name, re.sub(r"\\.", lambda match: _ESCAPED.get(match[0], match[0]), value)


def increase(
    before: Page, after: Page, name: str, matches: Callable[[Mapping[str, str]], bool] = lambda _: True
) -> float:
    """Return the summed increase of the counters ``name``. A series that decreased was reset; a new one began at 0."""
    earlier = before.samples.get(name, {})
    return math.fsum(
        _increase_of(earlier.get(labels, 0.0), value)
        for labels, value in after.samples.get(name, {}).items()
        if matches(dict(labels))
    )


def _increase_of(before: float, after: float) -> float:
    return after if after < before else after - before


Buckets = Mapping[float, float]


def buckets(
    before: Page, after: Page, name: str, matches: Callable[[Mapping[str, str]], bool] = lambda _: True
) -> Buckets:
    """Return cumulative counts of observations between two pages by upper bound, of all matching series."""
    earlier = before.samples.get(f"{name}_bucket", {})
    found: dict[float, float] = {}
    for labels, value in after.samples.get(f"{name}_bucket", {}).items():
        named = dict(labels)
        if matches(named):
            bound = float(named["le"])
            found[bound] = found.get(bound, 0.0) + _increase_of(earlier.get(labels, 0.0), value)
    return found


def sum_buckets(parts: Iterable[Buckets]) -> Buckets:
    """Merge the buckets of a histogram of several processes."""
    found: dict[float, float] = {}
    for part in parts:
        for bound, count in part.items():
            found[bound] = found.get(bound, 0.0) + count
    return found


def quantile(cumulative: Buckets, share: float) -> float | None:
    """Return the value that ``share`` of the observations do not exceed, interpolated; None without observations."""
    bounds = sorted(cumulative)
    if not bounds or cumulative[bounds[-1]] <= 0:
        return None
    rank = share * cumulative[bounds[-1]]
    at = next(place for place, bound in enumerate(bounds) if cumulative[bound] >= rank)
    upper = bounds[at]
    lower, below = (bounds[at - 1], cumulative[bounds[at - 1]]) if at else (min(0.0, upper), 0.0)
    if math.isinf(upper):
        return lower if at else None
    inside = cumulative[upper] - below
    return upper if inside <= 0 else min(upper, lower + (upper - lower) * (rank - below) / inside)  # rounding
