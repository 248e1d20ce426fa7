"""``/weights``: the version that each replica of a live service serves, which replicas are behind, and the updates of
the jobs that write weights: when, how long, how long sampling paused.

What each replica served is remembered in memory while a page shows the view; the updates of a job are in its metrics.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from areal.client.http import AdminClient
from areal.errors import ArealError
from areal.reconcilers.alerts import read_pairs
from areal.reconcilers.home_view import HomeView
from areal.reconcilers.usage import service_key
from areal.reconcilers.weight_gateways import read_gateway
from areal.resources.kinds import INFERENCE_SERVICE
from areal.state.home import Home
from areal.state.job_metrics import last_steps
from areal.ui.context import ViewContext
from areal.ui.memo import FileMemo, stamp
from areal.wire.processes import WEIGHT_UPDATE_FILE

_TIMEOUT_S = 1.5
_PERIOD_S = 2
_UPDATES = 200
_TAIL_BYTES = 512 << 10
_steps = FileMemo[list[dict[str, Any]]](lambda path: last_steps(path, _TAIL_BYTES), most=64)


class _Seen:
    """What each replica served, each change once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last: dict[str, tuple[Any, ...]] = {}
        self._changes: deque[dict[str, Any]] = deque(maxlen=500)

    def note(self, replicas: list[dict[str, Any]]) -> list[dict[str, Any]]:
        with self._lock:
            for each in replicas:
                now = (each["version"], each["state"], each["paused"])
                if each["worker"] in self._last and self._last[each["worker"]] != now:
                    self._changes.append({"at": time.time(), **each, "before": self._last[each["worker"]][0]})
                self._last[each["worker"]] = now
            return list(self._changes)


_seen = _Seen()


def read(view: ViewContext) -> dict[str, Any]:
    home = HomeView(view.home)
    services = [item.name for item in home.of_kind(INFERENCE_SERVICE)]
    with ThreadPoolExecutor(8, thread_name_prefix="weights") as pool:
        workers = list(pool.map(lambda name: _workers(home, name), services))
        pairs = list(pool.map(_pairs, [file.parent for file in sorted(view.home.jobs.glob(f"*/{WEIGHT_UPDATE_FILE}"))]))
    replicas = [each for found, _ in workers for each in found]
    newest: dict[str, int] = {}
    for each in replicas:
        key = f"{each['service']}/{each['model']}"
        newest[key] = max(newest.get(key, 0), each["version"] or 0)
    for each in replicas:
        each["behind"] = newest[f"{each['service']}/{each['model']}"] - (each["version"] or 0)
    return {
        "replicas": replicas,
        "pairs": [pair for found, _ in pairs for pair in found],
        "unseen": [why for _, why in (*workers, *pairs) if why],
        "updates": _updates(view.home),
        "changes": _seen.note(replicas),
    }


def marks(view: ViewContext) -> Mapping[str, int | str]:
    """The metrics of the jobs, and a cursor that changes once in a period: replicas are asked again."""
    files = [stamp(view.home.job_metrics(path.name)) for path in sorted(view.home.jobs.glob("*"))]
    return {"metrics": f"{hash(tuple(files)) & 0xFFFFFFFFFFFF:x}", "look": int(time.monotonic() / _PERIOD_S)}


def _workers(home: HomeView, service: str) -> tuple[list[dict[str, Any]], str]:
    """The replicas of a service, from its gateway; and why they are not known."""
    ref = next(item.ref for item in home.objects if item.kind == INFERENCE_SERVICE and item.name == service)
    address = home.address(ref)
    if not address:
        return [], ""
    try:
        status, found = AdminClient(address, service_key(home.home, service), timeout_s=_TIMEOUT_S).get("/workers")
        if status != 200 or not isinstance(found, dict) or "workers" not in found:
            return [], f"{ref}: GET {address}/workers answers {status} without replicas"
    except (ArealError, OSError) as error:
        return [], f"{ref}: its replicas are not known: {error}"
    return [
        {
            "service": service,
            "model": each.get("model"),
            "worker": each["worker_id"],
            "address": each["worker_addr"],
            "state": each.get("state"),
            "version": each.get("version"),
            "paused": bool(each.get("paused")),
            "fault": each.get("fault") or "",
            "inFlight": each.get("in_flight"),
        }
        for each in found["workers"]
    ], ""


def _pairs(folder: Path) -> tuple[list[dict[str, Any]], str]:
    """The pairs of a job's weight-update gateway; a job that was killed leaves its file, and no gateway."""
    try:
        gateway = read_gateway(folder)
        return [{"job": folder.name, **pair} for pair in read_pairs(gateway, gateway.key())], ""
    except (OSError, ValueError, KeyError, TypeError, ArealError) as error:
        return [], f"TrainJob/{folder.name}: its weight-update gateway does not answer: {error}"


def _updates(home: Home) -> list[dict[str, Any]]:
    """The last updates of all jobs, newest first."""
    found = [
        {
            "job": path.parent.name,
            "step": step["step"],
            "version": step.get("version"),
            "at": step.get("time"),
            "ms": step["weights/ms"],
            "pausedMs": step.get("weights/paused_ms"),
            "tokens": step.get("tokens"),
            "staleness": step.get("staleness/mean"),
        }
        for path in sorted(home.jobs.glob("*/metrics.jsonl"))
        for step in _steps.get(path)[-_UPDATES:]
        if "weights/ms" in step
    ]
    return sorted(found, key=lambda each: each["at"] or 0.0, reverse=True)[:_UPDATES]
