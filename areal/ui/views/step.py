"""``/job/NAME/step/S``: the samples of a step by group; the samples of one group side by side; one sample."""

from __future__ import annotations

from bisect import bisect_left
from pathlib import Path

from areal.errors import NotFound
from areal.files import stamp
from areal.state.records import StoredObject
from areal.trajectories.steps import StepFile, StepSummary, read_failures, read_step, step_files
from areal.ui.curves import WAITS
from areal.ui.jobs import FileMemo, decoder_of, job_of, numbers_of, read_mark
from areal.ui.samples import group_row, side_by_side
from areal.ui.views import Marks, ViewContext

_FAILURES = 200

_listings: FileMemo[list[StepFile]] = FileMemo(step_files, 2)  # by the folder's time of change
_steps: FileMemo[dict[str, StepSummary]] = FileMemo(lambda path: {}, 4)  # the summary is made with the job's decoder


def read(view: ViewContext) -> dict[str, object]:
    """``step``: a number; without it the newest. ``eval=1``: the evaluation after it. ``group`` and ``sample``: one."""
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


def marks(view: ViewContext) -> Marks:
    name = view.name()
    reading = read_mark(view.home.job_metrics(name)).partition(" ")[2]  # until its end, numbers of the step may miss
    return {"folder": f"{stamp(view.home.jobs / name / 'trajectories')}", "numbers": reading}
