"""Health and conditions of an object, from what was seen of its processes. Pure; standard library only.

Phases, best first: Ready, Suspended, Progressing, Recorded, Degraded, Failed, Unknown; a job's: Pending, Running,
Succeeded, Failed, Stopped. Ready is only what was asked and has answered: a process that did not answer in time, a
model whose router or gateway says nothing, is Unknown. A stored condition that is older than the object's generation
is not trusted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from areal.reconcilers.observe import ObservedRun, Seen
from areal.runtime.backends.base import Phase

JOB_FAILED = "JobFailed"
DIED = "ProcessDied"  # nobody restarts it but a reconcile
_REASONS = {Phase.BACKOFF: "Restarting", Phase.CRASHLOOP: "CrashLoop"}
_WELL = ("Ready", "Running", "Succeeded")
_STALLED = (DIED, "CrashLoop", JOB_FAILED)  # it will not get better by itself


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


def best_run(runs: Sequence[ObservedRun], name: str, index: int = 0) -> ObservedRun | None:
    mine = [run for run in runs if run.state.spec.component == name and run.replica == index]
    return max(mine, key=lambda run: (serves(run), run.is_live, run.ended_at), default=None)


def serves(run: ObservedRun | None) -> bool:
    return run is not None and run.state.phase is Phase.RUNNING and run.seen is Seen.READY


def judge(ready: int, desired: int, best: Sequence[ObservedRun | None], *, external: bool = False) -> Health:
    """``external``: there is no model to load, so a process that says that it is not ready has found a fault."""
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
        Condition("Progressing", str(health.phase == "Progressing"), health.phase, "", generation),
        Condition(
            "Degraded",
            str(failed or health.phase in ("Degraded", "Failed")),
            "RolloutFailed" if failed else health.reason or health.phase,
            error or "",
            generation,
        ),
        Condition("Stalled", str(health.reason in _STALLED), health.reason or health.phase, "", generation),
    )
    since = {(item.get("type"), item.get("status")): _seconds(item.get("lastTransitionTime"), now) for item in previous}
    return tuple(
        Condition(c.type, c.status, c.reason, c.message, c.observed_generation, since.get((c.type, c.status), now))
        for c in found
    )


def _seconds(text: Any, default: float) -> float:
    try:
        return datetime.fromisoformat(str(text)).timestamp()
    except ValueError:
        return default


def iso(at: float) -> str | None:
    """Seconds since the epoch as RFC 3339 in UTC; None for 0."""
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ") if at else None
