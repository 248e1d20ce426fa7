"""Differences of means with Student's intervals and p-values: of two samples (Welch), or of pairs. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, variance
from typing import Any

from areal.dataclasses import dataclass

_STEPS = 300  # of the continued fraction, which converges in some ten
_TINY = 1e-300


@dataclass(frozen=True)
class Difference:
    """The mean of ``b`` minus that of ``a``. NaN for bounds and ``p`` that are not known: a side has one value, or no
    value differs. ``method``: ``welch``, ``paired`` or ``none``."""

    value: float
    low: float
    high: float
    p: float
    method: str

    def document(self) -> dict[str, Any]:
        numbers = {"difference": self.value, "low": self.low, "high": self.high, "p": self.p}
        return {name: None if math.isnan(each) else each for name, each in numbers.items()} | {"method": self.method}


def welch(a: Sequence[float], b: Sequence[float], confidence: float) -> Difference:
    """Two samples whose variances may differ (Welch 1947)."""
    value = fmean(b) - fmean(a)
    if min(len(a), len(b)) < 2:
        return Difference(value, math.nan, math.nan, math.nan, "none")
    parts = [variance(each) / len(each) for each in (a, b)]
    error = math.sqrt(sum(parts))
    weights = sum(part**2 / (len(each) - 1) for part, each in zip(parts, (a, b), strict=True))
    return _tested(value, error, sum(parts) ** 2 / weights if weights > 0 else math.inf, confidence, "welch")


def paired(a: Sequence[float], b: Sequence[float], confidence: float) -> Difference:
    """Pairs of values, such as two runs with one seed."""
    changes = [after - before for before, after in zip(a, b, strict=True)]
    if len(changes) < 2:
        return Difference(fmean(changes), math.nan, math.nan, math.nan, "none")
    error = math.sqrt(variance(changes) / len(changes))
    return _tested(fmean(changes), error, len(changes) - 1, confidence, "paired")


def _tested(value: float, error: float, freedom: float, confidence: float, method: str) -> Difference:
    if not error > 0 or not math.isfinite(freedom):
        return Difference(value, math.nan, math.nan, math.nan, method)
    margin = student_quantile(0.5 + confidence / 2, freedom) * error
    return Difference(value, value - margin, value + margin, student_tails(value / error, freedom), method)


def student_tails(t: float, freedom: float) -> float:
    """The probability of a value of Student's t at least as far from 0 as ``t``, on either side."""
    return _beta_share(freedom / (freedom + t * t), freedom / 2, 0.5)


def student_quantile(probability: float, freedom: float) -> float:
    """The quantile of Student's t, from 0.5 on."""
    tails = 2 * (1 - probability)
    low, high = 0.0, 1.0
    while student_tails(high, freedom) > tails and high < 1e12:
        low, high = high, 2 * high
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if student_tails(middle, freedom) > tails else (low, middle)
    return (low + high) / 2


def _beta_share(x: float, a: float, b: float) -> float:
    """The regularized incomplete beta function, by its continued fraction (DLMF 8.17.22)."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):
        return 1 - _beta_share(1 - x, b, a)
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x))
    fraction, c, d = 1.0, 1.0, 0.0
    for step in range(_STEPS):
        m = step // 2
        if step == 0:
            term = 1.0
        elif step % 2 == 0:
            term = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        else:
            term = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        d = 1 / (1 + term * d or _TINY)
        c = 1 + term / c or _TINY
        fraction *= c * d
        if abs(1 - c * d) < 1e-14:
            break
    return front * (fraction - 1) / a
