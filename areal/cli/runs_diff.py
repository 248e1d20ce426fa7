"""``areal train diff``: two jobs, or several runs of each: configuration, metrics at equal steps, significance."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

import click

from areal.cli.curves import Curve, curves_of, metrics_file, read_metrics, sparkline
from areal.cli.objects import complete_names
from areal.cli.options import Invocation, confidence_option
from areal.cli.output import Column, emit_one, field, render_table, text_of
from areal.cli.remote import local_options
from areal.dataclasses import dataclass
from areal.errors import NotFound, UsageFault
from areal.numbers import number
from areal.resources.kinds import TRAIN_JOB
from areal.ui.curves import MAIN, drawn_range

if TYPE_CHECKING:
    from areal.rollout.evaluation import Difference

_SHARE = 10  # of the steps that are averaged, by default the last tenth
_WIDTH = 30
_LONGEST = 44  # characters of a value in the table of keys


@dataclass(frozen=True)
class _JobRun:
    name: str
    curves: Mapping[str, Curve]
    config: Mapping[str, Any]
    not_finite: Mapping[str, int]  # metric -> the first step at which it is NaN or infinite

    @property
    def seed(self) -> Any:
        return self.config.get("seed")


@click.command("diff")
@click.argument("a", metavar="A[,A2...]", shell_complete=complete_names(TRAIN_JOB))
@click.argument("b", metavar="B[,B2...]", shell_complete=complete_names(TRAIN_JOB))
@click.option("--metric", "metrics", multiple=True, metavar="NAME", help="Only these; may be repeated.")
@click.option("--all", "all_", is_flag=True, help="All metrics  [default: the ten most important].")
@click.option(
    "--last",
    type=click.IntRange(min=1),
    metavar="N",
    help="Average the last N equal steps  [default: a tenth of them].",
)
@click.option("--unpaired", is_flag=True, help="Do not pair runs that have one seed.")
@confidence_option("Of intervals.")
@local_options
def diff(
    cli: Invocation,
    /,
    a: str,
    b: str,
    metrics: tuple[str, ...],
    all_: bool,
    last: int | None,
    unpaired: bool,
    confidence: float,
) -> int:
    """Compare jobs: keys of their configurations that differ, and their metrics at equal steps.

    \b
    areal train diff base long-answers
    areal train diff base-1,base-2,base-3 new-1,new-2,new-3 --metric eval/reward/mean

    Several runs of a side are names with commas, such as one for each seed. Then each difference has an interval and a
    p-value over runs: paired by seed where both sides have the same seeds, else Welch's; P (HOLM) is corrected for the
    number of metrics. A name with a / is the folder of a run, or its file of metrics.
    """
    metrics = tuple(dict.fromkeys(metrics))
    sides = [[_run(cli, name) for name in _names(side)] for side in (a, b)]
    runs = {run.name: run for side in sides for run in side}
    known = set.intersection(*(set(run.curves) for run in runs.values()))
    if missing := [metric for metric in metrics if metric not in known]:
        raise NotFound(f"not every run has the metric {', '.join(missing)}", hint=f"areal train metrics {a} --all")
    chosen = list(dict.fromkeys(metrics)) or (
        sorted(known) if all_ else [name for name in MAIN if name in known] or sorted(known)
    )
    shown = set() if metrics else {name for run in runs.values() for name in run.curves if all_ or name in MAIN}
    without_config = [run.name for run in runs.values() if not run.config]
    found = (_row(sides, name, last, confidence, unpaired=unpaired) for name in chosen)
    rows = _corrected([row for row in found if row is not None])
    document: dict[str, object] = {
        "a": [run.name for run in sides[0]],
        "b": [run.name for run in sides[1]],
        "method": _method(sides, unpaired=unpaired),
        "confidence": confidence,
        "config": [] if without_config else _keys(sides),
        "without_config": without_config,
        "metrics": rows,
        "not_finite": [
            {"run": run.name, "metric": metric, "step": step}
            for run in runs.values()
            for metric, step in sorted(run.not_finite.items())
            if metric in chosen or metric not in run.curves
        ],
        "not_everywhere": [
            {"metric": name, "without": without}
            for name in sorted(shown - known)
            if (without := [run.name for run in runs.values() if name not in {*run.curves, *run.not_finite}])
        ],
    }
    if not document["metrics"] and not document["config"]:
        cli.info("no step has a metric of every run")
    emit_one(cli, document, name=f"{a} {b}", text=lambda: _page(document))
    return 0


def _names(side: str) -> list[str]:
    names = [name for name in side.split(",") if name]
    if not names or len(set(names)) < len(names):
        raise UsageFault(f"{side!r}: expected a run, or several different runs separated by commas")
    return names


def _run(cli: Invocation, name: str) -> _JobRun:
    from areal.ui.jobs import config_of

    path = metrics_file(cli, name)
    steps = read_metrics(path)
    curves = curves_of(steps)
    if not curves and not steps.not_finite:
        raise NotFound(f"{name} has written no metrics yet", hint=f"areal train status {name}")
    return _JobRun(name, curves, config_of(path.parent), steps.not_finite)


def _method(sides: Sequence[Sequence[_JobRun]], *, unpaired: bool) -> str:
    """Return ``paired`` by seed, ``welch``, or ``none`` if a side has one run."""
    seeds = [[run.seed for run in side] for side in sides]
    alike = [sorted(map(str, each)) for each in seeds]
    distinct = all(None not in each and len(set(map(str, each))) == len(each) for each in seeds)
    if not unpaired and distinct and alike[0] == alike[1] and len(seeds[0]) > 1:
        return "paired"
    return "welch" if min(map(len, sides)) > 1 else "none"


def _keys(sides: Sequence[Sequence[_JobRun]]) -> list[dict[str, Any]]:
    """Return the keys that differ between the sides, except names. The value of a side is a list if its runs differ."""
    from areal.ui.jobs import compared_keys

    runs = [[compared_keys(run.config) for run in side] for side in sides]
    rows = []
    for key in sorted({key for side in runs for each in side for key in each}):
        values = [_distinct([each.get(key) for each in side]) for side in runs]
        if values[0] != values[1]:
            a, b = (each[0] if len(each) == 1 else each for each in values)
            rows.append({"key": key, "a": a, "b": b})
    return rows


def _distinct(values: Sequence[Any]) -> list[Any]:
    found: list[Any] = []
    for value in values:
        if value not in found:
            found.append(value)
    return sorted(found, key=str)


def _row(
    sides: Sequence[Sequence[_JobRun]], metric: str, last: int | None, confidence: float, *, unpaired: bool
) -> dict[str, object] | None:
    """Return a metric over the steps at which every run has it; None if there are none."""
    curves = [[dict(run.curves[metric]) for run in side] for side in sides]
    steps = sorted(set.intersection(*(set(each) for side in curves for each in side)))
    steps = [step for step in steps if all(math.isfinite(each[step]) for side in curves for each in side)]
    if not steps:
        return None
    averaged = steps[-(last or max(1, len(steps) // _SHARE)) :]
    values = [[fmean(each[step] for step in averaged) for each in side] for side in curves]
    found = _difference(sides, values, confidence, unpaired=unpaired)
    return {
        "metric": metric,
        "from_step": averaged[0],
        "to_step": averaged[-1],
        "steps": steps,
        "a": fmean(values[0]),
        "b": fmean(values[1]),
        "runs": {"a": values[0], "b": values[1]},
        **found.document(),
        "differences": [
            fmean(each[step] for each in curves[1]) - fmean(each[step] for each in curves[0]) for step in steps
        ],
    }


def _corrected(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Add ``p_holm``: the p-values, corrected for the number of metrics."""
    from areal.rollout.evaluation import holm

    corrected = holm([math.nan if row["p"] is None else row["p"] for row in rows])
    return [{**row, "p_holm": None if math.isnan(p) else p} for row, p in zip(rows, corrected, strict=True)]


def _difference(
    sides: Sequence[Sequence[_JobRun]], values: Sequence[Sequence[float]], confidence: float, *, unpaired: bool
) -> Difference:
    from areal.rollout.evaluation import paired, welch

    if _method(sides, unpaired=unpaired) != "paired":
        return welch(values[0], values[1], confidence)
    by_seed = {str(run.seed): value for run, value in zip(sides[1], values[1], strict=True)}
    return paired(values[0], [by_seed[str(run.seed)] for run in sides[0]], confidence)


_METHODS = {
    "paired": "over runs paired by seed (Student's t of their differences)",
    "welch": "over runs (Welch's t)",
    "none": "no significance: a side has one run",
}


def _page(document: Mapping[str, Any]) -> str:
    parts = [f"{', '.join(document['a'])} against {', '.join(document['b'])}: {_METHODS[document['method']]}"]
    if document["config"]:
        parts.append(render_table(document["config"], _KEYS))
    elif document["without_config"]:
        parts.append(f"no config.yaml beside the metrics of {', '.join(document['without_config'])}: no keys compared")
    else:
        parts.append("no key of the configurations differs")
    if document["metrics"]:
        rows = [{**row, "curve": _curve(row)} for row in document["metrics"]]
        tested = document["method"] != "none"
        parts.append(render_table(rows, _columns(document["confidence"]) if tested else _UNTESTED))
    else:
        parts.append("no step has a metric of every run")
    for each in document["not_everywhere"]:
        parts.append(f"{each['metric']}: not compared, because it is not recorded by {', '.join(each['without'])}")
    for each in document["not_finite"]:
        note = "is NaN or infinite, first at step"
        parts.append(f"{each['run']}: {each['metric']} {note} {each['step']}; such steps are not compared")
    return "\n\n".join(parts)


def _short(value: Any) -> str | None:
    text = None if value is None else text_of(value)
    return text if text is None or len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def _curve(row: Mapping[str, Any]) -> str:
    """Return B minus A over the common steps."""
    curve = list(zip(row["steps"], row["differences"], strict=True))
    return sparkline(curve, (curve[0][0], curve[-1][0]), drawn_range(row["differences"]), _WIDTH)


_KEYS = (field("KEY", "key"), Column("A", lambda row: _short(row["a"])), Column("B", lambda row: _short(row["b"])))
_UNTESTED = (
    field("METRIC", "metric"),
    Column("STEPS", lambda row: f"{row['from_step']}-{row['to_step']}", right=True),
    field("A", "a", right=True),
    field("B", "b", right=True),
    field("B - A", "difference", right=True),
    Column("B - A OVER ALL EQUAL STEPS", lambda row: row["curve"]),
)


def _columns(confidence: float) -> tuple[Column, ...]:
    def interval(row: Mapping[str, object]) -> str | None:
        return None if row["low"] is None else f"{text_of(row['low'])} to {text_of(row['high'])}"

    return (
        *_UNTESTED[:-1],
        Column(f"{number(confidence)} INTERVAL", interval, right=True),
        field("P", "p", right=True),
        field("P (HOLM)", "p_holm", right=True),
        _UNTESTED[-1],
    )
