"""``/job/NAME``: a job's curves, what its steps waited for, and its alerts. Beside it are ``/compare``, with curves of
several jobs over each other, the alerts of all jobs, and ``/job/NAME/step/S``, with the samples of a step."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from pathlib import Path

from areal.errors import ArealError, NotFound, UsageFault
from areal.files import stamp
from areal.reconcilers.alerts import gather
from areal.reconcilers.home_view import HomeView
from areal.resources.kinds import TRAIN_JOB, check_name
from areal.state.job_curves import JobCurves, Points
from areal.state.job_metrics import bottleneck, eta_s, newest_step
from areal.state.records import StoredObject
from areal.trajectories.steps import StepFile, StepSummary, read_failures, read_step, step_file, step_files
from areal.ui.curves import MAIN, WAITS, group_of
from areal.ui.jobs import FileMemo, compared_keys, config_of, decoder_of, job_of, numbers_of, read_mark
from areal.ui.samples import group_row, side_by_side
from areal.ui.views import Marks, ViewContext, ViewReader, home, period
from areal.ui.views.evaluations import count_of

_POINTS = 600  # buckets of a curve, each with its lowest and highest value
_MAIN = {*MAIN, *WAITS, "reward/min", "reward/max", "critic/loss", "critic/grad_norm"}
_MAIN |= {"mismatch_kl", "length/max", "staleness/mean"}
_COMPARED_POINTS = 400
_MOST_JOBS = 8
_ABSENT = object()
_JUDGED = ("Running", "Failed", "Lost")
_AGAIN_S = 30  # stalls and replicas change without a file
_NO_CURVES = ("attempt", "time", "total_steps", "epoch", "version")
_FAILURES = 200

_listings: FileMemo[list[StepFile]] = FileMemo(step_files, 2)  # by the folder's time of change
_steps: FileMemo[dict[str, StepSummary]] = FileMemo(lambda path: {}, 4)  # the summary is made with the job's decoder


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
    """Return the newest step after which the job evaluated and recorded the samples."""
    scores = curves.columns.get("eval/reward/mean", ())
    row = next((row for row in reversed(range(len(scores))) if not math.isnan(scores[row])), None)
    number = curves.steps[row] if row is not None else None
    return number if number is not None and (folder / step_file(number, is_eval=True)).is_file() else None


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
    return {"objects": home.marks(view)["files"], "clock": period(_AGAIN_S)}


def step(view: ViewContext) -> dict[str, object]:
    """``/job/NAME/step/S``: the samples of a step by group; those of one group side by side; one sample.
    ``step``: a number; without it the newest. ``eval=1``: the evaluation after it. ``group`` and ``sample``: one."""
    name = view.name()
    job = job_of(view.home, name)
    folder = view.home.jobs / name / "trajectories"
    files = _listings.get(folder)
    if not files:
        raise NotFound(
            f"trainjob/{name} has written no trajectories",
            hint="rollout.dump_to_file=true has them written; the steps of a run without it have curves only",
        )
    wanted = StepFile(view.number("step", files[-1].step), view.query.get("eval") == "1", "")
    place = bisect_left(files, wanted)
    if place == len(files) or files[place][:2] != wanted[:2]:
        near = ", ".join(sorted({str(each.step) for each in files[max(0, place - 1) : place + 1]}))
        raise NotFound(f"step {wanted.step} of trainjob/{name} has no samples", hint=f"the nearest that has: {near}")
    path = folder / files[place].name
    summary = _summary(view, job, path)
    document: dict[str, object] = {
        "name": name,
        "step": wanted.step,
        "isEval": wanted.is_eval,
        "firstStep": files[0].step,
        "lastStep": files[-1].step,
        "count": sum(not each.is_eval for each in files),
        "evaluations": sum(each.is_eval for each in files),
        "previous": _address(files, place - 1),
        "next": _address(files, place + 1),
        "decoded": decoder_of(view.home, job) is not None,
        "damaged": list(summary.damaged),
        "damagedLines": summary.damaged_lines,
        "path": str(path),
    }
    if view.query.get("group"):
        return document | _group(view, job, path, summary)
    numbers = numbers_of(view.home.job_metrics(name)).curves
    now = numbers.at(wanted.step) or {}
    before = numbers.at(wanted.step - 1) or {}
    failures, is_cut = read_failures(
        folder, before.get("time", now.get("time", 0.0) - 1e9), now.get("time", float("inf"))
    )
    return document | {
        "groups": [group_row(group) for group in summary.groups],
        "metrics": now,
        "waits": [
            {"metric": each, "title": title, "seconds": now[each]} for each, title in WAITS.items() if each in now
        ],
        "failures": [each._asdict() for each in failures[:_FAILURES]],
        "failuresLeftOut": max(0, len(failures) - _FAILURES),
        "failuresCut": is_cut,
    }


def _summary(view: ViewContext, job: StoredObject, path: Path) -> StepSummary:
    known = _steps.get(path)
    decoder = decoder_of(view.home, job)
    key = decoder.source if decoder is not None else ""
    if key not in known:
        known[key] = read_step(path, decoder)
    return known[key]


def _address(files: list[StepFile], place: int) -> dict[str, object] | None:
    return {"step": files[place].step, "isEval": files[place].is_eval} if 0 <= place < len(files) else None


def _group(view: ViewContext, job: StoredObject, path: Path, summary: StepSummary) -> dict[str, object]:
    name = view.need("group")
    places = {group.name: place for place, group in enumerate(summary.groups)}
    if name not in places:
        raise NotFound(f"step {view.query.get('step')} has no group {name[:200]}", hint="esc goes to the step's groups")
    place = places[name]
    group = summary.groups[place]
    chosen = list(group.samples)
    if view.query.get("sample"):
        number = view.number("sample", 0, least=-1)
        chosen = [each for each in chosen if each.sample == number]
        if not chosen:
            raise NotFound(f"group {name[:200]} has no sample {number}", hint="esc goes to the group")
    return {
        "group": group_row(group),
        **side_by_side(path, chosen, decoder_of(view.home, job)),
        "previousGroup": summary.groups[place - 1].name if place else None,
        "nextGroup": summary.groups[place + 1].name if place + 1 < len(summary.groups) else None,
    }


def step_marks(view: ViewContext) -> Marks:
    name = view.name()
    reading = read_mark(view.home.job_metrics(name)).partition(" ")[2]  # until its end, numbers of the step may miss
    return {"folder": f"{stamp(view.home.jobs / name / 'trajectories')}", "numbers": reading}


BESIDE = {
    "alerts": ViewReader(alerts, alert_marks),
    "compare": ViewReader(compared, compared_marks),
    "step": ViewReader(step, step_marks),
}
