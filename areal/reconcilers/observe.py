"""The observed state: runs with the answers to their probes, routing tables, GPUs; and an object's health from these.

Observing is read-only and concurrent, under one deadline; unknown is a valid result. Standard library only: ``areal
get`` and ``apply`` observe in the same way.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from enum import StrEnum
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from areal.dataclasses import dataclass, field, replace
from areal.errors import ArealError
from areal.numbers import iso
from areal.runtime import procfs
from areal.runtime.backends.base import LIVE, MAY_LIVE, NODE_HOST, Capacity, Phase, RunControl, RunSpec, RunState
from areal.runtime.probes import NoAnswer, ProbeFailed, ProbeRequest, ProbeResponse, halted_note, http_get_all
from areal.runtime.shim import NO_FOLDER
from areal.state.home import read_key
from areal.state.records import StoredObject

if TYPE_CHECKING:
    from areal.wire.routing import Snapshot


class Seen(StrEnum):
    """A run's answer to GET /ready."""

    READY = "ready"
    NOT_READY = "not ready"  # it answered, but not with 200
    REFUSING = "refusing"  # nothing listens, or the answer is not HTTP
    SILENT = "silent"  # no answer in time
    UNSEEN = "unseen"  # not probed


class Trouble(NamedTuple):
    reason: str  # of the condition
    message: str
    hint: str


@dataclass(frozen=True)
class ObservedRun:
    state: RunState
    seen: Seen = Seen.UNSEEN
    why: str = ""
    age_s: float | None = None  # of the present child, when it was observed
    settings: Mapping[str, Any] = field(default_factory=dict)  # settings that can change while it runs
    trouble: Trouble | None = None  # a failure of all its callers' requests, although it answers its probe
    notice: Trouble | None = None  # a failure of some requests, while the others are served
    weights: Mapping[str, Any] = field(default_factory=dict)  # a data proxy's served weights: path, version, writer
    key_fault: str = ""  # why its admin key file no longer has the key that it was started with

    @property
    def uid(self) -> str:
        return self.state.spec.uid

    @property
    def replica(self) -> int:
        return self.state.spec.replica

    @property
    def slot(self) -> str:
        return f"{self.state.spec.component}/{self.state.spec.replica}"

    @property
    def url(self) -> str:
        """The run's address; "" while it is unknown."""
        url = self.state.spec.url or ""
        return "" if NODE_HOST in url else url

    @property
    def is_live(self) -> bool:
        return self.state.phase in LIVE

    @property
    def may_live(self) -> bool:
        """Whether the run is alive, or cannot be seen."""
        return self.state.phase in MAY_LIVE

    @property
    def leaves_session(self) -> bool:
        """Whether members of the run's session may be left to stop, because its shim has died."""
        return self.state.phase is Phase.DEAD

    @property
    def ended_at(self) -> float:
        """When the run ended, in seconds since the epoch; 0 if unknown. Without an exit record: the last write to the
        log, or the start."""
        exited_at = self.state.last_exit.at if self.state.last_exit else 0.0
        return max(exited_at, self.state.started_at or 0.0, self.state.logged_at or 0.0)


@dataclass(frozen=True)
class Observed:
    """The observed state. ``runs``: by owner, in the order of their uids. ``routes``: by service, its table or a
    sentence why it could not be read; no entry without a router."""

    runs: Mapping[str, tuple[ObservedRun, ...]] = field(default_factory=dict)
    routes: Mapping[str, Snapshot | str] = field(default_factory=dict)
    capacity: Capacity = field(default_factory=Capacity)

    def of(self, ref: str, component: str | None = None, replica: int | None = None) -> tuple[ObservedRun, ...]:
        """Return the runs of an object, of one of its components, or of one replica of that component."""
        if component is None:
            return self.runs.get(ref, ())
        if ref not in self._slots:
            found: dict[tuple[str, int | None], list[ObservedRun]] = {}
            self._slots[ref] = found
            for run in self.runs.get(ref, ()):
                name = run.state.spec.component
                found.setdefault((name, None), []).append(run)
                found.setdefault((name, run.replica), []).append(run)
        return tuple(self._slots[ref].get((component, replica), ()))

    @cached_property
    def _slots(self) -> dict[str, dict[tuple[str, int | None], list[ObservedRun]]]:
        """Runs of the requested objects by component and replica."""
        return {}

    def without(self, ref: str) -> Observed:
        """Return the same state without the runs of ``ref``."""
        return replace(self, runs={owner: runs for owner, runs in self.runs.items() if owner != ref})


PROBE_TIMEOUT_S = 2.0
_MOST_BYTES = 64 << 20  # a table of ten thousand workers takes 2 MB


def observe(backend: RunControl, objects: Iterable[StoredObject]) -> Observed:
    """Observe the runs of ``objects``, and the tables of the routers among them."""
    wanted = {str(item.ref) for item in objects}
    return look([state for state in backend.observe().values() if state.spec.owner in wanted])


def look(states: Sequence[RunState], timeout_s: float = PROBE_TIMEOUT_S) -> Observed:
    """Probe every running process, and read every router's table."""
    headers, key_id = cache(key_headers), cache(_key_id)
    asked = [state for state in states if state.phase is Phase.RUNNING and state.spec.url]
    routers = [state for state in asked if state.spec.component == "router"]
    targets = [*((state, "/table") for state in routers), *((state, ready_path(state.spec)) for state in asked)]
    requests = [ProbeRequest(f"{state.spec.url}{path}", headers(key_file(state.spec))) for state, path in targets]
    answers = http_get_all(requests, timeout_s, most_bytes=_MOST_BYTES)
    tables, probes = answers[: len(routers)], answers[len(routers) :]
    now = time.time()
    ages = [now - state.started_at if state.started_at else None for state in asked]
    probed = {
        state.spec.uid: _observed(state, answer, age_s, port_trouble(state, states), _key_fault(state.spec, key_id))
        for state, answer, age_s in zip(asked, probes, ages, strict=True)
    }
    routes = {
        state.spec.owner: _table(state, answer, bool(headers(key_file(state.spec))))
        for state, answer in zip(routers, tables, strict=True)
        if probed[state.spec.uid].seen in (Seen.READY, Seen.NOT_READY)
    }
    runs: dict[str, list[ObservedRun]] = {}
    for state in sorted(states, key=lambda state: state.spec.uid):
        runs.setdefault(state.spec.owner, []).append(probed.get(state.spec.uid) or _unprobed(state))
    return Observed({owner: tuple(found) for owner, found in runs.items()}, routes)


def _unprobed(state: RunState) -> ObservedRun:
    hint = f"areal logs {state.spec.owner} has all failures"
    return ObservedRun(state, notice=Trouble("WorkFails", state.failing, hint) if state.failing else None)


def probe_run(state: RunState) -> ObservedRun:
    """Probe one run; only a running process with a URL is asked."""
    return look([state]).runs[state.spec.owner][0]


def ready_path(spec: RunSpec) -> str:
    """Return the path of a run's readiness probe. Third-party engines only have /health."""
    foreign = spec.component == "engine" and not str(spec.spec.get("backend", "")).startswith("embedded")
    return "/health" if foreign else "/ready"


def setting(spec: RunSpec, name: str) -> str | None:
    """Return a setting with which the run's process was started, from its configuration or a flag."""
    if name in spec.config:
        return str(spec.config[name])
    argv, flag = spec.argv, "--" + name.replace("_", "-")
    return argv[argv.index(flag) + 1] if flag in argv[:-1] else None


def key_file(spec: RunSpec) -> str | None:
    """Return the admin key file with which the run's process was started."""
    return setting(spec, "admin_key_file")


def key_headers(path: str | None) -> dict[str, str]:
    """Return the Authorization header with the key of an admin key file; empty if the file cannot be read."""
    if path is None:
        return {}
    try:
        return {"Authorization": f"Bearer {read_key(Path(path))}"}
    except ArealError:
        return {}


KEYS = "keys"  # in a run's inputs: a fingerprint of the key in each file


def key_ids(spec: RunSpec) -> dict[str, str]:
    """Return the fingerprints of the keys that a process reads, by file. They do not reveal the keys. Raises
    ArealError."""
    called = spec.config.get("inference") or ()
    accesses = (called,) if isinstance(called, Mapping) else called
    files = (key_file(spec), *(access.get("admin_key_file") for access in accesses))
    return {str(path): _key_id(path) for path in files if path is not None}


def _key_id(path: Path | str) -> str:
    return f"{zlib.crc32(read_key(path).encode()):08x}"


def _key_fault(spec: RunSpec, key_id: Callable[[str], str]) -> str:
    """Return why a key file is not as it was when the process started, or "". A missing declared key is no fault, since
    it comes back only from its source, nor is a file without read permission."""
    declared = "keyFrom" in spec.inputs or spec.inputs.get("inferenceKeyFrom", "generated") != "generated"
    for path, had in spec.inputs.get(KEYS, {}).items():
        try:
            if key_id(path) != had:
                return f"another key is in {path}"
        except ArealError as error:
            if not declared and not isinstance(error.__cause__, PermissionError):
                return error.message
    return ""


def _observed(
    state: RunState, answer: ProbeResponse | ProbeFailed, age_s: float | None, shared: Trouble | None, key_fault: str
) -> ObservedRun:
    seen, why = _probed(state, answer)
    about = {} if isinstance(answer, ProbeFailed) else answer.json()
    settings, weights = (
        {} if not isinstance(about.get(name), dict) else about[name] for name in ("settings", "weights")
    )
    trouble, notice = trouble_of(about) or shared, notice_of(about)
    return ObservedRun(state, seen, why, age_s, settings, trouble, notice, weights, key_fault)


def port_trouble(state: RunState, states: Iterable[RunState]) -> Trouble | None:
    """Return the trouble if another process listens on a port that the run shares with its owner's other runs.
    ``states`` must contain all of those."""
    from areal.runtime.leases import foreign_listener

    for port in () if state.node else state.spec.shared_ports:
        sessions = {each.shim_pid for each in states if port in each.spec.shared_ports and each.shim_pid is not None}
        if (owner := foreign_listener(port, sessions)) is not None:
            return Trouble("PortShared", f"another process listens on its port and takes calls: {owner}", "stop it")
    return None


def trouble_of(about: Mapping[str, object]) -> Trouble | None:
    """Return the failure that a process reports, beside its readiness, for all its callers' requests; its probe still
    answers."""
    if refusal := about.get("calls_refused"):
        return Trouble("ProviderRefuses", f"calls fail: {refusal}", "give the right key in external.apiKeyFrom")
    why = about.get("journal_failing")
    if not why:
        return None
    message = f"calls are refused, since they cannot be recorded: {why}"
    if about.get("journal_is_corrupt") is True:
        return Trouble("NotRecording", message, "its journal is damaged: `areal restart` replaces the process")
    if about.get("journal_is_full") is False:
        return Trouble("NotRecording", message, "check the disk of $AREAL_HOME: errors (dmesg), quota, file modes")
    return Trouble("NotRecording", message, "free space under $AREAL_HOME")  # also of an earlier version


def notice_of(about: Mapping[str, object]) -> Trouble | None:
    """Return the failure that a process reports for some of its requests; it serves the others."""
    if why := about.get("weights_not_kept"):
        message = f"weight updates fail, since the published version cannot be recorded: {why}"
        lacks_room = about.get("weights_lack_room") is not False
        hint = "free space under $AREAL_HOME" if lacks_room else "check the disk of $AREAL_HOME, and its file modes"
        return Trouble("WeightsNotKept", message, hint)
    damaged = about.get("journal_damaged")
    if type(damaged) is not int or damaged <= 0:
        return None
    listed = about.get("journal_damage")
    named = [str(each) for each in listed] if isinstance(listed, list) else []
    where = f" ({'; '.join(named)}{'; ...' * (len(named) < damaged)})" if named else ""
    message = f"damaged journal entries: {damaged}{where}; calls of their sessions get an error"
    return Trouble("JournalDamaged", message, "docs/troubleshooting.md says how to set the files aside")


def _probed(state: RunState, answer: ProbeResponse | ProbeFailed) -> tuple[Seen, str]:
    path = ready_path(state.spec)
    if isinstance(answer, NoAnswer):
        return Seen.SILENT, f"GET {path}: {answer}{halted_note(state)}"
    if isinstance(answer, ProbeFailed):
        return Seen.REFUSING, f"GET {path}: {answer}"
    data = answer.json()
    if answer.status == 200:
        pid = data.get("pid")
        stat = procfs.read_stat(pid) if isinstance(pid, int) and not state.node else None
        if stat is not None and stat.session != state.shim_pid:
            return Seen.REFUSING, f"another process (pid {pid}) answers on its port"
        return Seen.READY, ""
    reason = data.get("reason") or data.get("status")
    return Seen.NOT_READY, f"GET {path} answers {answer.status}" + (f" ({reason})" if reason else "")


def _table(router: RunState, answer: ProbeResponse | ProbeFailed, has_key: bool) -> Snapshot | str:
    """Return the router's table, or why it could not be read. ``has_key``: whether the key file could be read."""
    why = f"{router.spec.owner} router/0: its table cannot be read: "
    if isinstance(answer, ProbeFailed):
        return f"{why}{answer}"
    data = answer.json()
    if answer.status in (401, 403):
        file = key_file(router.spec)
        if has_key:
            return f"{why}the key in {file} is not the one that it was started with; areal reconcile --yes replaces it"
        return f"{why}the key in {file} cannot be read; put it back, or make it readable"
    if answer.status != 200 or not data:
        return f"{why}GET /table answers {answer.status}"
    from areal.wire.routing import Snapshot  # imported where a table is read: `get` of jobs has none

    return Snapshot.from_json(data)


# Phases, best first: Ready, Suspended, Progressing, Recorded, Degraded, Failed, Unknown; for a job: Pending, Queued,
# Running, Succeeded, Failed, Stopped. Ready requires answers to the probes: if a process did not answer in time, or a
# model's router or gateway does not answer, the phase is Unknown. A stored condition older than the object's generation
# is not trusted.

JOB_FAILED = "JobFailed"
DIED = "ProcessDied"  # only a reconcile restarts it
NO_WORKING_DIR = "WorkingDirMissing"
DEPENDENCY_FAILED = "DependencyFailed"
_REASONS = {Phase.BACKOFF: "Restarting", Phase.CRASHLOOP: "CrashLoop"}
_WELL = ("Ready", "Running", "Succeeded")
_STALLED = (DIED, "CrashLoop", JOB_FAILED, NO_WORKING_DIR, DEPENDENCY_FAILED)  # no recovery without a command
OF_A_PROCESS = ("CrashLoop", "Restarting", "Starting", "NotReady")  # newer than what a command waited for


@dataclass(frozen=True)
class Condition:
    type: str  # Ready | Progressing | Degraded | Stalled
    status: str  # True | False | Unknown
    reason: str
    message: str = ""
    observed_generation: int = 0
    since: float = 0.0

    def to_json(self) -> dict[str, object]:
        return {
            "type": self.type,
            "status": self.status,
            "reason": self.reason,
            "message": self.message,
            "observedGeneration": self.observed_generation,
            "lastTransitionTime": iso(self.since),
        }


@dataclass(frozen=True)
class Health:
    """An object's health: ``ready`` of ``desired`` units, which are processes of a service or replicas of a model."""

    phase: str
    ready: int
    desired: int
    reason: str = ""
    message: str = ""

    @property
    def fraction(self) -> str:
        return f"{self.ready}/{self.desired}"


def working_dir_is_gone(state: RunState) -> bool:
    """Return whether the component last failed to start because its working folder is gone."""
    return state.phase is not Phase.RUNNING and state.death.startswith(NO_FOLDER)


def queued_for(state: RunState) -> str:
    """Return since when a run has been waiting for a node, and the scheduler's reason."""
    since = f" since {iso(state.queued_at)}" if state.queued_at else ""
    return f"queued{since}" + (f": {state.reason}" if state.reason else "")


def best_run(seen: Observed, ref: str, name: str, index: int = 0) -> ObservedRun | None:
    """Return the component's run that serves, or else one that lives, one that may live, or the one that ended last."""
    runs = seen.of(ref, name, index)
    return max(runs, key=lambda run: (serves(run), run.is_live, run.may_live, run.ended_at), default=None)


def serves(run: ObservedRun | None) -> bool:
    return run is not None and run.state.phase is Phase.RUNNING and run.seen is Seen.READY and not run.trouble


def _earlier_start(state: RunState) -> str:
    """Return why a process that is not ready was restarted."""
    last = state.last_exit
    if last is None or not state.restarts:
        return ""
    return f"; restart {state.restarts}, after {last.reason}{f': {last.line}' if last.line else ''}"


def judge(ready: int, desired: int, best: Sequence[ObservedRun | None], *, external: bool = False) -> Health:
    """Return the health of these processes. ``external``: there is no model to load, so a process that is not ready is
    faulty."""
    waiting = [run for run in best if run is not None and not serves(run)]
    if not waiting and None not in best:
        return Health("Ready", ready, desired, "AllReady")
    unknown = [run for run in waiting if run.state.phase is Phase.UNKNOWN]
    if unknown:
        return Health("Unknown", ready, desired, "CannotBeSeen", unknown[0].state.reason)
    down = [run for run in waiting if not run.is_live]
    restarting = [run for run in waiting if run.state.phase is Phase.BACKOFF]
    if down or restarting:
        run = (down or restarting)[0]
        reason = NO_WORKING_DIR if working_dir_is_gone(run.state) else _REASONS.get(run.state.phase, DIED)
        why, phase, last = run.state.death, "Failed", run.state.last_exit
        line = f": {last.line}" if last is not None and last.line else ""
        if reason == "Restarting":
            why, phase = f"{run.state.reason or why}{line}", "Progressing"
        elif reason == "CrashLoop":
            why = f"{run.state.reason or why}{line}; areal apply, or areal restart, starts it again"
        return Health("Degraded" if ready else phase, ready, desired, reason, f"{run.slot}: {why}")
    queued = [run for run in waiting if run.state.phase is Phase.QUEUED]
    if queued:
        why = f"{queued[0].slot}: {queued_for(queued[0].state)}"
        return Health("Degraded" if ready else "Progressing", ready, desired, "Queued", why)
    if None in best:
        return Health("Degraded" if ready else "Missing", ready, desired, "NoProcess", "areal reconcile starts it")
    silent = [run for run in waiting if run.state.phase is Phase.RUNNING and run.seen in (Seen.SILENT, Seen.UNSEEN)]
    if silent:
        why = f"{silent[0].slot}: {silent[0].why or 'it was not asked'}"
        return Health("Degraded" if ready else "Unknown", ready, desired, "NoAnswer", why)
    for run in waiting:
        if run.trouble is not None:
            why = f"{run.slot}: {run.trouble.message}; {run.trouble.hint}"
            return Health("Degraded", ready, desired, run.trouble.reason, why)
    run = max(waiting, key=lambda run: (run.state.restarts > 0, run.seen is Seen.NOT_READY))
    why = f"{run.slot}: {run.why or 'starting'}{_earlier_start(run.state)}"
    if run.seen is Seen.NOT_READY:
        return Health("Degraded" if external else "Progressing", ready, desired, "NotReady", why)
    return Health("Progressing", ready, desired, "Starting", why)


def routed_health(
    seen: Observed, ref: str, name: str, count: int, components: Sequence[str], owner: str, *, recorded: bool = True
) -> Health:
    """Health of ``count`` replicas, each with these ``components``; the last component is behind the router of
    ``owner``, which knows the object as ``name``. ``recorded``: whether the owner is."""
    found = seen.routes.get(owner)
    table, why = (None, found) if found is None or isinstance(found, str) else (found, "")
    entry = table.models.get(name) if table is not None else None
    picked = {worker.id for worker in entry.workers if worker.state == "ready"} if entry is not None else set()
    slots = [[best_run(seen, ref, component, index) for component in components] for index in range(count)]
    best = [run for slot in slots for run in slot]
    serving = [index for index, slot in enumerate(slots) if all(map(serves, slot))]
    sent = {run.replica for run in seen.of(ref) if serves(run) and run.uid in picked}
    routed = [index for index in serving if index in sent]
    if len(serving) < count:
        ready = routed if table is not None else serving
        return judge(len(ready), count, best, external=len(components) == 1)
    if not recorded:
        return Health("Degraded", 0, count, "NoService", f"{owner} is not recorded")
    if table is None:
        return _unseen_routes(owner, "router", best_run(seen, owner, "router"), why, count)
    if len(routed) < count:
        message = f"{len(routed)} of {count} ready replicas get requests; areal reconcile routes them"
        return Health("Degraded" if routed else "Progressing", len(routed), count, "NotRouted", message)
    gateway = best_run(seen, owner, "gateway")
    if not serves(gateway):
        return _unseen_routes(owner, "gateway", gateway, None, count)
    return Health("Ready", count, count, "AllReady")


def _unseen_routes(owner: str, component: str, run: ObservedRun | None, why: object, count: int) -> Health:
    """Return the health of ready replicas whose router or gateway is not known to serve."""
    if run is None or not run.is_live:
        reason = f"{component}/0 of {owner} does not run"
        phase = "Unknown" if component == "router" else "Degraded"  # relays serve on from the last table
    elif run.trouble is not None:
        reason, phase = f"{component}/0 of {owner}: {run.trouble.message}", "Degraded"
    else:
        reason, phase = str(why or f"{component}/0 of {owner}: {run.why or run.state.reason or 'starting'}"), "Unknown"
    return Health(phase, 0, count, f"{component.capitalize()}NotReady", f"the replicas are ready, but {reason}")


def conditions_of(
    health: Health,
    generation: int,
    error: str | None,
    previous: Sequence[Mapping[str, object]],
    now: float,
    notice: Trouble | None = None,
) -> tuple[Condition, ...]:
    """Return the four conditions. An unchanged condition keeps the time of its last transition; a changed one gets
    ``now``, or 0 if the change was only observed some time after it happened. ``notice``: a problem that makes a
    serving object Degraded."""
    whole = health.desired > 0 and health.ready == health.desired
    ready = "Unknown" if health.phase == "Unknown" else str(whole and health.phase in _WELL)
    failed = error is not None
    degraded, reason = failed or health.phase in ("Degraded", "Failed"), health.reason or health.phase
    why_degraded = ("RolloutFailed" if failed else reason, error or "")
    if notice is not None and not degraded:
        degraded, why_degraded = True, (notice.reason, f"{notice.message}; {notice.hint}")
    found = (
        ("Ready", ready, reason, health.message),
        ("Progressing", str(health.phase == "Progressing"), health.phase, ""),
        ("Degraded", str(degraded), *why_degraded),
        ("Stalled", str(health.reason in _STALLED), reason, ""),
    )
    since = {(item.get("type"), item.get("status")): _seconds(item.get("lastTransitionTime"), now) for item in previous}
    return tuple(
        Condition(name, status, why, message, generation, since.get((name, status), now))
        for name, status, why, message in found
    )


def rollout_failure(obj: StoredObject) -> str | None:
    """Return why the last rollout of this generation failed, or None. It is cleared by a later rollout that succeeds,
    and by a command that finds nothing left to do."""
    previous: Sequence[Mapping[str, object]] = obj.status.get("conditions", [])
    mark = {"type": "Degraded", "reason": "RolloutFailed", "observedGeneration": obj.generation}
    failures = [str(each.get("message", "")) for each in previous if mark.items() <= each.items()]
    return (failures[0] if failures else "") or None


def _seconds(text: Any, default: float) -> float:
    try:
        return datetime.fromisoformat(str(text)).timestamp()
    except ValueError:
        return default
