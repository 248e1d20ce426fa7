"""The status of a training job, from the runs of its driver. Pure; standard library only, for ``areal get``.

A job has the status of its newest run. A driver that ends by itself with 0 has finished and is never restarted. A
driver that failed is restarted by its supervisor as often as the spec allows; a supervisor that died is replaced within
the same allowance. A job that a person stopped continues when it is resumed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any

from areal.dataclasses import dataclass
from areal.reconcilers.observe import ObservedRun, queued_for
from areal.runtime.backends.base import STOPPED_DEAD, Phase, RunState

DRIVER = "driver"
STOPPED_REASON = "stopped"


class JobPhase(StrEnum):
    PENDING = "Pending"
    QUEUED = "Queued"  # for a node
    RUNNING = "Running"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    STOPPED = "Stopped"
    LOST = "Lost"  # its supervisor died; only a reconcile restarts it
    UNKNOWN = "Unknown"  # it cannot be observed


@dataclass(frozen=True)
class JobStatus:
    phase: JobPhase
    message: str = ""
    attempt: int = 0  # the newest, counted from 1; 0: none yet
    run: ObservedRun | None = None

    @property
    def finished(self) -> bool:
        return self.phase in (JobPhase.SUCCEEDED, JobPhase.FAILED)


def has_ended(now: JobStatus, spec: Mapping[str, Any]) -> bool:
    """Return whether nothing will start the driver again: it has finished, or it was lost and is never restarted."""
    policy = (spec.get("restart") or {}).get("policy")
    return now.finished or (now.phase is JobPhase.LOST and policy == "Never")


def job_status(runs: Sequence[ObservedRun], *, suspended: bool) -> JobStatus:
    """Return the status of a job. ``runs``: those of its driver, in any order."""
    hidden = next((run for run in runs if run.state.phase is Phase.UNKNOWN), None)
    if hidden is not None:
        return JobStatus(JobPhase.UNKNOWN, hidden.state.reason, attempt_of(hidden.state), hidden)
    started = [run for run in runs if run.state.phase is not Phase.INTENDED]
    if not started:
        return JobStatus(JobPhase.STOPPED if suspended else JobPhase.PENDING)
    run = max(started, key=lambda each: (each.is_live, attempt_of(each.state), each.uid))
    if run.state.phase is Phase.QUEUED:
        phase, message = JobPhase.QUEUED, queued_for(run.state)
    elif run.is_live:
        phase, message = JobPhase.RUNNING, run.state.reason if run.state.phase is Phase.BACKOFF else ""
    else:
        phase, message = _ended(run.state, suspended)
    return JobStatus(phase, message, attempt_of(run.state), run)


def attempt_of(state: RunState) -> int:
    """Return the number of the run's newest start of the driver."""
    return int(state.spec.inputs.get("attempt", 1)) + state.restarts


def exit_code(state: RunState) -> int | None:
    """Return the driver's exit status as in a shell; None while it runs or if it is unknown."""
    last = state.last_exit
    if state.phase not in (Phase.EXITED, Phase.CRASHLOOP) or last is None:
        return None
    return last.code if last.code is not None else 128 + (last.signal or 0)


def _ended(state: RunState, suspended: bool) -> tuple[JobPhase, str]:
    why = state.death
    if state.phase is Phase.DEAD or (state.cause and state.reason == STOPPED_REASON):
        words = why if state.phase is Phase.EXITED else state.reason
        return (JobPhase.STOPPED if suspended else JobPhase.LOST), words or state.cause
    if state.reason == STOPPED_DEAD:  # by a command that did not live to start the next attempt
        return (JobPhase.STOPPED if suspended else JobPhase.LOST), state.reason
    if state.reason == STOPPED_REASON:
        return JobPhase.STOPPED, "" if suspended else "it was stopped; areal reconcile starts it again"
    if state.phase is Phase.EXITED and state.last_exit is not None and state.last_exit.code == 0:
        return JobPhase.SUCCEEDED, ""
    return JobPhase.FAILED, why
