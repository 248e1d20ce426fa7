"""``/``: every object with its readiness and the causes, and the last events of all. Also ``/object/KIND/NAME``,
``/plan``, ``/top``, and ``/about``, which the page reads once, when it opens.

The status is the one of ``areal get``: recomputed from the processes at each read. No file shows that a process stopped
answering: it is found by another read after a period that keeps an idle page under half a percent of a core.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from areal.errors import ArealError, UsageFault
from areal.files import stamp
from areal.reconcilers.context import ApplyRequest, Context
from areal.reconcilers.home_view import HomeView, description, document_of, event_row, service_of
from areal.reconcilers.plan import Plan
from areal.reconcilers.prepare import drift
from areal.reconcilers.usage import MEASURED, Sample, figures, sample
from areal.resources.kinds import MODEL, TRAIN_JOB
from areal.runtime.backends.base import LIVE
from areal.state.events import Event, load
from areal.state.home import Home
from areal.state.job_metrics import bottleneck, eta_s, newest_step
from areal.ui.jobs import FileMemo
from areal.ui.views import REMOTE, RemoteGateway, ViewContext, ViewReader, cursor_of, period, shown_by

_EVENTS = 40
_MANIFESTS = (".yaml", ".yml", ".json")
_SHARE = 0.005  # of a core, for looking again at what no file shows
_LEAST_PERIOD_S, _MOST_PERIOD_S = 3.0, 30.0
_PERIOD_S = 2.0
_KEPT_S = 900.0
_FIRST_S = 0.5  # between the two samples of the first request
_SERIES = ("cpuPercent", "memoryBytes", "tokensPerSecond", "waiting", "cache")
_events = FileMemo[list[Event]](lambda path: load(path)[-_EVENTS:], most=1024)


class _Looks:
    """Counts the times at which what no file shows is to be looked at again."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._period_s = _LEAST_PERIOD_S
        self._next = 0.0
        self._count = 0

    def cost(self, seconds: float) -> None:
        with self._lock:
            self._period_s = min(_MOST_PERIOD_S, max(_LEAST_PERIOD_S, seconds / _SHARE))

    def number(self) -> int:
        with self._lock:
            if time.monotonic() >= self._next:
                self._next = time.monotonic() + self._period_s
                self._count += 1
            return self._count


_looks = _Looks()


def read(view: ViewContext) -> dict[str, Any]:
    if view.remote is not None:
        return _served(view.remote)
    began = time.thread_time()
    home = HomeView(view.home)
    items = list(home.objects)
    seen = home.statuses(items)
    ended = home.ended()
    events = last_events(view.home)
    drifts, unseen = _drifts(view.home)
    rows = []
    for item in items:
        ref = str(item.ref)
        document = document_of(item, seen[ref])
        states = home.states([item.ref])
        gone = home.gone(states)
        current = [state for state in states if state.spec.uid not in gone]
        rows.append(
            {
                "ref": ref,
                "kind": item.kind,
                "name": item.name,
                "host": service_of(item),
                "ended": ref in ended,
                "createdAt": item.created_at,
                "status": document["status"],
                "reason": next((c.reason for c in seen[ref].conditions if c.type == "Ready"), ""),
                "processes": {
                    "live": sum(state.phase in LIVE for state in current),
                    "all": len(current),
                    "restarts": sum(state.restarts for state in current),
                },
                "drift": drifts.get(ref, []),
                "lastEvent": next((event_row(event) for event in reversed(events) if event.ref == ref), None),
                **({"job": job_progress(view.home, item.name)} if item.kind == TRAIN_JOB else {}),
            }
        )
    _looks.cost(time.thread_time() - began)
    return {
        "home": short(view.home.root),
        "at": time.time(),
        "objects": rows,
        "unreadable": [{"path": str(path), "reason": reason} for path, reason in home.objects.unreadable],
        "driftUnknown": unseen,
        "events": [event_row(event) for event in events[-_EVENTS:]],
    }


def marks(view: ViewContext) -> Mapping[str, int | str]:
    """Return one cursor for objects, events, processes and the numbers of jobs, and the number of the last look."""
    if view.remote is not None:
        return {"look": _looks.number()}
    return {"files": cursor_of(_stamps(view.home)), "look": _looks.number()}


def _served(remote: RemoteGateway) -> dict[str, object]:
    """Return a remote gateway and its models: it has no processes, drift or events to show."""
    rows = [
        {
            "ref": f"{document['kind']}/{document['metadata']['name']}",
            "kind": document["kind"],
            "name": document["metadata"]["name"],
            "host": REMOTE if document["kind"] == MODEL else None,
            "ended": False,
            "createdAt": None,
            "status": document["status"],
            "reason": document["status"]["reason"],
            "processes": {"live": 0, "all": 0, "restarts": 0},
            "drift": [],
            "lastEvent": None,
        }
        for document in remote.documents(remote.client)
    ]
    about = {"home": remote.client.url, "at": time.time(), "objects": rows, "unreadable": []}
    return {**about, "driftUnknown": "", "events": []}


def short(path: Path) -> str:
    """``path`` with ``~`` for the user's own folder."""
    own = Path.home()
    return str(Path("~") / path.relative_to(own)) if path.is_relative_to(own) else str(path)


def job_progress(home: Home, name: str) -> dict[str, object]:
    """Return the newest numbers of a job; empty before its first step."""
    step = newest_step(home.job_metrics(name))
    if not step:
        return {}
    return {
        "step": step.get("step"),
        "total": step.get("total_steps"),
        "reward": step.get("reward/mean"),
        "etaSeconds": eta_s(step),
        "bottleneck": bottleneck(step),
        "at": step.get("time"),
    }


def last_events(home: Home) -> list[Event]:
    """Return the last events of each object, of all of them in order of time."""
    paths = [home.objects / "events.jsonl", *sorted(home.objects.glob("*/*/events.jsonl"))]
    return sorted((event for path in paths for event in _events.get(path)), key=lambda event: event.at)


def _drifts(home: Home) -> tuple[dict[str, list[dict[str, str]]], str]:
    """Return what left the record, by object; and why that is not known."""
    try:
        plan = drift(Context(home, "", ""), assume_capacity=True)
    except ArealError as error:
        return {}, error.message
    found: dict[str, list[dict[str, str]]] = {}
    for each in plan.drift:
        found.setdefault(each.ref, []).append({"kind": each.kind, "target": each.target, "message": each.message})
    return found, ""


def _stamps(home: Home) -> list[object]:
    """Return what every write to an object, its events, a process's record or a job's numbers changes."""
    folders = [home.runs, *_children(home.runs), home.objects / "serial"]
    objects = [path for kind in _children(home.objects) for path in _children(kind)]
    files = [file for path in objects for file in (path, path / "events.jsonl")]
    jobs = [home.job_metrics(path.name) for path in _children(home.jobs)]
    return [stamp(path) for path in (*folders, *files, *jobs)]


def _children(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    except OSError:
        return []


def about(view: ViewContext) -> dict[str, Any]:
    """Return the home or gateway of the page, and what it may show and change."""
    return {
        "home": short(view.home.root),
        "gateway": view.remote.client.url if view.remote is not None else None,
        "views": list(shown_by(view)),
        "actions": view.actions is not None,
    }


def described(view: ViewContext) -> dict[str, Any]:
    """Return all that ``areal describe`` knows of one object."""
    ref = view.ref()
    found = description(view.home, ref)
    if ref.kind == TRAIN_JOB:
        found["job"] = job_progress(view.home, ref.name)
    return found


def described_marks(view: ViewContext) -> Mapping[str, int | str]:
    view.ref()
    return marks(view)


def plan(view: ViewContext) -> dict[str, Any]:
    """Return the plan of ``areal diff``: what left the record now, or what ``areal apply`` of a manifest would do.
    ``path``: a manifest of this machine, by its name's ending, or a folder; the body of a POST has ``text``, a manifest
    that was pasted."""
    found = _plan(view)
    return {**found.to_json(), "text": found.to_text(), "steps": {str(op.id): op.to_words() for op in found.ops}}


def plan_marks(view: ViewContext) -> Mapping[str, int | str]:
    """Return the marks of the objects, and the manifest's."""
    path = view.query.get("path")
    return {**marks(view), **({"manifest": repr(stamp(Path(path).expanduser()))} if path else {})}


def _plan(view: ViewContext) -> Plan:
    from areal.reconcilers.apply import diff
    from areal.resources.render import RenderRequest

    context, assume = Context(view.home, "", ""), bool(view.query.get("assume"))
    if isinstance(view.body, dict):
        text = view.body.get("text")
        if not isinstance(text, str) or not text.strip():
            raise UsageFault("no manifest was given", hint="paste a manifest, or give its path")
        return diff(context, ApplyRequest(RenderRequest(files=("-",), stdin=text), assume_capacity=assume))
    path = view.query.get("path")
    if not path:
        return drift(context, assume_capacity=assume)
    file = Path(path).expanduser()
    if not file.is_absolute():
        raise UsageFault(f"{path[:200]} is no absolute path", hint="write the whole path, beginning with /")
    if file.suffix not in _MANIFESTS and not file.is_dir():  # errors quote parts of the file
        raise UsageFault(f"{path[:200]} is no manifest", hint=f"its name ends in {', '.join(_MANIFESTS)}")
    source = RenderRequest(files=(str(file),), recursive=bool(view.query.get("recursive")))
    return diff(context, ApplyRequest(source, assume_capacity=assume))


class _History:
    """The last sample of a home, and the figures since each process was first seen."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.before: Sample | None = None
        self.at = 0.0
        self.rows: list[dict[str, Any]] = []
        self.points: dict[str, deque[tuple[float, tuple[float | None, ...]]]] = {}

    def look(self, home: HomeView) -> None:
        if self.before is not None and time.monotonic() - self.before.at < _PERIOD_S:
            return
        states = [state for state in home.states() if state.phase in MEASURED]
        if self.before is None or time.monotonic() - self.before.at > _KEPT_S:
            self.before = sample(home, states)
            time.sleep(_FIRST_S)
        after = sample(home, states)
        self.rows = figures(states, self.before, after)
        self.before, self.at = after, time.time()
        for state, row in zip(states, self.rows, strict=True):
            uid = state.spec.uid
            counters = after.counters.get(uid)
            row.update(uid=uid, waiting=counters and counters.waiting, cache=counters and counters.cache)
            points = self.points.setdefault(uid, deque(maxlen=int(_KEPT_S / _PERIOD_S)))
            points.append((self.at, tuple(row[name] for name in _SERIES)))
        live = {state.spec.uid for state in states}
        self.points = {uid: points for uid, points in self.points.items() if uid in live}


_histories: dict[str, _History] = {}


def top(view: ViewContext) -> dict[str, object]:
    """``/top``: CPU, memory, GPU, tokens a second, queue and KV cache of each process. A request takes a sample, at
    most one in ``_PERIOD_S``, which is kept in memory only: nothing is measured while no page shows it."""
    history = _histories.setdefault(str(view.home.root), _History())
    with history.lock:
        history.look(HomeView(view.home))
        since = time.time() - _KEPT_S
        rows = [{**row, "history": _columns(history, row["uid"], since)} for row in history.rows]
        return {"at": history.at, "processes": rows}


def top_marks(view: ViewContext) -> Mapping[str, int | str]:
    return {"sample": period(_PERIOD_S)}


def _columns(history: _History, uid: str, since: float) -> dict[str, list[float | None]]:
    points = [(at, values) for at, values in history.points[uid] if at >= since]
    columns: dict[str, list[float | None]] = {"at": [round(at, 1) for at, _ in points]}
    for index, name in enumerate(_SERIES):
        values = [values[index] for _, values in points]
        if any(value is not None for value in values):
            columns[name] = values
    return columns


BESIDE = {
    "about": ViewReader(about),
    "object": ViewReader(described, described_marks),
    "plan": ViewReader(plan, plan_marks),
    "top": ViewReader(top, top_marks),
}
