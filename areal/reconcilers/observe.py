"""What is really there: runs, routes, GPUs. Read-only, parallel, every call with a deadline; Unknown is a value."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from areal.client.admin import AdminClient
from areal.errors import ArealError
from areal.reconcilers.admin_keys import key_path
from areal.reconcilers.observed import Observed, ObservedRun, RouteTable, Seen
from areal.runtime.backends.base import Backend, Phase, RunSpec, RunState
from areal.runtime.probes import Unreachable, http_get
from areal.state.credentials import read_key
from areal.state.home import Home
from areal.state.records import StoredObject

PROBE_TIMEOUT_S = 2.0
PARALLEL_PROBES = 16


def observe(home: Home, backend: Backend, objects: Iterable[StoredObject]) -> Observed:
    """Look at the runs of ``objects`` and at the routers among them."""
    wanted = {str(item.ref): item for item in objects}
    states = [state for state in backend.observe().values() if state.spec.owner in wanted]
    runs = probe_all(states)
    grouped: dict[str, list[ObservedRun]] = {}
    for run in sorted(runs, key=lambda run: run.uid):
        grouped.setdefault(run.state.spec.owner, []).append(run)
    routes = _read_tables(home, runs, wanted)
    return Observed({ref: tuple(items) for ref, items in grouped.items()}, routes)


def probe_all(states: Sequence[RunState]) -> list[ObservedRun]:
    """Ask every running one whether it is ready, all at once."""
    if not any(state.phase is Phase.RUNNING for state in states):
        return [ObservedRun(state) for state in states]
    with ThreadPoolExecutor(min(PARALLEL_PROBES, len(states)), thread_name_prefix="probe") as pool:
        return list(pool.map(probe_run, states))


def probe_run(state: RunState) -> ObservedRun:
    """Ask one run whether it is ready; only a running process with a URL is asked."""
    if state.phase is not Phase.RUNNING or not state.spec.url:
        return ObservedRun(state)
    path = ready_path(state.spec)
    try:
        answer = http_get(f"{state.spec.url}{path}", PROBE_TIMEOUT_S, key_headers(state.spec))
    except Unreachable as error:
        age_s = time.time() - state.started_at if state.started_at else None
        return ObservedRun(state, Seen.REFUSING, f"GET {path}: {error}", age_s)
    if answer.status == 200:
        return ObservedRun(state, Seen.READY)
    return ObservedRun(state, Seen.NOT_READY, f"GET {path} answers {answer.status}{_reason(answer.body)}")


def ready_path(spec: RunSpec) -> str:
    """Where a run says that it is ready; engines that are not ours only know /health."""
    foreign = spec.component == "engine" and not str(spec.spec.get("backend", "")).startswith("embedded")
    return "/health" if foreign else "/ready"


def key_headers(spec: RunSpec) -> dict[str, str]:
    """The admin key that the run's own process was started with, where it has one and we may read it."""
    argv = spec.argv
    if "--admin-key-file" not in argv[:-1]:
        return {}
    try:
        return {"Authorization": f"Bearer {read_key(Path(argv[argv.index('--admin-key-file') + 1]))}"}
    except ArealError:
        return {}


def _reason(body: bytes) -> str:
    import json

    try:
        data = json.loads(body)
    except ValueError:
        return ""
    reason = data.get("reason") or data.get("status") if isinstance(data, dict) else None
    return f" ({reason})" if reason else ""


def _read_tables(
    home: Home, runs: Sequence[ObservedRun], services: Mapping[str, StoredObject]
) -> dict[str, RouteTable | str]:
    routers = [run for run in runs if run.state.spec.component == "router" and run.seen is Seen.READY]
    if not routers:
        return {}
    with ThreadPoolExecutor(min(PARALLEL_PROBES, len(routers)), thread_name_prefix="table") as pool:
        tables = pool.map(lambda run: read_table(home, run, services[run.state.spec.owner]), routers)
        return {run.state.spec.owner: table for run, table in zip(routers, tables, strict=True)}


def read_table(home: Home, router: ObservedRun, service: StoredObject) -> RouteTable | str:
    """The router's table, or why it could not be read."""
    try:
        key = read_key(key_path(home, service))
        status, data = AdminClient(router.url, key, timeout_s=PROBE_TIMEOUT_S).get("/table")
    except (OSError, ArealError) as error:
        return f"{service.ref} router/0: its table cannot be read: {error}"
    if status != 200 or not isinstance(data, dict):
        return f"{service.ref} router/0: its table cannot be read: GET /table answers {status}"
    models = {
        model: tuple((w["id"], w["addr"], w["state"]) for w in entry.get("workers", ()))
        for model, entry in data.get("models", {}).items()
    }
    readiness = {model: entry["readiness"] for model, entry in data.get("models", {}).items() if "readiness" in entry}
    return RouteTable(models, data.get("strategy", ""), data.get("limits", {}), bool(data.get("synced")), readiness)
