"""The TrainJob kind: a driver that runs to completion."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from areal.numbers import number
from areal.reconcilers.kinds import Completion, Endpoint, KindController, lazy
from areal.reconcilers.kinds.job_status import JobPhase, has_ended, job_status
from areal.reconcilers.observe import (
    DIED,
    JOB_FAILED,
    NO_WORKING_DIR,
    Health,
    Observed,
    ObservedRun,
    working_dir_is_gone,
)
from areal.runtime.backends import Backends
from areal.runtime.backends.base import LIVE, Phase

if TYPE_CHECKING:
    from areal.reconcilers.context import Progress
    from areal.resources.kinds import Ref
    from areal.state.home import Home


def _stage(home: Home, ref: str) -> str | None:
    """Return what a starting job is doing, as its driver reports it."""
    backends = Backends(home.root)
    live = [uid for uid, state in backends.observe().items() if state.spec.owner == ref and state.phase in LIVE]
    found = backends.stage(max(live)) if live else None
    return found.stage if found is not None else None


class TrainJobController(KindController):
    runs_to_completion = True
    columns = (("DRIVER", ("spec", "driver"), True),)
    plan_class = "areal.reconcilers.kinds.job_plan:TrainJobPlan"
    expand = lazy("areal.reconcilers.kinds.job_plan:with_services")
    follow = lazy("areal.reconcilers.kinds.job_plan:following_jobs")
    check_start = lazy("areal.reconcilers.kinds.job_plan:require_job_ids")
    launch = lazy("areal.reconcilers.kinds.job_launch:driver_run")
    faults_before_start = lazy("areal.reconcilers.kinds.job_config:job_faults")

    def neighbour_of(self, spec: Mapping[str, Any]) -> str | None:
        """Return the service of the job's model, which may wait for the weights that the job publishes."""
        rollout = spec.get("rollout") or {}
        return f"InferenceService/{rollout.get('service')}"

    def health(self, ref: str, spec: Mapping[str, object], seen: Observed, host: Mapping[str, Any] | None) -> Health:
        now = job_status(seen.of(ref), suspended=bool(spec.get("suspend")))
        reasons = {JobPhase.FAILED: JOB_FAILED, JobPhase.LOST: DIED, JobPhase.UNKNOWN: "CannotBeSeen"}
        phase = "Failed" if now.phase is JobPhase.LOST else now.phase.value
        reason, message = reasons.get(now.phase, phase), now.message
        state = now.run.state if now.run is not None else None
        works = now.phase is JobPhase.RUNNING and state is not None and state.phase is Phase.RUNNING
        failed = state.last_exit if state is not None and now.phase in (JobPhase.FAILED, JobPhase.RUNNING) else None
        if failed is not None and failed.line:
            message = f"{message or f'the one before {failed.reason}'}: {failed.line}"
        if state is not None and working_dir_is_gone(state):
            reason = NO_WORKING_DIR
        if works and state is not None and state.halted:
            works, reason = False, "Halted"
            message = state.reason or f"pid {state.pid} is stopped by a signal; kill -CONT {state.pid} lets it go on"
        attempt = f"attempt {now.attempt}" if now.attempt > 1 or message else ""
        message = ": ".join(part for part in (attempt, message) if part)
        well = works or now.phase is JobPhase.SUCCEEDED
        return Health(phase, int(well), 0 if now.phase is JobPhase.STOPPED else 1, reason, message)

    def completion(self, spec: Mapping[str, object], runs: Sequence[ObservedRun]) -> Completion:
        now = job_status(runs, suspended=bool(spec.get("suspend")))
        if now.run is not None and has_ended(now, spec):
            phase = JobPhase.FAILED if now.phase is JobPhase.LOST else now.phase
            return Completion(phase.value, now.run.ended_at)
        return Completion(running=now.phase is not JobPhase.STOPPED)

    def progress(self, home: Home, name: str, age_s: float) -> Progress | None:
        """Return the job's current step, the time since its start, and its estimated end."""
        from areal.reconcilers.context import Progress
        from areal.state.job_metrics import bottleneck, eta_s, newest_step

        step = newest_step(home.job_metrics(name))
        if not step:
            stage = _stage(home, f"{self.kind}/{name}")
            return Progress(f"{self.kind}/{name}", stage, elapsed_s=age_s) if stage else None
        reward = step.get("reward/mean")
        parts = [f"reward {number(reward)}"] if isinstance(reward, int | float) else []
        detail = ", ".join([*parts, *filter(None, [bottleneck(step)])])
        total = step.get("total_steps")
        stage = "step" if isinstance(total, int) else f"step {step['step']}"
        return Progress(f"{self.kind}/{name}", stage, step["step"], total, age_s, detail, eta_s(step))

    def keep_output(self, home: Home, ref: Ref, uid: str, logs: Sequence[str]) -> None:
        """Copy the driver's output to the job's folder, which stays. On a full disk it is lost."""
        folder = home.jobs / ref.name
        if logs and folder.is_dir():
            with suppress(OSError):
                (folder / "logs").mkdir(exist_ok=True)
                with (folder / "logs" / f"{uid}.log").open("wb") as kept:
                    for log in logs:
                        kept.write(Path(log).read_bytes())

    def wants_gpus(self, spec: Mapping[str, Any]) -> bool:
        return not spec.get("suspend") and (spec.get("resources") or {}).get("gpus") != 0

    def endpoint(self, spec: Mapping[str, Any], component: str) -> Endpoint | None:
        """Return the rendezvous of a job on several nodes, or None for one node."""
        return Endpoint() if ((spec.get("resources") or {}).get("nodes") or 1) > 1 else None
