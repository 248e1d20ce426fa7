"""Plan a TrainJob: one driver that runs to its end. Pure.

It starts when the model that it samples from is there, and is stopped before that model goes. A job that has finished
is never run again, whatever is applied: another spec is another job (``--replace``), and `areal restart` asks for
another run of the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from areal.errors import NoCapacity
from areal.reconcilers.capacity import GpuPool
from areal.reconcilers.desired import Target
from areal.reconcilers.findings import Findings
from areal.reconcilers.job_phase import DRIVER, JobPhase, JobStanding, standing
from areal.reconcilers.model_work import Policy
from areal.reconcilers.observed import Observed, ObservedRun
from areal.reconcilers.plan import Drift, PlanBuilder, Verb
from areal.reconcilers.processes import end_cause, erase, stop_in_order, stoppable, superseded
from areal.resources.registry import effective
from areal.resources.train_job import JobRestart, TrainJobSpec

TARGET = f"{DRIVER}/0"


@dataclass
class JobWork:
    """What planning one job needs. ``recorded``: the op that records it."""

    build: PlanBuilder
    target: Target
    spec: TrainJobSpec
    observed: Observed
    findings: Findings
    policy: Policy
    gpus: GpuPool
    recorded: tuple[int, ...] = ()

    @property
    def ref(self) -> str:
        return self.target.ref

    @property
    def runs(self) -> tuple[ObservedRun, ...]:
        return self.observed.of(self.ref, DRIVER)

    @property
    def grace(self) -> dict[str, Any]:
        return {} if self.policy.grace_s is None else {"graceSeconds": self.policy.grace_s}


_KEPT = 3  # starts by a person whose output can still be read; each has all attempts of its own


def gpus_of(spec: TrainJobSpec, *, machine_has_some: bool) -> int:
    """Of all of the job's processes."""
    each = spec.resources.gpus if spec.resources.gpus is not None else int(machine_has_some)
    return each * spec.resources.processes_per_node


def plan_job(work: JobWork) -> None:
    """Raises NoCapacity."""
    now = standing(work.runs, suspended=work.spec.suspend)
    if now.phase is JobPhase.UNKNOWN:
        work.findings.cannot_see(work.ref, [run for run in work.runs if not run.is_live and run.may_live])
        return
    if work.spec.suspend:
        _stop(work, now, "suspended")
        return
    cause = _why_start(work, now)
    if cause:
        _start(work, now, cause, (*work.recorded, *_stop(work, now, cause)))


def _why_start(work: JobWork, now: JobStanding) -> str:
    """Why another run is due; "" when none is."""
    asked = str(work.target.object.status.get("restartedAt", ""))
    told = str(now.run.state.spec.inputs.get("restartedAt", "")) if now.run is not None else asked
    if asked != told:
        return "restart requested"
    if now.phase is JobPhase.PENDING:
        return "no process"
    if now.phase is JobPhase.STOPPED:
        return f"resumes after attempt {now.attempt}"
    if now.phase is JobPhase.RUNNING and now.run is not None and _restart_of(now.run) != work.spec.restart:
        return "spec.restart changed"
    if now.phase is JobPhase.LOST and work.spec.restart.policy != "Never":
        work.findings.drift.append(Drift(work.ref, "process-died", TARGET, now.message))
        return f"process-died: {now.message}"
    return ""


def _restart_of(run: ObservedRun) -> JobRestart:
    """What its supervisor goes by."""
    spec: TrainJobSpec = effective("TrainJob", run.state.spec.spec)
    return spec.restart


def _restarts_left(work: JobWork, now: JobStanding) -> int:
    """How often a failed driver may still be started again. A person's restart or resume begins anew; a supervisor that
    was killed, as all are by a reboot, is no failure of the driver and does not count."""
    restart = work.spec.restart
    if restart.policy == "Never":
        return 0
    if now.run is None or now.phase is not JobPhase.LOST:
        return restart.max_restarts
    allowed = int(now.run.state.spec.inputs.get("restartsAllowed", restart.max_restarts))
    return allowed - now.run.state.restarts


def _start(work: JobWork, now: JobStanding, cause: str, needs: Sequence[int]) -> None:
    inputs = {
        "attempt": now.attempt + 1,
        "restartsAllowed": max(0, _restarts_left(work, now)),
        "restartedAt": str(work.target.object.status.get("restartedAt", "")),
    }
    count = gpus_of(work.spec, machine_has_some=bool(work.observed.capacity.gpus))
    if count > work.gpus.available:
        raise NoCapacity(
            f"{work.ref} needs {count} GPUs (spec.resources); {work.gpus.available} are free",
            hint="areal get processes -o wide shows who holds the GPUs; resources: {gpus: 0} trains without",
        )
    needs = (*needs, *work.gpus.take(count, work.ref), *_called_first(work))
    for old in superseded(work.runs, _KEPT):
        work.build.add(Verb.FORGET, work.ref, TARGET, "an older record", needs=needs, run=old.uid)
    args = {"inputs": inputs, "gpus": count}
    work.build.add(Verb.SPAWN, work.ref, TARGET, cause, needs=needs, run=f"+{work.ref}/{TARGET}", args=args)


def _called_first(work: JobWork) -> tuple[int, ...]:
    """Ops of what the job samples from and depends on: it starts when they have succeeded."""
    needed = set(work.target.object.depends_on)
    if work.spec.rollout is not None:
        service = f"InferenceService/{work.spec.rollout.service}"
        routed = {op.ref for op in work.build.ops() if op.verb is Verb.ROUTE and op.args["service"] == service}
        model = work.spec.rollout.model
        needed |= {service, *([f"Model/{model}"] if model else routed)}  # which one is meant, the driver knows
    awaited = (Verb.ROUTE, Verb.SETTLE, Verb.AWAIT)
    return tuple(op.id for op in work.build.ops() if op.ref in needed and op.verb in awaited)


def _stop(work: JobWork, now: JobStanding, cause: str) -> tuple[int, ...]:
    """End what lives, and what a supervisor that died has left."""
    ending = [run for run in work.runs if run.is_live or (run.leaves_session and run is now.run)]
    return stop_in_order(work.build, work.ref, ending, [DRIVER], cause, work.recorded, work.grace) if ending else ()


def plan_job_stop(work: JobWork) -> tuple[int, ...]:
    """First half of a deletion: the driver ends before what it samples from does."""
    runs = stoppable(work.runs)
    return stop_in_order(work.build, work.ref, runs, [DRIVER], end_cause(work.target), (), work.grace) if runs else ()


def plan_job_end(work: JobWork, needs: Sequence[int]) -> int:
    """Second half: its records and the object. What it made stays in its folder."""
    return erase(work.build, work.target, work.observed, needs)
