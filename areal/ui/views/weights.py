"""``/weights``: the version that each replica of a live service serves, which replicas are behind, and the updates of
the jobs that write weights: when, how long, how long sampling paused, and which replicas took them.

Weight-update gateways record their updates in the folder of their job; those of other jobs are in its metrics. Swaps by
other means are remembered in memory while a page shows the view.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from areal.client.gateway import GatewayClient
from areal.errors import ArealError
from areal.files import parse_json, stamp
from areal.reconcilers.alerts import read_pairs
from areal.reconcilers.weight_gateways import read_gateway
from areal.resources.kinds import INFERENCE_SERVICE, Ref
from areal.state.home import Home
from areal.state.job_metrics import last_steps
from areal.ui.jobs import FileMemo
from areal.ui.samples import tokens_by_version
from areal.ui.views import Marks, ViewContext, ask_all, cursor_of, entries, period
from areal.wire.processes import WEIGHT_HISTORY_FILE, WEIGHT_UPDATE_FILE

_TIMEOUT_S = 1.5
_PERIOD_S = 2
_UPDATES = 200
_HISTORY = 500
_TAIL_BYTES = 512 << 10
_steps = FileMemo[list[dict[str, Any]]](lambda path: last_steps(path, _TAIL_BYTES), most=64)


class _ServedVersions:
    """What each replica served, each change once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last: dict[str, tuple[Any, ...]] = {}
        self._changes: deque[dict[str, object]] = deque(maxlen=500)

    def note(self, replicas: list[dict[str, Any]]) -> list[dict[str, object]]:
        with self._lock:
            for each in replicas:
                now = (each["version"], each["state"], each["paused"])
                if each["worker"] in self._last and self._last[each["worker"]] != now:
                    self._changes.append({"at": time.time(), **each, "before": self._last[each["worker"]][0]})
                self._last[each["worker"]] = now
            return list(self._changes)


_seen = _ServedVersions()


def read(view: ViewContext) -> dict[str, Any]:
    """With ``tokens`` how many tokens each version has sampled, of the last files of each job that has any."""
    if view.query.get("tokens"):
        folders = [] if view.remote is not None else sorted(view.home.jobs.glob("*/trajectories"))
        return {"jobs": [found for folder in folders if (found := tokens_by_version(folder))["versions"]]}
    services = ask_all(view, INFERENCE_SERVICE, _workers, _TIMEOUT_S)
    replicas = [each for item in services for each in item.answer or ()]
    unseen = [f"{item.ref}: its replicas are not known: {item.why}" for item in services if item.why]
    newest: dict[str, int] = {}
    for each in replicas:
        key = f"{each['service']}/{each['model']}"
        newest[key] = max(newest.get(key, 0), each["version"] or 0)
    for each in replicas:
        each["behind"] = newest[f"{each['service']}/{each['model']}"] - (each["version"] or 0)
    found = {"at": time.time(), "replicas": replicas, "changes": _seen.note(replicas)}
    if view.remote is not None:
        return {**found, "pairs": [], "updates": [], "history": [], "unseen": unseen, "ofHome": False}
    with ThreadPoolExecutor(8, thread_name_prefix="weights") as pool:
        pairs = list(pool.map(_pairs, [file.parent for file in sorted(view.home.jobs.glob(f"*/{WEIGHT_UPDATE_FILE}"))]))
    return {
        **found,
        "pairs": [pair for some, _ in pairs for pair in some],
        "unseen": [*unseen, *(why for _, why in pairs if why)],
        "updates": _updates(view.home),
        "history": _history(view.home),
        "ofHome": True,
    }


def marks(view: ViewContext) -> Marks:
    """Return the metrics of the jobs; replicas are asked again in each period."""
    jobs = sorted(view.home.jobs.glob("*")) if view.remote is None else []
    files = [stamp(file) for job in jobs for file in (view.home.job_metrics(job.name), job / WEIGHT_HISTORY_FILE)]
    return {"metrics": cursor_of(files), "look": period(_PERIOD_S)}


def _workers(ref: Ref, client: GatewayClient) -> list[dict[str, object]]:
    """Return the replicas of a service, from its gateway."""
    return [
        {
            "service": ref.name,
            "model": each.get("model"),
            "worker": each["worker_id"],
            "address": each["worker_addr"],
            "state": each.get("state"),
            "version": each.get("version"),
            "paused": bool(each.get("paused")),
            "fault": each.get("fault") or "",
            "inFlight": each.get("in_flight"),
        }
        for each in entries(client, "/workers", "workers", "replicas")
    ]


def _pairs(folder: Path) -> tuple[list[dict[str, object]], str]:
    """Return the pairs of a job's weight-update gateway; a job that was killed leaves its file, and no gateway."""
    try:
        gateway = read_gateway(folder)
        return [{"job": folder.name, **pair} for pair in read_pairs(gateway, gateway.key())], ""
    except (OSError, ValueError, KeyError, TypeError, ArealError) as error:
        return [], f"TrainJob/{folder.name}: its weight-update gateway does not answer: {error}"


def _updates(home: Home) -> list[dict[str, object]]:
    """Return the last updates of all jobs, newest first."""
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


def _load_history(path: Path) -> list[dict[str, object]]:
    found = []
    for line in path.read_bytes().splitlines():
        try:
            entry = parse_json(line)
            about = {name: entry[name] for name in ("began", "at", "pair", "model", "version", "joined", "error")}
            found.append({**about, "bytes": entry.get("bytes"), "replicas": dict(entry["replicas"])})
        except (ValueError, KeyError, TypeError):
            continue  # cut by a full disk
    return found[-_HISTORY:]


_histories = FileMemo[list[dict[str, Any]]](_load_history, most=64)


def _history(home: Home) -> list[dict[str, object]]:
    """Return the recorded updates of all jobs by time, with the pause of each replica, None if it took none."""
    files = sorted(home.jobs.glob(f"*/{WEIGHT_HISTORY_FILE}"))
    found = [{"job": path.parent.name, **each} for path in files for each in _histories.get(path)]
    return sorted(found, key=lambda each: float(each["at"]))[-_HISTORY:]
