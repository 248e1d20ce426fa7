"""The alerts of the bar: of jobs that run, and of those that failed."""

from __future__ import annotations

import time

from areal.reconcilers.alerts import gather
from areal.reconcilers.home_view import HomeView
from areal.resources.kinds import TRAIN_JOB
from areal.ui.context import ViewContext
from areal.ui.jobs import numbers_of
from areal.ui.views import Marks, home

_JUDGED = ("Running", "Failed", "Lost")
_AGAIN_S = 30  # stalls and replicas change without a file


def read(view: ViewContext) -> dict[str, object]:
    if view.remote is not None:
        return {"alerts": []}  # they are of jobs, which a gateway does not have
    seen = HomeView(view.home)
    jobs = seen.of_kind(TRAIN_JOB)
    statuses = {job.name: seen.job_status(job) for job in jobs}
    judged = [job for job in jobs if str(statuses[job.name].phase) in _JUDGED]
    steps = {job.name: numbers_of(view.home.job_metrics(job.name)).curves for job in judged}
    alerts = gather(view.home, judged, statuses, steps)
    return {"alerts": [{**alert.document(), "route": f"/job/{alert.object.partition('/')[2]}"} for alert in alerts]}


def marks(view: ViewContext) -> Marks:
    if view.remote is not None:
        return {}
    return {"objects": home.marks(view)["files"], "clock": int(time.time() // _AGAIN_S)}
