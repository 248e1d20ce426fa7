"""Curves of jobs, in groups of numbers that belong together: lines of the terminal, or a picture.

The numbers of a group have one unit, so they share a scale; and all curves share an axis of steps, so that those of
several runs, which may be of different lengths, can be compared point by point.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from areal.errors import ArealError
from areal.installation import install_command

WIDTH = 60
_BARS = "▁▂▃▄▅▆▇█"
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

_GROUPS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("reward", ("reward/*", "eval/reward/*", "rollout/reward", "rollout/reward/*")),
    ("accuracy", ("accuracy", "eval/accuracy")),
    ("loss", ("loss", "eval/loss")),
    ("critic/loss", ("critic/loss",)),
    ("gradient norm", ("grad_norm", "critic/grad_norm")),
    ("KL", ("approx_kl", "ref_kl", "mismatch_kl")),
    ("entropy", ("entropy",)),
    ("importance weight", ("importance_weight", "behave_imp_weight")),
    ("share", ("clip_ratio", "rejected_ratio", "trained_share", "length/truncated")),
    ("tokens", ("length/mean", "length/max", "length/prompt")),
    ("staleness", ("staleness/*",)),
    ("rollouts", tuple(f"rollouts/{name}" for name in ("rejected", "failed", "dropped", "retried"))),
    ("rollouts now", tuple(f"rollouts/{name}" for name in ("running", "pending", "ready"))),
    ("prompts", ("prompts/*",)),
    ("weight update (ms)", ("weights/*ms",)),
)
"""In the order of their importance; those of no group are after them, each alone, and times are the last."""
_TIMES = "time (s)"
_SUMMARIES = ("avg", "min", "max")

Curve = list[tuple[int, float]]
Span = tuple[int, int]


@dataclass(frozen=True)
class Series:
    """One number of one job. ``curve`` is in order of steps, never empty."""

    metric: str
    job: str
    curve: Curve


@dataclass(frozen=True)
class Group:
    title: str
    series: tuple[Series, ...]

    @property
    def scale(self) -> tuple[float, float]:
        values = [value for each in self.series for _, value in each.curve]
        return min(values), max(values)


def curves_of(steps: Sequence[Mapping[str, Any]], wanted: Sequence[str] = ()) -> dict[str, Curve]:
    """By name: (step, value) of every number, in order of steps; without ``wanted`` all of them."""
    found: dict[str, Curve] = {}
    for step in steps:
        for name, value in step.items():
            is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
            if name not in _NO_CURVES and is_number and (not wanted or name in wanted):
                found.setdefault(name, []).append((int(step["step"]), float(value)))
    return found


def grouped(runs: Mapping[str, Mapping[str, Curve]]) -> list[Group]:
    """``runs``: curves by name, by job. A metric's curves of all jobs stand side by side."""
    found: dict[tuple[int, str], list[Series]] = {}
    metrics = sorted({metric for curves in runs.values() for metric in curves})
    for metric in metrics:
        series = [Series(metric, job, curves[metric]) for job, curves in runs.items() if metric in curves]
        found.setdefault(_group_of(metric), []).extend(series)
    return [Group(title, tuple(found[place, title])) for place, title in sorted(found)]


def _group_of(metric: str) -> tuple[int, str]:
    for place, (title, patterns) in enumerate(_GROUPS):
        if any(fnmatchcase(metric, pattern) for pattern in patterns):
            return place, title
    if metric.startswith(("time/", "timeperf/")):
        return len(_GROUPS) + 1, _TIMES
    name, _, summary = metric.rpartition("/")
    return len(_GROUPS), name if name and summary in _SUMMARIES else metric


def span_of(groups: Iterable[Group]) -> Span:
    steps = [step for group in groups for each in group.series for step, _ in each.curve]
    return min(steps), max(steps)


def sparkline(curve: Curve, span: Span, scale: tuple[float, float], width: int = WIDTH) -> str:
    """The curve from the first to the last step of ``span`` in at most ``width`` characters, each the mean of its share
    of the steps; a space where the curve has none."""
    first, steps = span[0], span[1] - span[0] + 1
    count = max(1, min(width, steps))
    shares: dict[int, list[float]] = {}
    for step, value in curve:
        shares.setdefault((step - first) * count // steps, []).append(value)
    half = (scale[1] / 2 - scale[0] / 2) or 1.0  # halves: a difference of finite numbers may be infinite
    means = {place: sum(value / len(share) for value in share) for place, share in shares.items()}
    levels = {place: round((mean / 2 - scale[0] / 2) / half * (len(_BARS) - 1)) for place, mean in means.items()}
    return "".join(_BARS[levels[place]] if place in levels else " " for place in range(count)).rstrip()


def plot(groups: Sequence[Group], path: str) -> None:
    """A picture with a diagram for each group: jobs by colour, and where there are several, numbers by the form of the
    line. Raises ArealError where there is nothing to draw with."""
    try:
        from matplotlib.figure import Figure  # type: ignore[import-not-found, import-untyped, unused-ignore]
    except ImportError as error:
        raise ArealError(
            "--plot draws with matplotlib, which is not installed", hint=install_command("plot")
        ) from error
    columns = min(3, len(groups))
    rows = -(-len(groups) // columns)
    figure = Figure(figsize=(5 * columns, 3 * rows), layout="tight")
    axes = figure.subplots(rows, columns, squeeze=False, sharex=True)
    jobs = list(dict.fromkeys(each.job for group in groups for each in group.series))
    for axis, group in zip(axes.flat, groups, strict=False):
        metrics = list(dict.fromkeys(each.metric for each in group.series))
        for each in group.series:
            number, job = metrics.index(each.metric), jobs.index(each.job)
            axis.plot(
                *zip(*each.curve, strict=True),
                marker="o" if len(each.curve) < _DOTTED else None,
                markersize=3,
                color=f"C{(job if len(jobs) > 1 else number) % 10}",
                linestyle=("-", "--", ":", "-.")[number % 4] if len(jobs) > 1 else "-",
                label=_label(each, several_metrics=len(metrics) > 1, several_jobs=len(jobs) > 1),
            )
        axis.grid(alpha=0.3)
        axis.set_title(group.title if len(metrics) > 1 else metrics[0])
        axis.set_xlabel("step")
        axis.tick_params(labelbottom=True)
        if len(group.series) > 1:
            axis.legend(fontsize="small")
    for axis in list(axes.flat)[len(groups) :]:
        axis.set_visible(False)
    try:
        figure.savefig(Path(path))
    except (OSError, ValueError) as error:
        raise ArealError(f"cannot draw into {path}: {error}") from error


def _label(series: Series, *, several_metrics: bool, several_jobs: bool) -> str:
    words = [series.metric] if several_metrics or not several_jobs else []
    return " ".join([*words, *([series.job] if several_jobs else [])])
