"""``/job/NAME``: a job's curves, what its steps waited for, and its alerts. Beside it are ``/compare``, with curves of
several jobs over each other, and the alerts of all jobs."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from areal.errors import ArealError, UsageFault
from areal.reconcilers.alerts import gather
from areal.reconcilers.home_view import HomeView
from areal.resources.kinds import TRAIN_JOB, check_name
from areal.state.job_curves import JobCurves, Points
from areal.state.job_metrics import bottleneck, eta_s, newest_step
from areal.ui.curves import MAIN, WAITS, group_of
from areal.ui.jobs import compared_keys, config_of, job_of, numbers_of, read_mark
from areal.ui.views import Marks, ViewContext, ViewReader, home
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
_COMPARED_POINTS = 400
_MOST_JOBS = 8
_ABSENT = object()
_JUDGED = ("Running", "Failed", "Lost")
_AGAIN_S = 30  # stalls and replicas change without a file
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


def compared(view: ViewContext) -> dict[str, object]:
    """Return the curves of several jobs, ``jobs=a,b,c``, and where their configurations differ."""
    known = sorted(job.name for job in HomeView(view.home).of_kind(TRAIN_JOB))
    names = _names(view)
    jobs: list[dict[str, object]] = []
    together: dict[str, Points] = {}
    for name in names:
        job_of(view.home, name)
        curves, share = numbers_of(view.home.job_metrics(name))
        reduced = curves.reduced(chosen_metrics(view, curves.columns), _COMPARED_POINTS)
        together |= reduced.curves
        jobs.append(
            {
                "name": name,
                "steps": len(curves),
                "shareRead": share,
                "bucket": reduced.size,
                "starts": reduced.starts,
                "series": {metric: series_of(points) for metric, points in reduced.curves.items()},
            }
        )
    differences, unreadable = config_differences(view, names)
    return {
        "known": known,
        "jobs": jobs,
        "groups": grouped_names(together),
        "config": differences,
        "unreadable": unreadable,
    }


def _names(view: ViewContext) -> list[str]:
    names = [check_name(name) for name in dict.fromkeys(filter(None, view.query.get("jobs", "").split(",")))]
    if len(names) > _MOST_JOBS:
        raise UsageFault(f"at most {_MOST_JOBS} jobs are compared, these are {len(names)}")
    return names


def config_differences(view: ViewContext, names: list[str]) -> tuple[list[dict[str, object]], dict[str, str]]:
    """Return the fields whose values are not the same in all jobs; and why a configuration cannot be read, by job."""
    flat: dict[str, dict[str, object]] = {}
    unreadable: dict[str, str] = {}
    for name in names:
        try:
            if found := compared_keys(config_of(view.home.jobs / name)):
                flat[name] = found
            else:
                unreadable[name] = "it has written no config.yaml"
        except ArealError as error:
            unreadable[name] = error.message
    keys = dict.fromkeys(key for each in flat.values() for key in each)
    rows: list[dict[str, object]] = []
    for key in keys:
        values = [each.get(key, _ABSENT) for each in flat.values()]
        if any(repr(value) != repr(values[0]) for value in values):
            rows.append({"field": key, "values": {name: each.get(key) for name, each in flat.items() if key in each}})
    return rows, unreadable


def compared_marks(view: ViewContext) -> Marks:
    return {name: read_mark(view.home.job_metrics(name)) for name in _names(view)}


def alerts(view: ViewContext) -> dict[str, object]:
    """Return the alerts of the bar: of jobs that run, and of those that failed."""
    if view.remote is not None:
        return {"alerts": []}  # they are of jobs, which a gateway does not have
    seen = HomeView(view.home)
    jobs = seen.of_kind(TRAIN_JOB)
    statuses = {job.name: seen.job_status(job) for job in jobs}
    judged = [job for job in jobs if str(statuses[job.name].phase) in _JUDGED]
    steps = {job.name: numbers_of(view.home.job_metrics(job.name)).curves for job in judged}
    found = gather(view.home, judged, statuses, steps)
    return {"alerts": [{**alert.document(), "route": f"/job/{alert.object.partition('/')[2]}"} for alert in found]}


def alert_marks(view: ViewContext) -> Marks:
    if view.remote is not None:
        return {}
    return {"objects": home.marks(view)["files"], "clock": int(time.time() // _AGAIN_S)}


BESIDE = {"alerts": ViewReader(alerts, alert_marks), "compare": ViewReader(compared, compared_marks)}
