"""``areal train metrics``: draws the metrics of jobs in groups, in the terminal or in an image file.

The metrics of a group have the same unit and share a scale. All curves share an axis of steps, so that runs of
different lengths can be compared step by step.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import click

from areal.cli.objects import complete_names, stored
from areal.cli.options import Invocation
from areal.cli.output import Column, clear, emit_rows, field, render_table, show, text_of
from areal.cli.remote import local_options
from areal.dataclasses import dataclass
from areal.errors import ArealError, NotFound
from areal.installation import install_command
from areal.reconcilers.home_view import HomeView
from areal.resources.kinds import TRAIN_JOB, Ref, check_name
from areal.state.files import explain
from areal.state.job_curves import JobCurves, read_curves
from areal.terminal import fancy, pause
from areal.ui.curves import MAIN, drawn_range, group_of

WIDTH = 60
_BARS = "▁▂▃▄▅▆▇█"
_MARGIN = 0.06  # of the height
_DOTTED = 30  # a curve with fewer points gets a marker at each point
_NO_CURVES = ("step", "attempt", "time", "total_steps")
Curve = list[tuple[int, float]]
Span = tuple[int, int]


@dataclass(frozen=True)
class Series:
    """One metric of one job. ``curve`` is ordered by step and never empty."""

    metric: str
    job: str
    curve: Curve


@dataclass(frozen=True)
class CurveGroup:
    title: str
    series: tuple[Series, ...]

    @property
    def scale(self) -> tuple[float, float]:
        """The range that the curves are drawn in: without a few outliers."""
        return drawn_range(value for each in self.series for _, value in each.curve)


def curves_of(steps: JobCurves, wanted: Sequence[str] = ()) -> dict[str, Curve]:
    """Return the curve, (step, value) ordered by step, of each metric in ``wanted``, or of all if it is empty."""
    names = [name for name in steps.columns if name not in _NO_CURVES and (not wanted or name in wanted)]
    return {name: curve for name in names if (curve := steps.curve(name))}


def grouped(runs: Mapping[str, Mapping[str, Curve]]) -> list[CurveGroup]:
    """Group curves. ``runs``: job -> metric -> curve. The curves of one metric are adjacent for all jobs."""
    found: dict[tuple[int, str], list[Series]] = {}
    metrics = sorted({metric for curves in runs.values() for metric in curves})
    for metric in metrics:
        series = [Series(metric, job, curves[metric]) for job, curves in runs.items() if metric in curves]
        found.setdefault(group_of(metric), []).extend(series)
    return [CurveGroup(title, tuple(found[place, title])) for place, title in sorted(found)]


def span_of(groups: Iterable[CurveGroup]) -> Span:
    steps = [step for group in groups for each in group.series for step, _ in each.curve]
    return min(steps), max(steps)


def sparkline(curve: Curve, span: Span, scale: tuple[float, float], width: int = WIDTH) -> str:
    """Draws ``curve`` over the steps of ``span`` in at most ``width`` characters. Each character is the mean of the
    values in its range of steps, or a space if there are none. Values outside of ``scale`` are at its border."""
    first, steps = span[0], span[1] - span[0] + 1
    count = max(1, min(width, steps))
    shares: dict[int, list[float]] = {}
    for step, value in curve:
        shares.setdefault((step - first) * count // steps, []).append(value)
    half = (scale[1] / 2 - scale[0] / 2) or 1.0  # halved, since the difference of finite floats can overflow
    means = {place: sum(value / len(share) for value in share) for place, share in shares.items()}
    top = len(_BARS) - 1
    levels = {place: min(top, max(0, round((mean / 2 - scale[0] / 2) / half * top))) for place, mean in means.items()}
    return "".join(_BARS[levels[place]] if place in levels else " " for place in range(count)).rstrip()


def draw(groups: Sequence[CurveGroup], path: str) -> None:
    """Write an image with a diagram for each group. Colors distinguish jobs and line styles metrics; for a single job,
    colors distinguish metrics. Raises ArealError without matplotlib, or if the file cannot be written."""
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
            names = (each.metric if len(metrics) > 1 or len(jobs) == 1 else "", each.job if len(jobs) > 1 else "")
            axis.plot(
                *zip(*each.curve, strict=True),
                marker="o" if len(each.curve) < _DOTTED else None,
                markersize=3,
                color=f"C{(job if len(jobs) > 1 else number) % 10}",
                linestyle=("-", "--", ":", "-.")[number % 4] if len(jobs) > 1 else "-",
                label=" ".join(filter(None, names)),
            )
        axis.grid(alpha=0.3)
        low, high = group.scale
        if low < high:
            axis.set_ylim(low - _MARGIN * (high - low), high + _MARGIN * (high - low))
        axis.set_title(group.title if len(metrics) > 1 else metrics[0])
        axis.set_xlabel("step")
        axis.tick_params(labelbottom=True)
        if len(group.series) > 1:
            axis.legend(fontsize="small")
    figure.suptitle(", ".join(jobs))
    for axis in list(axes.flat)[len(groups) :]:
        axis.set_visible(False)
    try:
        figure.savefig(Path(path))
    except (OSError, ValueError) as error:
        raise ArealError(f"cannot draw into {path}: {error}") from error


_WATCH_S = 2.0
_NARROWEST = 10  # characters of a curve


@click.command()
@click.argument("names", nargs=-1, required=True, metavar="NAME...", shell_complete=complete_names(TRAIN_JOB))
@click.option("--plot", metavar="FILE.png", help="Also draw the curves into a file.")
@click.option("--metric", "metrics", multiple=True, metavar="NAME", help="Only these; may be repeated.")
@click.option("--all", "all_", is_flag=True, help="All metrics  [default: the ten most important].")
@click.option("-w", "--watch", is_flag=True, help="Refresh until Ctrl-C.")
@local_options
def metrics(
    cli: Invocation, /, names: tuple[str, ...], plot: str | None, metrics: tuple[str, ...], all_: bool, watch: bool
) -> int:
    """Draw curves of jobs in the terminal, related metrics on one scale. Several jobs are compared.

    \b
    areal train metrics NAME --all
    areal train metrics NAME OTHER --metric reward/mean --plot both.png

    NAME with a / is the folder of a run that was started by hand, or its file.
    """
    is_announced = False
    while True:
        read = {name: read_metrics(metrics_file(cli, name)) for name in dict.fromkeys(names)}
        runs = {name: curves_of(steps, metrics) for name, steps in read.items()}
        if watch and not any(runs.values()) and (waits := [name for name in runs if not _has_ended(cli, name)]):
            if not is_announced:
                cli.info(f"waiting for the first metrics of {', '.join(waits)}")
            is_announced = True
            pause(_WATCH_S)
            continue
        broken = [
            f"{name}: {metric} is NaN or infinite, first at step {step}; such steps are not drawn"
            for name, steps in read.items()
            for metric, step in sorted(steps.not_finite.items())
            if not metrics or metric in metrics
        ]
        if not any(runs.values()) and broken:
            raise NotFound("\n".join(broken))
        _require(cli, runs, metrics)
        if cli.format.is_table and not (all_ or metrics):
            runs = _main(cli, runs)
        groups = grouped(runs)
        if plot:
            draw(groups, plot)
        if watch and fancy(sys.stdout):
            clear()
        _emit_curves(cli, groups, several=len(runs) > 1)
        for each in broken:
            cli.info(each)
        if not watch:
            return 0
        sys.stdout.flush()
        pause(_WATCH_S)


def read_metrics(path: Path) -> JobCurves:
    """Return the metrics of a job; empty if there is no file. Raises ArealError if the file cannot be read."""
    try:
        return read_curves(path)
    except OSError as error:
        raise explain(error, path, "read the metrics in") from error


def metrics_file(cli: Invocation, name: str) -> Path:
    """Return the metrics file of a job, of the folder of a run, or the file itself. Raises NotFound."""
    if "/" in name:
        path = Path(name).expanduser()
        path = path if path.suffix == ".jsonl" else path / "metrics.jsonl"
        if not path.is_file():
            raise NotFound(f"there is no {path}")
        return path
    try:
        stored(cli.home, Ref(TRAIN_JOB, check_name(name)))
    except NotFound as error:
        if (kept := cli.home.job_metrics(name)).is_file():
            raise NotFound(error.message, hint=f"its metrics are kept in {kept.parent}") from error
        raise
    return cli.home.job_metrics(name)


def _has_ended(cli: Invocation, name: str) -> bool:
    """Return whether a job has ended and writes no more metrics. For the folder of a run by hand this is unknown."""
    return "/" not in name and HomeView(cli.home).job_status(stored(cli.home, Ref(TRAIN_JOB, name))).finished


def _require(cli: Invocation, runs: Mapping[str, Mapping[str, Curve]], wanted: Sequence[str]) -> None:
    """Raise NotFound for a metric that no job has, and if no job has any metric."""
    known = {metric for curves in runs.values() for metric in curves}
    first = next(iter(runs))
    if missing := [metric for metric in wanted if metric not in known]:
        hint = f"areal train metrics {first} --all lists them"
        raise NotFound(
            f"{' and '.join(runs)} {'have' if len(runs) > 1 else 'has'} no metric {', '.join(missing)}", hint=hint
        )
    empty = [name for name, curves in runs.items() if not curves]
    if len(empty) == len(runs):
        raise NotFound(f"{', '.join(empty)} has written no metrics yet", hint=f"areal train status {first}")
    if empty:
        cli.info(f"no such metrics yet: {', '.join(empty)}")


def _main(cli: Invocation, runs: Mapping[str, Mapping[str, Curve]]) -> dict[str, dict[str, Curve]]:
    """Return the metrics of ``MAIN``, or all metrics if the jobs write none of them."""
    chosen = {job: {name: curves[name] for name in MAIN if name in curves} for job, curves in runs.items()}
    known, shown = ({metric for curves in every.values() for metric in curves} for every in (runs, chosen))
    if not shown:
        return {job: dict(curves) for job, curves in runs.items()}
    if hidden := len(known - shown):
        cli.info(f"{hidden} more: --all")
    return chosen


def _emit_curves(cli: Invocation, groups: Sequence[CurveGroup], *, several: bool) -> None:
    """Print a table with group titles between its rows. On a terminal, curves take the width that is left."""
    rows = [
        {
            "group": group.title,
            "metric": each.metric,
            "job": each.job,
            "steps": [step for step, _ in each.curve],
            "values": [value for _, value in each.curve],
        }
        for group in groups
        for each in group.series
    ]
    if not cli.format.is_table:
        emit_rows(cli, rows, (), name=lambda row: str(row["metric"]))
        return
    columns = [
        Column("METRIC", lambda row: row["metric"]),
        *([field("JOB", "job")] if several else []),
        Column("STEP", lambda row: row["steps"][-1], right=True),
        Column("FIRST", lambda row: row["values"][0], right=True),
        Column("LAST", lambda row: row["values"][-1], right=True),
        Column("MIN", lambda row: min(row["values"]), wide=True, right=True),
        Column("MAX", lambda row: max(row["values"]), wide=True, right=True),
    ]
    head, *lines = render_table(rows, columns, wide=cli.format.kind == "wide").split("\n")
    width = max(map(len, (head, *lines))) + 2
    room = shutil.get_terminal_size().columns - width - 2 if sys.stdout.isatty() else WIDTH
    span, found, rest = span_of(groups), [f"  {head:<{width}}CURVE"], iter(lines)
    for group in groups:
        low, high = group.scale
        if len({each.metric for each in group.series}) > 1:
            found.append(f"{group.title}: {text_of(low)} to {text_of(high)}")
        for each in group.series:
            curve = sparkline(each.curve, span, (low, high), max(_NARROWEST, min(WIDTH, room)))
            found.append(f"  {next(rest):<{width}}{curve}")
    show("\n".join(found))
