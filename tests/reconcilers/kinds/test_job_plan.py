"""Jobs as plans: one driver, run once to its end, after what it samples from and before that goes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal.errors import Conflict, NoCapacity
from areal.reconcilers.desired import Target, Wanted, target_for
from areal.reconcilers.kinds import controller_of
from areal.reconcilers.kinds.job_plan import at_rest
from areal.reconcilers.kinds.job_status import JobPhase, job_status
from areal.reconcilers.observe import Observed, ObservedRun
from areal.reconcilers.plan import Plan, Verb
from areal.reconcilers.planner import make_plan
from areal.reconcilers.planning import PlanScope, Policy
from areal.runtime.backends.base import Capacity, LastExit, Phase, RunSpec, RunState
from areal.state.records import APPLY, Layer, StoredObject
from tests.reconcilers.worlds import assess, created, steady, unchanged

JOB = "TrainJob/grpo"
SPEC: dict[str, Any] = {"driver": "my.code:main", "resources": {"gpus": 0}}


def job(spec: Mapping[str, Any] | None = None, **status: str) -> StoredObject:
    layers = (Layer(APPLY, {**SPEC, **(spec or {})}, None, "me", 1.0),)
    return StoredObject("TrainJob", "grpo", "uid-grpo", layers=layers, created_at=1.0, status=status, generation=1)


def driver(
    phase: Phase = Phase.RUNNING,
    *,
    code: int | None = None,
    reason: str = "",
    attempt: int = 1,
    restarts: int = 0,
    allowed: int = 3,
    restarted_at: str = "",
) -> ObservedRun:
    inputs = {"attempt": attempt, "restartsAllowed": allowed, "restartedAt": restarted_at}
    spec = RunSpec(f"grpo-{attempt}", JOB, "driver", 0, ("python",), spec=SPEC, inputs=inputs)
    last = None if code is None else LastExit(code, None, 5.0, f"exited {code}")
    return ObservedRun(RunState(spec, phase, pid=7, shim_pid=6, restarts=restarts, last_exit=last, reason=reason))


DONE = driver(Phase.EXITED, code=0, reason="exited 0")
FAILED = driver(Phase.CRASHLOOP, code=1, restarts=3, reason="3 restarts were not enough")
STOPPED = driver(Phase.EXITED, code=143, reason="stopped")
SWEPT = driver(Phase.EXITED, reason="stopped after its supervisor had died", restarts=1)
LOST = driver(Phase.DEAD, reason="its supervisor died without a word", restarts=1)


def plan_of(*targets: Target, runs: tuple[ObservedRun, ...] = (), gpus: int = 0, policy: Policy | None = None) -> Plan:
    capacity = Capacity(gpus=tuple(f"GPU-{number}" for number in range(gpus)))
    observed = Observed({JOB: runs}, {}, capacity)
    return make_plan(PlanScope(targets), observed, replace(policy or Policy(), free_gpus=gpus))


def ops(plan: Plan) -> list[str]:
    return [f"{op.verb} {op.target}".strip() for op in plan.ops]


@pytest.mark.parametrize(
    ("runs", "suspend", "phase"),
    [
        ((), False, "Pending"),
        ((), True, "Stopped"),
        ((driver(Phase.STARTING),), False, "Running"),
        ((driver(Phase.BACKOFF, code=1, reason="exited 1; next start in 9 s"),), False, "Running"),
        ((DONE,), False, "Succeeded"),
        ((DONE,), True, "Succeeded"),
        ((FAILED,), False, "Failed"),
        ((driver(Phase.EXITED, code=2, reason="exited 2"),), False, "Failed"),
        ((STOPPED,), True, "Stopped"),
        ((LOST,), False, "Failed"),
        ((SWEPT,), False, "Failed"),
        ((SWEPT,), True, "Stopped"),
        ((DONE, driver(attempt=2)), False, "Running"),
        ((driver(Phase.UNKNOWN, reason="another machine"),), False, "Unknown"),
    ],
)
def test_phase_follows_newest_run(runs: tuple[ObservedRun, ...], suspend: bool, phase: str) -> None:
    assert assess(JOB, {"suspend": suspend}, Observed({JOB: runs})).phase == phase


def test_plan_of_a_new_job_starts_its_driver() -> None:
    plan = plan_of(created("TrainJob", "grpo", SPEC))
    assert ops(plan) == ["record", "spawn driver/0"]
    assert plan.ops[1].to_json()["args"] == {
        "inputs": {"attempt": 1, "restartsAllowed": 3, "restartedAt": ""},
        "gpus": 0,
    }


NEVER = {"restart": {"policy": "Never"}}


@pytest.mark.parametrize(
    ("run", "spec", "told"),
    [
        (driver(), {}, None),
        (DONE, {}, None),
        (FAILED, {}, None),  # its result
        (STOPPED, {"suspend": True}, None),
        (driver(Phase.STARTING), {}, ("Running", "Running")),
        (
            driver(Phase.BACKOFF, code=1, reason="exited 1; next start in 9 s"),
            {},
            ("Running", "attempt 1: exited 1; next start in 9 s"),
        ),
        (LOST, NEVER, ("Failed", "attempt 2: its supervisor died without a word")),
    ],
)
def test_plan_that_does_nothing_says_why_a_driver_does_not_run(
    run: ObservedRun, spec: Mapping[str, Any], told: tuple[str, str] | None
) -> None:
    plan = plan_of(unchanged(job(spec)), runs=(run,))
    assert plan.is_empty
    assert [(each.kind, each.target, each.message) for each in plan.drift] == (
        [] if told is None else [("not-ready", *told)]
    )


def test_plan_after_lost_supervisor_uses_remaining_restarts() -> None:
    plan = plan_of(unchanged(job()), runs=(LOST,))
    assert ops(plan) == ["stop driver/0", "spawn driver/0"], "what the dead supervisor left is swept first"
    assert plan.ops[1].args.inputs == {"attempt": 3, "restartsAllowed": 2, "restartedAt": ""}
    assert [drift.kind for drift in plan.drift] == ["process-died"]


def test_plan_continues_after_interrupted_sweep() -> None:
    plan = plan_of(unchanged(job()), runs=(SWEPT,))
    assert ops(plan) == ["spawn driver/0"]
    assert plan.ops[0].args.inputs == {"attempt": 3, "restartsAllowed": 2, "restartedAt": ""}
    assert [drift.kind for drift in plan.drift] == ["process-died"]


def test_plan_of_changed_restart_policy_replaces_running_driver() -> None:
    never = unchanged(job({"restart": {"policy": "Never"}}))
    plan = plan_of(never, runs=(driver(),))
    assert ops(plan) == ["stop driver/0", "spawn driver/0"]
    assert plan.ops[-1].args.inputs["restartsAllowed"] == 0
    assert plan.ops[-1].args.inputs["attempt"] == 2
    for run in (DONE, FAILED):
        assert plan_of(never, runs=(run,)).is_empty


@pytest.mark.parametrize(("policy", "rests"), [("Never", True), ("OnFailure", False)])
def test_lost_job_rests_when_never_restarted(policy: str, rests: bool) -> None:
    lost = unchanged(job({"restart": {"policy": policy}}))
    assert at_rest(lost, [LOST.state]) is rests
    end = controller_of("TrainJob").completion(lost.object.spec, [LOST])
    assert (end.ended, end.running) == (("Failed", False) if rests else ("", True)), "its time to be kept has begun"
    written = ObservedRun(replace(LOST.state, started_at=10.0, logged_at=900.0))
    assert controller_of("TrainJob").completion(lost.object.spec, [written]).ended_at == (900.0 if rests else 0.0)


def test_plan_of_lost_job_without_restarts_left_continues() -> None:
    plan = plan_of(unchanged(job()), runs=(driver(Phase.DEAD, restarts=3, reason="gone"),))
    assert ops(plan) == ["stop driver/0", "spawn driver/0"]
    assert plan.ops[-1].args.inputs["restartsAllowed"] == 0


def test_plan_of_suspend_stops_and_resume_continues_job() -> None:
    assert ops(plan_of(unchanged(job({"suspend": True})), runs=(driver(),))) == ["stop driver/0"]
    plan = plan_of(unchanged(job()), runs=(STOPPED,))
    assert ops(plan) == ["spawn driver/0"]
    assert plan.ops[0].cause == "resumes after attempt 1"
    assert plan.ops[0].args.inputs["attempt"] == 2


@pytest.mark.parametrize("run", [DONE, FAILED, driver()])
def test_plan_of_restart_reruns_finished_job(run: ObservedRun) -> None:
    plan = plan_of(unchanged(job(restartedAt="9.0")), runs=(run,))
    assert ops(plan)[-1] == "spawn driver/0"
    assert plan.ops[-1].args.inputs["restartsAllowed"] == 3
    assert plan_of(unchanged(job(restartedAt="9.0")), runs=(driver(attempt=5, restarted_at="9.0"),)).is_empty


def wanted(spec: Mapping[str, Any]) -> Wanted:
    return Wanted(JOB, "TrainJob", "grpo", {**SPEC, **spec}, {}, {})


def test_changed_spec_needs_replace_to_make_another_job() -> None:
    other = wanted({"overrides": ["lr=1"]})
    with pytest.raises(Conflict, match=r"spec\.overrides"):
        target_for(other, job(), set_name=None, force_conflicts=False, replace_it=False)
    target = target_for(other, job(), set_name=None, force_conflicts=False, replace_it=True)
    plan = plan_of(target, runs=(driver(),))
    assert ops(plan) == ["stop driver/0", "forget driver/0", "erase", "record", "spawn driver/0"]
    assert plan.ops[-1].args.inputs["attempt"] == 1


def test_recreated_job_is_new_once_despite_equal_spec() -> None:
    target = target_for(
        wanted({}), job(), set_name=None, force_conflicts=False, replace_it=False, recreate=(job().uid,)
    )
    plan = plan_of(target, runs=(DONE,))
    assert ops(plan) == ["forget driver/0", "erase", "record", "spawn driver/0"]
    assert plan.ops[-1].args.inputs["attempt"] == 1
    again = target_for(wanted({}), job(), set_name=None, force_conflicts=False, replace_it=False, recreate=("earlier",))
    assert again.action == "unchanged"


def test_local_job_without_config_file_is_unchanged() -> None:
    spec = {"config": "/nowhere/config.yaml"}
    target = target_for(wanted(spec), job(spec), set_name=None, force_conflicts=False, replace_it=False)
    assert target.action == "unchanged"


def test_plan_of_job_deletion_stops_and_erases() -> None:
    plan = plan_of(Target(job(), "delete"), runs=(driver(),), policy=Policy(grace_s=5))
    assert ops(plan) == ["stop driver/0", "forget driver/0", "erase"]
    assert plan.ops[0].to_json()["args"] == {"graceSeconds": 5}


@pytest.mark.parametrize("model", [{"model": "qwen"}, {}], ids=["named", "whichever-it-is"])
def test_driver_starts_after_model_and_stops_before_service(model: dict[str, str]) -> None:
    spec = {"service": "default", "backend": "embedded:d1", "path": "m"}
    sampling = created("TrainJob", "grpo", {**SPEC, "rollout": {"service": "default", **model}})
    plan = plan_of(created("InferenceService", "default", {}), created("Model", "qwen", spec), sampling)
    (spawn,) = [op for op in plan.ops if op.verb is Verb.SPAWN and op.ref == JOB]
    visible = next(op.id for op in plan.ops if op.verb is Verb.SETTLE)
    assert visible in spawn.needs

    home, item, observed = steady()
    running = job({"rollout": {"service": "default", "model": "qwen"}})
    everything = [Target(each, "delete") for each in (home, item, running)]
    observed = replace(observed, runs={**observed.runs, JOB: (driver(),)})
    gone = make_plan(PlanScope(tuple(everything)), observed, Policy())
    (stop,) = [op.id for op in gone.ops if op.ref == JOB and op.verb is Verb.STOP]
    gateway = next(op for op in gone.ops if op.target == "gateway/0" and op.verb is Verb.STOP)
    assert stop in gateway.needs


def test_plan_exceeding_free_gpus_is_refused() -> None:
    hungry = created("TrainJob", "grpo", {**SPEC, "resources": {"gpus": 1, "processesPerNode": 4}})
    with pytest.raises(NoCapacity, match=r"needs 4 GPUs \(spec.resources\); 2 are free"):
        plan_of(hungry, gpus=2)
    assert plan_of(hungry, gpus=4).ops[-1].args.gpus == 4


def test_job_without_gpu_setting_takes_one_if_present() -> None:
    silent = created("TrainJob", "grpo", {"driver": "my.code:main"})
    assert plan_of(silent, gpus=2).ops[-1].args.gpus == 1
    assert plan_of(silent, gpus=0).ops[-1].args.gpus == 0


@pytest.mark.parametrize("busy", [Capacity(leased=("GPU-0",)), Capacity(squatters={"GPU-0": "pid 7"})])
def test_job_without_gpu_setting_is_refused_when_all_are_busy(busy: Capacity) -> None:
    silent = created("TrainJob", "grpo", {"driver": "my.code:main"})
    with pytest.raises(NoCapacity, match="needs 1 GPUs"):
        make_plan(PlanScope((silent,)), Observed({}, {}, busy), Policy())


def test_replaced_job_keeps_its_gpu() -> None:
    silent = job({"resources": {}}, restartedAt="9.0")
    earlier = driver()
    earlier = replace(earlier, state=replace(earlier.state, spec=replace(earlier.state.spec, gpus=("GPU-0",))))
    observed = Observed({JOB: (earlier,)}, {}, Capacity(leased=("GPU-0",)))
    plan = make_plan(PlanScope((unchanged(silent),)), observed, Policy())
    stop, spawn = plan.ops
    assert spawn.args.gpus == 1 and stop.id in spawn.needs


RUNS = st.builds(
    driver,
    st.sampled_from([phase for phase in Phase if phase is not Phase.UNKNOWN]),
    code=st.sampled_from([None, 0, 1]),
    reason=st.sampled_from(["", "stopped", "exited 1"]),
    attempt=st.integers(1, 9),
    restarts=st.integers(0, 4),
)


@given(st.lists(RUNS, max_size=3, unique_by=lambda run: run.uid), st.booleans())
def test_at_most_one_driver_runs_and_finished_job_stays_finished(runs: list[ObservedRun], suspend: bool) -> None:
    plan = plan_of(unchanged(job({"suspend": suspend})), runs=tuple(runs))
    now = job_status(runs, suspended=suspend)
    spawns = [op for op in plan.ops if op.verb is Verb.SPAWN]
    stopped = {op.run for op in plan.ops if op.verb is Verb.STOP}
    assert len(spawns) <= 1
    if spawns:
        assert not suspend and not now.finished
        assert all(run.uid in stopped for run in runs if run.is_live)
    if now.phase is JobPhase.RUNNING and not suspend:
        assert plan.is_empty
