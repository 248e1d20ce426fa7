"""``/compare?jobs=a,b,c``: curves of several jobs over each other, and where their configurations differ."""

from __future__ import annotations

from areal.errors import ArealError, UsageFault
from areal.reconcilers.home_view import HomeView
from areal.resources.kinds import TRAIN_JOB, check_name
from areal.state.job_curves import Points
from areal.ui.context import ViewContext
from areal.ui.jobs import compared_keys, config_of, job_of, numbers_of, read_mark
from areal.ui.views import Marks
from areal.ui.views.job import chosen_metrics, grouped_names, series_of

_MOST_JOBS = 8
_POINTS = 400
_ABSENT = object()


def read(view: ViewContext) -> dict[str, object]:
    known = sorted(job.name for job in HomeView(view.home).of_kind(TRAIN_JOB))
    names = _names(view)
    jobs: list[dict[str, object]] = []
    together: dict[str, Points] = {}
    for name in names:
        job_of(view.home, name)
        curves, share = numbers_of(view.home.job_metrics(name))
        reduced = curves.reduced(chosen_metrics(view, curves.columns), _POINTS)
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


def marks(view: ViewContext) -> Marks:
    return {name: read_mark(view.home.job_metrics(name)) for name in _names(view)}
