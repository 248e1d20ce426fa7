"""How an object is doing, from its spec's few decisive keys and what was seen of its runs and its service. Pure;
standard library only, so that ``areal get`` can use it without reading a single model class.

Phases, best first: Ready, Suspended, Progressing, Recorded, Degraded, Failed, Unknown; a job's: Pending, Running,
Succeeded, Failed, Stopped. Ready is only what was asked and has answered: a process that did not answer in time, a
model whose router or gateway says nothing, is Unknown. Nothing here trusts a stored condition that is older than the
object's generation.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, TypeGuard

from areal.reconcilers.document import iso
from areal.reconcilers.job_phase import FAILED_REASON, JobPhase, standing
from areal.reconcilers.observed import Observed, ObservedRun, RouteTable, Seen
from areal.resources.kinds import served_name
from areal.runtime.backends.base import Phase

DIED = "ProcessDied"  # nobody restarts it but a reconcile
_REASONS = {Phase.BACKOFF: "Restarting", Phase.CRASHLOOP: "CrashLoop"}
_WELL = ("Ready", "Running", "Succeeded")
_STALLED = (DIED, "CrashLoop", FAILED_REASON)  # it will not get better by itself


@dataclass(frozen=True)
class Condition:
    type: str  # Ready | Progressing | Degraded | Stalled
    status: str  # True | False | Unknown
    reason: str
    message: str = ""
    observed_generation: int = 0
    since: float = 0.0

    def to_json(self) -> dict[str, Any]:
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
    """``ready`` of ``desired`` units: processes of a service, replicas of a model."""

    phase: str
    ready: int
    desired: int
    reason: str = ""
    message: str = ""

    @property
    def fraction(self) -> str:
        return f"{self.ready}/{self.desired}"


def desired_replicas(spec: Mapping[str, Any]) -> int:
    """Like ``model.replica_count`` over a sparse spec, without importing the models."""
    if spec.get("suspend"):
        return 0
    if spec.get("external") or spec.get("engineUrl"):
        return 1
    if spec.get("replicas") is not None:
        return int(spec["replicas"])
    found = re.search(r"[:.](?:[a-z]\d+)*?d(\d+)", str(spec.get("backend", "")))
    return int(found[1]) if found else 1


def assess(ref: str, spec: Mapping[str, Any], seen: Observed, service: Mapping[str, Any] | None = None) -> Health:
    """``service`` is the spec of a Model's service, None where it is not recorded."""
    kind, _, name = ref.partition("/")
    if kind == "InferenceService":
        return _assess_service(spec, seen.of(ref))
    if kind == "Model":
        return _assess_model(name, spec, seen, service)
    if kind == "TrainJob":
        return _assess_job(spec, seen.of(ref))
    return Health("Suspended" if spec.get("suspend") else "Recorded", 0, 0)


def _assess_job(spec: Mapping[str, Any], runs: Sequence[ObservedRun]) -> Health:
    now = standing(runs, suspended=bool(spec.get("suspend")))
    reasons = {JobPhase.FAILED: FAILED_REASON, JobPhase.LOST: DIED, JobPhase.UNKNOWN: "CannotBeSeen"}
    phase = "Failed" if now.phase is JobPhase.LOST else now.phase.value
    reason, message = reasons.get(now.phase, phase), now.message
    state = now.run.state if now.run is not None else None
    works = now.phase is JobPhase.RUNNING and state is not None and state.phase is Phase.RUNNING
    if works and state is not None and state.halted:
        works, reason = False, "Halted"
        message = f"pid {state.pid} is stopped by a signal; kill -CONT {state.pid} lets it go on"
    attempt = f"attempt {now.attempt}" if now.attempt > 1 or message else ""
    message = ": ".join(part for part in (attempt, message) if part)
    well = works or now.phase is JobPhase.SUCCEEDED
    return Health(phase, int(well), 0 if now.phase is JobPhase.STOPPED else 1, reason, message)


def _assess_service(spec: Mapping[str, Any], runs: Sequence[ObservedRun]) -> Health:
    if spec.get("suspend"):
        return Health("Suspended", 0, 0)
    best = [_best(runs, name) for name in ("router", "gateway")]
    return _judged(sum(1 for run in best if _serves(run)), len(best), best)


def _assess_model(name: str, spec: Mapping[str, Any], seen: Observed, service: Mapping[str, Any] | None) -> Health:
    """Ready means that users' requests arrive: every replica's processes answer, the router sends requests to each,
    and the gateway answers."""
    count = 0 if service is not None and service.get("suspend") else desired_replicas(spec)
    if count == 0:
        return Health("Suspended", 0, 0)
    owner = f"InferenceService/{spec.get('service', 'default')}"
    names = ("data-proxy",) if spec.get("external") or spec.get("engineUrl") else ("engine", "data-proxy")
    runs, table = seen.of(f"Model/{name}"), seen.routes.get(owner)
    served = served_name(name, spec)
    picked = {uid for uid, _, state in table.models.get(served, ()) if state == "ready"} if _is_table(table) else set()
    best = [_best(runs, component, index) for index in range(count) for component in names]
    serving = [index for index in range(count) if all(_serves(_best(runs, each, index)) for each in names)]
    sent = {run.replica for run in runs if _serves(run) and run.uid in picked}
    routed = [index for index in serving if index in sent]
    if len(serving) < count:
        return _judged(len(routed) if _is_table(table) else len(serving), count, best, external=len(names) == 1)
    if service is None:
        return Health("Degraded", 0, count, "NoService", f"{owner} is not recorded")
    if not _is_table(table):
        return _unseen_routes(owner, "router", _best(seen.of(owner), "router"), table, count)
    if len(routed) < count:
        message = f"{len(routed)} of {count} ready replicas get requests; areal reconcile routes them"
        return Health("Degraded" if routed else "Progressing", len(routed), count, "NotRouted", message)
    gateway = _best(seen.of(owner), "gateway")
    if not _serves(gateway):
        return _unseen_routes(owner, "gateway", gateway, None, count)
    return Health("Ready", count, count, "AllReady")


def _is_table(table: RouteTable | str | None) -> TypeGuard[RouteTable]:
    return isinstance(table, RouteTable)


def _unseen_routes(owner: str, component: str, run: ObservedRun | None, why: object, count: int) -> Health:
    """Every replica is ready, and whether requests reach it nobody can say, or they do not."""
    if run is None or not run.is_live:
        reason = f"{component}/0 of {owner} does not run"
        phase = "Unknown" if component == "router" else "Degraded"  # relays serve on from the last table
    else:
        reason, phase = str(why or f"{component}/0 of {owner}: {run.why or run.state.reason or 'starting'}"), "Unknown"
    return Health(phase, 0, count, f"{component.capitalize()}NotReady", f"the replicas are ready, but {reason}")


def _best(runs: Sequence[ObservedRun], name: str, index: int = 0) -> ObservedRun | None:
    mine = [run for run in runs if run.state.spec.component == name and run.replica == index]
    return max(mine, key=lambda run: (_serves(run), run.is_live, run.ended_at), default=None)


def _serves(run: ObservedRun | None) -> bool:
    return run is not None and run.state.phase is Phase.RUNNING and run.seen is Seen.READY


def _judged(ready: int, desired: int, best: Sequence[ObservedRun | None], *, external: bool = False) -> Health:
    """``external``: there is no model to load, so a process that says that it is not ready has found a fault."""
    waiting = [run for run in best if run is not None and not _serves(run)]
    if not waiting and None not in best:
        return Health("Ready", ready, desired, "AllReady")
    unknown = [run for run in waiting if run.state.phase is Phase.UNKNOWN]
    if unknown:
        return Health("Unknown", ready, desired, "CannotBeSeen", unknown[0].state.reason)
    down = [run for run in waiting if not run.is_live]
    restarting = [run for run in waiting if run.state.phase is Phase.BACKOFF]
    if down or restarting:
        run = (down or restarting)[0]
        last = run.state.last_exit
        why = f"{_slot(run)}: {last.reason if last else run.state.reason}"
        return Health("Degraded" if ready else "Failed", ready, desired, _REASONS.get(run.state.phase, DIED), why)
    if None in best:
        return Health("Degraded" if ready else "Missing", ready, desired, "NoProcess", "areal reconcile starts it")
    silent = [run for run in waiting if run.state.phase is Phase.RUNNING and run.seen in (Seen.SILENT, Seen.UNSEEN)]
    if silent:
        why = f"{_slot(silent[0])}: {silent[0].why or 'it was not asked'}"
        return Health("Degraded" if ready else "Unknown", ready, desired, "NoAnswer", why)
    run = next((run for run in waiting if run.seen is Seen.NOT_READY), waiting[0])
    why = f"{_slot(run)}: {run.why or 'starting'}"
    if run.seen is Seen.NOT_READY:
        return Health("Degraded" if external else "Progressing", ready, desired, "NotReady", why)
    return Health("Progressing", ready, desired, "Starting", why)


def _slot(run: ObservedRun) -> str:
    return f"{run.state.spec.component}/{run.replica}"


def conditions_of(
    health: Health, generation: int, error: str | None, previous: Sequence[Mapping[str, Any]], now: float
) -> tuple[Condition, ...]:
    """The four conditions; a condition that has not changed keeps the time of its last transition."""
    whole = health.desired > 0 and health.ready == health.desired
    ready = "Unknown" if health.phase == "Unknown" else str(whole and health.phase in _WELL)
    failed = error is not None
    found = (
        Condition("Ready", ready, health.reason or health.phase, health.message, generation),
        Condition("Progressing", _bool(health.phase == "Progressing"), health.phase, "", generation),
        Condition(
            "Degraded",
            _bool(failed or health.phase in ("Degraded", "Failed")),
            "RolloutFailed" if failed else health.reason or health.phase,
            error or "",
            generation,
        ),
        Condition("Stalled", _bool(health.reason in _STALLED), health.reason or health.phase, "", generation),
    )
    since = {(item.get("type"), item.get("status")): _seconds(item.get("lastTransitionTime"), now) for item in previous}
    return tuple(
        Condition(c.type, c.status, c.reason, c.message, c.observed_generation, since.get((c.type, c.status), now))
        for c in found
    )


def _bool(value: bool) -> str:
    return "True" if value else "False"


def _seconds(text: Any, default: float) -> float:
    try:
        return datetime.fromisoformat(str(text)).timestamp()
    except ValueError:
        return default
