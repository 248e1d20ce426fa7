"""``/top``: CPU, memory, GPU, tokens a second, queue and KV cache of each process, now and over the last 15 minutes.

A sample is taken at a request, at most one in ``_PERIOD_S``; nothing is measured while no page shows the view. The
samples are kept in memory only.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from areal.reconcilers.home_view import HomeView
from areal.reconcilers.usage import MEASURED, Sample, figures, sample
from areal.ui.views import ViewContext

_PERIOD_S = 2.0
_KEPT_S = 900.0
_FIRST_S = 0.5  # between the two samples of the first request
_SERIES = ("cpuPercent", "memoryBytes", "tokensPerSecond", "waiting", "cache")


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


def read(view: ViewContext) -> dict[str, object]:
    history = _histories.setdefault(str(view.home.root), _History())
    with history.lock:
        history.look(HomeView(view.home))
        since = time.time() - _KEPT_S
        rows = [{**row, "history": _columns(history, row["uid"], since)} for row in history.rows]
        return {"at": history.at, "processes": rows}


def marks(view: ViewContext) -> Mapping[str, int | str]:
    """Return a cursor that changes once in a period."""
    return {"sample": int(time.monotonic() / _PERIOD_S)}


def _columns(history: _History, uid: str, since: float) -> dict[str, list[float | None]]:
    points = [(at, values) for at, values in history.points[uid] if at >= since]
    columns: dict[str, list[float | None]] = {"at": [round(at, 1) for at, _ in points]}
    for index, name in enumerate(_SERIES):
        values = [values[index] for _, values in points]
        if any(value is not None for value in values):
            columns[name] = values
    return columns
