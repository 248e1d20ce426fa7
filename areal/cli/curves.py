"""A job's curves: one line of the terminal each, or a picture."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from areal.errors import ArealError
from areal.installation import install_command

WIDTH = 60
_BARS = "▁▂▃▄▅▆▇█"
_FIRST = ("reward/mean", "accuracy", "loss")
_DOTTED = 30  # points of a curve, below which each is seen
_NO_CURVES = ("step", "attempt", "time", "total_steps")
MAIN = (
    "reward/mean",
    "eval/reward/mean",
    "accuracy",
    "loss",
    "grad_norm",
    "approx_kl",
    "ref_kl",
    "entropy",
    "length/mean",
    "length/truncated",
    "staleness/max",
    "tokens_per_second",
    "time/step",
)
"""What tells how a run goes; of an algorithm's own numbers it writes about ten."""

Curve = list[tuple[int, float]]


def curves_of(steps: Sequence[Mapping[str, Any]], wanted: Sequence[str] = ()) -> dict[str, Curve]:
    """By name: (step, value) of every number, in order of steps; without ``wanted`` all of them."""
    found: dict[str, Curve] = {}
    for step in steps:
        for name, value in step.items():
            is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
            if name not in _NO_CURVES and is_number and (not wanted or name in wanted):
                found.setdefault(name, []).append((int(step["step"]), float(value)))
    return found


def sparkline(values: Sequence[float], width: int = WIDTH) -> str:
    """The curve in at most ``width`` characters, each the mean of its share of the values."""
    if not values:
        return ""
    count = min(width, len(values))
    shares = [values[len(values) * at // count : len(values) * (at + 1) // count] for at in range(count)]
    means = [sum(share) / len(share) for share in shares]
    low, high = min(means), max(means)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((mean - low) * scale)] for mean in means)


def _place(item: tuple[str, Curve]) -> tuple[int, str]:
    """What a run is for comes first, where its seconds went last."""
    name = item[0]
    first = next((place for place, word in enumerate(_FIRST) if word in name), len(_FIRST))
    return (len(_FIRST) + 1 if name.startswith("time/") else first), name


def plot(curves: Mapping[str, Curve], path: str) -> None:
    """Raises ArealError where there is nothing to draw with."""
    try:
        from matplotlib.figure import Figure  # type: ignore[import-not-found, import-untyped, unused-ignore]
    except ImportError as error:
        raise ArealError(
            "--plot draws with matplotlib, which is not installed", hint=install_command("plot")
        ) from error
    columns = min(3, len(curves))
    rows = -(-len(curves) // columns)
    figure = Figure(figsize=(5 * columns, 3 * rows), layout="tight")
    axes = figure.subplots(rows, columns, squeeze=False)
    for axis, (name, curve) in zip(axes.flat, sorted(curves.items(), key=_place), strict=False):
        axis.plot(*zip(*curve, strict=True), marker="o" if len(curve) < _DOTTED else None)
        axis.grid(alpha=0.3)
        axis.set_title(name)
        axis.set_xlabel("step")
    for axis in list(axes.flat)[len(curves) :]:
        axis.set_visible(False)
    try:
        figure.savefig(Path(path))
    except (OSError, ValueError) as error:
        raise ArealError(f"cannot draw into {path}: {error}") from error
