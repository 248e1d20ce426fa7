"""``/job/NAME``: a job's curves, what its steps waited for, and its alerts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path

from areal.reconcilers.alerts import gather
from areal.reconcilers.home_view import HomeView
from areal.state.job_curves import JobCurves, Points
from areal.state.job_metrics import bottleneck, eta_s, newest_step
from areal.ui.context import ViewContext
from areal.ui.curves import MAIN, WAITS, group_of
from areal.ui.jobs import job_of, numbers_of, read_mark
from areal.ui.views import Marks, home
from areal.ui.views.evaluations import count_of

_POINTS = 600  # buckets of a curve, each with its lowest and highest value
_MAIN = {
    *MAIN,
    *WAITS,
    "reward/min",
    "reward/max",
    "critic/loss",
    "eval/loss",
    "eval/accuracy",
    "critic/grad_norm",
    "mismatch_kl",
}
_MAIN |= {"length/max", "staleness/mean"}
_NO_CURVES = ("attempt", "time", "total_steps", "epoch", "version")


def read(view: ViewContext) -> dict[str, object]:
    """``points``: at most so many buckets; ``first`` and ``last``: only these steps; ``metrics``: only these,
    by comma; ``all=1``: all metrics  [default: those that a run is judged by]."""
    name = view.name()
    job = job_of(view.home, name)
    seen = HomeView(view.home)
    status = seen.job_status(job)
    path = view.home.job_metrics(name)
    curves, share = numbers_of(path)
    chosen = chosen_metrics(view, curves.columns)
    last = view.number("last", 1 << 53)
    reduced = curves.reduced(
        chosen, view.number("points", _POINTS, least=1, most=4000), first=view.number("first", 0), last=last
    )
    newest = newest_step(path)
    running = str(status.phase) == "Running"
    alerts = list(gather(view.home, [job], {name: status}, {name: curves}, with_replicas=False))
    return {
        "name": name,
        "phase": str(status.phase),
        "message": seen.statuses([job])[str(job.ref)].message,
        "attempt": status.attempt or None,
        "step": newest.get("step"),
        "totalSteps": newest.get("total_steps"),
        "etaSeconds": eta_s(newest) if running else None,
        "reward": newest.get("reward/mean"),
        "bottleneck": bottleneck(newest),
        "writtenAt": newest.get("time"),
        "folder": str(view.home.jobs / name),
        "alerts": [alert.document() for alert in alerts],
        "steps": len(curves),
        "firstStep": curves.steps[0] if len(curves) else None,
        "lastStep": curves.steps[-1] if len(curves) else None,
        "shareRead": share,
        "bucket": reduced.size,
        "starts": reduced.starts,
        "series": {metric: series_of(points) for metric, points in reduced.curves.items() if metric not in _NO_CURVES},
        "groups": grouped_names(reduced.curves),
        "waits": [{"metric": metric, "title": title} for metric, title in WAITS.items() if metric in reduced.curves],
        "notFinite": dict(curves.not_finite),
        "evaluations": count_of(view, name),
        "hasSamples": (view.home.jobs / name / "trajectories").is_dir(),
        "validatedStep": _validated_step(curves, view.home.jobs / name / "trajectories"),
    }


def _validated_step(curves: JobCurves, folder: Path) -> int | None:
    """Return the newest step after which the job made an evaluation of its own whose samples are recorded."""
    scores = curves.columns.get("eval/reward/mean", ())
    row = next((row for row in reversed(range(len(scores))) if not math.isnan(scores[row])), None)
    step = curves.steps[row] if row is not None else None
    return step if step is not None and (folder / f"trajectories-eval-{step:06d}.jsonl").is_file() else None


def chosen_metrics(view: ViewContext, known: Iterable[str]) -> list[str]:
    if named := list(filter(None, view.query.get("metrics", "").split(","))):
        return named
    main = sorted(_MAIN.intersection(known))
    return sorted(known) if view.query.get("all") == "1" or not main else main


def series_of(points: Points) -> dict[str, object]:
    return {"mean": points.mean, "low": points.low or None, "high": points.high or None}


def grouped_names(curves: Mapping[str, Points]) -> list[dict[str, object]]:
    """Return the metrics that are drawn together, in the order of the terminal's."""
    found: dict[tuple[int, str], list[str]] = {}
    for metric in sorted(curves):
        if metric not in _NO_CURVES:
            found.setdefault(group_of(metric), []).append(metric)
    return [{"title": title, "metrics": metrics} for (_, title), metrics in sorted(found.items())]


def marks(view: ViewContext) -> Marks:
    return {"metrics": read_mark(view.home.job_metrics(view.name())), "objects": home.marks(view)["files"]}
