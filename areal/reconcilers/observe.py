"""What is really there: runs with their probe's answer, routing tables, GPUs. Unknown is a value.

Read-only, all at once, under one deadline. Standard library only: ``areal get`` and ``apply`` observe in the same way.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any

from areal.errors import ArealError
from areal.runtime import procfs
from areal.runtime.backends.base import Capacity, Phase, RunControl, RunSpec, RunState
from areal.runtime.probes import NoAnswer, ProbeFailed, ProbeRequest, ProbeResponse, http_get_all
from areal.state.home import read_key
from areal.state.records import StoredObject


class Seen(StrEnum):
    """What a run answered to GET /ready."""

    READY = "ready"
    NOT_READY = "not ready"  # it answered, and not with 200
    REFUSING = "refusing"  # nothing listens, or what answers is not HTTP
    SILENT = "silent"  # no answer in time
    UNSEEN = "unseen"  # not asked


@dataclass(frozen=True)
class ObservedRun:
    state: RunState
    seen: Seen = Seen.UNSEEN
    why: str = ""
    age_s: float | None = None  # of the present child, when it was observed

    @property
    def uid(self) -> str:
        return self.state.spec.uid

    @property
    def replica(self) -> int:
        return self.state.spec.replica

    @property
    def url(self) -> str:
        return self.state.spec.url or ""

    @property
    def is_live(self) -> bool:
        return self.state.phase in (Phase.STARTING, Phase.RUNNING, Phase.BACKOFF)

    @property
    def may_live(self) -> bool:
        """Alive, or out of sight."""
        return self.is_live or self.state.phase is Phase.UNKNOWN

    @property
    def leaves_session(self) -> bool:
        """A shim that died may have left members of its session behind: stopping sweeps them."""
        return self.state.phase is Phase.DEAD

    @property
    def ended_at(self) -> float:
        return self.state.last_exit.at if self.state.last_exit else 0.0


@dataclass(frozen=True)
class RouteTable:
    """The router's own view. ``models`` maps a model to its workers' (id, address, state), ``readiness`` to how they
    are probed."""

    models: Mapping[str, tuple[tuple[str, str, str], ...]] = field(default_factory=dict)
    strategy: str = ""
    limits: Mapping[str, Any] = field(default_factory=dict)
    synced: bool = False
    readiness: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class Observed:
    """``runs``: by owner, in the order of their uids. ``routes``: of a service, its table, or a sentence saying why it
    could not be read; nothing where there is no router."""

    runs: Mapping[str, tuple[ObservedRun, ...]] = field(default_factory=dict)
    routes: Mapping[str, RouteTable | str] = field(default_factory=dict)
    capacity: Capacity = field(default_factory=Capacity)

    def of(self, ref: str, component: str | None = None, replica: int | None = None) -> tuple[ObservedRun, ...]:
        return tuple(
            run
            for run in self.runs.get(ref, ())
            if (component is None or run.state.spec.component == component)
            and (replica is None or run.state.spec.replica == replica)
        )

    def without(self, ref: str) -> Observed:
        """The same, had there never been a run of ``ref``."""
        return replace(self, runs={owner: runs for owner, runs in self.runs.items() if owner != ref})


# -- observing

PROBE_TIMEOUT_S = 2.0
_MOST_BYTES = 64 << 20  # a table of ten thousand workers has two


def observe(backend: RunControl, objects: Iterable[StoredObject]) -> Observed:
    """Look at the runs of ``objects``, and at the tables of the routers among them."""
    wanted = {str(item.ref) for item in objects}
    return look([state for state in backend.observe().values() if state.spec.owner in wanted])


def look(states: Sequence[RunState], timeout_s: float = PROBE_TIMEOUT_S) -> Observed:
    """Ask every running process whether it is ready, and every router for its table."""
    headers = cache(_key_headers)
    asked = [state for state in states if state.phase is Phase.RUNNING and state.spec.url]
    routers = [state for state in asked if state.spec.component == "router"]
    targets = [*((state, "/table") for state in routers), *((state, ready_path(state.spec)) for state in asked)]
    requests = [ProbeRequest(f"{state.spec.url}{path}", headers(key_file(state.spec))) for state, path in targets]
    answers = http_get_all(requests, timeout_s, most_bytes=_MOST_BYTES)
    tables, probes = answers[: len(routers)], answers[len(routers) :]
    probed = {state.spec.uid: _probed(state, answer) for state, answer in zip(asked, probes, strict=True)}
    routes = {
        state.spec.owner: _table(state, answer)
        for state, answer in zip(routers, tables, strict=True)
        if probed[state.spec.uid].seen is Seen.READY
    }
    runs: dict[str, list[ObservedRun]] = {}
    for state in sorted(states, key=lambda state: state.spec.uid):
        runs.setdefault(state.spec.owner, []).append(probed.get(state.spec.uid) or ObservedRun(state))
    return Observed({owner: tuple(found) for owner, found in runs.items()}, routes)


def probe_run(state: RunState) -> ObservedRun:
    """Ask one run whether it is ready; only a running process with a URL is asked."""
    return look([state]).runs[state.spec.owner][0]


def ready_path(spec: RunSpec) -> str:
    """Where a run says that it is ready; engines that are not ours only know /health."""
    foreign = spec.component == "engine" and not str(spec.spec.get("backend", "")).startswith("embedded")
    return "/health" if foreign else "/ready"


def setting(spec: RunSpec, name: str) -> str | None:
    """What the run's process was started with: in its configuration, or as a flag."""
    if name in spec.config:
        return str(spec.config[name])
    argv, flag = spec.argv, "--" + name.replace("_", "-")
    return argv[argv.index(flag) + 1] if flag in argv[:-1] else None


def key_file(spec: RunSpec) -> str | None:
    """The file of the admin key that the run's process was started with."""
    return setting(spec, "admin_key_file")


def key_headers(spec: RunSpec) -> dict[str, str]:
    """The run's own admin key, where it has one that we may read."""
    return _key_headers(key_file(spec))


def _key_headers(path: str | None) -> dict[str, str]:
    if path is None:
        return {}
    try:
        return {"Authorization": f"Bearer {read_key(Path(path))}"}
    except ArealError:
        return {}


def _probed(state: RunState, answer: ProbeResponse | ProbeFailed) -> ObservedRun:
    path = ready_path(state.spec)
    age_s = time.time() - state.started_at if state.started_at else None
    if isinstance(answer, NoAnswer):
        halted = f"; pid {state.pid} is stopped by a signal (kill -CONT {state.pid})" if state.halted else ""
        return ObservedRun(state, Seen.SILENT, f"GET {path}: {answer}{halted}", age_s)
    if isinstance(answer, ProbeFailed):
        return ObservedRun(state, Seen.REFUSING, f"GET {path}: {answer}", age_s)
    data = _object(answer.body)
    if answer.status == 200:
        stranger = _stranger(state, data.get("pid"))
        return ObservedRun(state, Seen.REFUSING if stranger else Seen.READY, stranger, age_s)
    reason = data.get("reason") or data.get("status")
    said = f" ({reason})" if reason else ""
    return ObservedRun(state, Seen.NOT_READY, f"GET {path} answers {answer.status}{said}", age_s)


def _stranger(state: RunState, pid: Any) -> str:
    """Who answers on the run's port in its place, where the answer tells its pid."""
    stat = procfs.read_stat(pid) if isinstance(pid, int) and not state.node else None
    ours = stat is None or stat.session == state.shim_pid
    return "" if ours else f"another process (pid {pid}) answers on its port"


def _table(router: RunState, answer: ProbeResponse | ProbeFailed) -> RouteTable | str:
    """The router's table, or why it could not be read."""
    why = f"{router.spec.owner} router/0: its table cannot be read: "
    if isinstance(answer, ProbeFailed):
        return f"{why}{answer}"
    data = _object(answer.body)
    if answer.status != 200 or not data:
        return f"{why}GET /table answers {answer.status}"
    models = {
        model: tuple((w["id"], w["addr"], w["state"]) for w in entry.get("workers", ()))
        for model, entry in data.get("models", {}).items()
    }
    readiness = {model: entry["readiness"] for model, entry in data.get("models", {}).items() if "readiness" in entry}
    return RouteTable(models, data.get("strategy", ""), data.get("limits", {}), bool(data.get("synced")), readiness)


def _object(body: bytes) -> dict[str, Any]:
    try:
        data = json.loads(body)
    except ValueError:
        return {}
    return data if isinstance(data, dict) else {}
