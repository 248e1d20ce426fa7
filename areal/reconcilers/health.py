"""How an object is doing, from its spec's few decisive keys and its runs. Pure; standard library only, so that
``areal get`` can use it without reading a single model class.

Phases, best first: Ready, Suspended, Progressing, Recorded, Degraded, Failed, Unknown; a job's: Pending, Running,
Succeeded, Failed, Stopped. A parent is as well as the
worst of what it needs. Nothing here trusts a stored condition that is older than the object's generation.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from areal.reconcilers.document import iso
from areal.reconcilers.job_phase import FAILED_REASON, JobPhase, standing
from areal.reconcilers.observed import ObservedRun, Seen
from areal.runtime.backends.base import Phase

DIED = "ProcessDied"  # nobody restarts it but a reconcile
_REASONS = {Phase.BACKOFF: "Restarting", Phase.CRASHLOOP: "CrashLoop"}
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
    if spec.get("external"):
        return 1
    if spec.get("replicas") is not None:
        return int(spec["replicas"])
    found = re.search(r"[:.](?:[a-z]\d+)*?d(\d+)", str(spec.get("backend", "")))
    return int(found[1]) if found else 1


def assess(
    kind: str, spec: Mapping[str, Any], runs: Sequence[ObservedRun], *, service_suspended: bool = False
) -> Health:
    if kind == "InferenceService":
        return _assess_units(spec, runs, [("router", 0), ("gateway", 0)])
    if kind == "Model":
        return _assess_model(spec, runs, service_suspended)
    if kind == "TrainJob":
        return _assess_job(spec, runs)
    return Health("Suspended" if spec.get("suspend") else "Recorded", 0, 0)


def _assess_job(spec: Mapping[str, Any], runs: Sequence[ObservedRun]) -> Health:
    now = standing(runs, suspended=bool(spec.get("suspend")))
    reasons = {JobPhase.FAILED: FAILED_REASON, JobPhase.LOST: DIED, JobPhase.UNKNOWN: "CannotBeSeen"}
    phase = "Failed" if now.phase is JobPhase.LOST else now.phase.value
    well = now.phase in (JobPhase.RUNNING, JobPhase.SUCCEEDED)
    attempt = f"attempt {now.attempt}" if now.attempt > 1 or now.message else ""
    message = ": ".join(part for part in (attempt, now.message) if part)
    return Health(phase, int(well), 0 if now.phase is JobPhase.STOPPED else 1, reasons.get(now.phase, phase), message)


def _assess_units(spec: Mapping[str, Any], runs: Sequence[ObservedRun], units: list[tuple[str, int]]) -> Health:
    if spec.get("suspend"):
        return Health("Suspended", 0, 0)
    best = [_best(runs, name, index) for name, index in units]
    ready = sum(1 for run in best if _serves(run))
    return _judged(ready, len(units), best)


def _assess_model(spec: Mapping[str, Any], runs: Sequence[ObservedRun], service_suspended: bool) -> Health:
    count = 0 if service_suspended else desired_replicas(spec)
    if count == 0:
        return Health("Suspended", 0, 0)
    names = ("data-proxy",) if spec.get("external") else ("engine", "data-proxy")
    ready, seen = 0, []
    for index in range(count):
        best = [_best(runs, name, index) for name in names]
        ready += all(_serves(run) for run in best)
        seen += best
    return _judged(ready, count, seen)


def unrouted(health: Health, routed: int) -> Health:
    """The health of a model whose processes are ready, of which only ``routed`` replicas get requests."""
    message = f"{routed} of {health.ready} ready replicas get requests; areal reconcile routes them"
    return Health("Degraded" if routed else "Progressing", routed, health.desired, "NotRouted", message)


def _best(runs: Sequence[ObservedRun], name: str, index: int) -> ObservedRun | None:
    mine = [run for run in runs if run.state.spec.component == name and run.state.spec.replica == index]
    return max(mine, key=lambda run: (_serves(run), run.is_live, run.ended_at), default=None)


def _serves(run: ObservedRun | None) -> bool:
    return run is not None and run.state.phase is Phase.RUNNING and run.seen in (Seen.READY, Seen.UNSEEN)


def _judged(ready: int, desired: int, best: Sequence[ObservedRun | None]) -> Health:
    if ready == desired:
        return Health("Ready", ready, desired, "AllReady")
    unknown = [run for run in best if run is not None and run.state.phase is Phase.UNKNOWN]
    if unknown:
        return Health("Unknown", ready, desired, "CannotBeSeen", unknown[0].state.reason)
    down = [run for run in best if run is not None and not run.is_live]
    restarting = [run for run in best if run is not None and run.state.phase is Phase.BACKOFF]
    missing = [run for run in best if run is None]
    if down or restarting:
        run = (down or restarting)[0]
        last = run.state.last_exit
        why = f"{run.state.spec.component}/{run.state.spec.replica}: {last.reason if last else run.state.reason}"
        return Health("Degraded" if ready else "Failed", ready, desired, _REASONS.get(run.state.phase, DIED), why)
    if missing:
        return Health("Degraded" if ready else "Missing", ready, desired, "NoProcess", "areal reconcile starts it")
    slow = next(run for run in best if run is not None and not _serves(run))
    why = f"{slow.state.spec.component}/{slow.state.spec.replica}: {slow.why or 'starting'}"
    return Health("Progressing", ready, desired, "Starting", why)


def conditions_of(
    health: Health, generation: int, error: str | None, previous: Sequence[Mapping[str, Any]], now: float
) -> tuple[Condition, ...]:
    """The four conditions; a condition that has not changed keeps the time of its last transition."""
    ready = {"Ready": "True", "Unknown": "Unknown"}.get(health.phase, "False")
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
