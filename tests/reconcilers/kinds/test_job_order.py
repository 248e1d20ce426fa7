"""What waits for a job, until when, and what its status says meanwhile."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from areal.reconcilers.desired import Target, target_for, with_layer
from areal.reconcilers.kinds.job_plan import following_jobs
from areal.reconcilers.observe import Observed, ObservedRun
from areal.reconcilers.operations import SUSPEND
from areal.reconcilers.plan import Verb
from areal.reconcilers.planner import make_plan
from areal.reconcilers.planning import PlanScope, Policy
from areal.reconcilers.status import health_of
from areal.runtime.backends.base import LastExit, Phase, RunSpec, RunState
from areal.state.records import JOB, StoredObject
from tests.reconcilers.worlds import created, wish

SPEC: dict[str, Any] = {"driver": "my.code:main", "resources": {"gpus": 0}, "restart": {"policy": "Never"}}
SFT, RW, PPO = "TrainJob/sft", "TrainJob/rw", "TrainJob/ppo"


def job(name: str, *needs: str, **spec: Any) -> Target:
    wanted = wish("TrainJob", name, {**SPEC, **spec}, depends_on=needs)
    return target_for(wanted, None, set_name=None, force_conflicts=False, replace_it=False)


def tuned(*needs: str) -> Target:
    spec = {"service": "default", "backend": "embedded:d1", "path": "/not/there/yet"}
    wanted = wish("Model", "tuned", spec, depends_on=needs)
    return target_for(wanted, None, set_name=None, force_conflicts=False, replace_it=False)


def ran(ref: str, phase: Phase = Phase.RUNNING, code: int | None = None) -> RunState:
    spec = RunSpec(f"{ref}-1", ref, "driver", 0, ("python",), spec=SPEC, inputs={"attempt": 1})
    last = None if code is None else LastExit(code, None, 5.0, f"exited {code}")
    return RunState(spec, phase, pid=7, shim_pid=6, last_exit=last, reason=f"exited {code}")


DONE = {ref: ran(ref, Phase.EXITED, 0) for ref in (SFT, RW)}


def following(targets: list[Target], stored: list[StoredObject], *states: RunState) -> dict[str, Target]:
    return {target.ref: target for target in following_jobs(targets, stored, states)}


def awaited(found: Mapping[str, Target]) -> dict[str, str]:
    return {ref: target.object.awaits for ref, target in found.items()}


def recorded(found: Mapping[str, Target]) -> list[StoredObject]:
    return [replace(target.object, uid=ref) for ref, target in found.items()]


@pytest.fixture
def chain() -> list[Target]:
    sampling = job("ppo", RW, rollout={"service": "default", "model": "tuned"})
    return [created("InferenceService", "default", {}), tuned(SFT), job("sft"), job("rw", SFT), sampling]


def test_new_objects_wait_for_first_unfinished_job(chain: list[Target]) -> None:
    found = following(chain, [])
    assert awaited(found) == {
        "InferenceService/default": "",
        "Model/tuned": SFT,
        SFT: "",
        RW: SFT,
        PPO: SFT,
    }
    plan = make_plan(PlanScope(tuple(found.values())), Observed(), Policy())
    started = {op.ref for op in plan.ops if op.verb is Verb.SPAWN}
    assert started == {"InferenceService/default", SFT}
    planned = {item.ref: (item.action, item.cause) for item in plan.objects}
    assert planned[RW] == planned["Model/tuned"] == ("create", f"waits for {SFT}")


def test_job_starts_after_predecessors_succeed_and_continues(chain: list[Target]) -> None:
    stored = recorded(following(chain, []))
    same = [Target(item, "unchanged") for item in stored]
    assert {target.action for target in following(same, stored, ran(SFT)).values()} == {"unchanged"}
    after = following(same, stored, DONE[SFT])
    assert awaited(after) == {"InferenceService/default": "", "Model/tuned": "", SFT: "", RW: "", PPO: RW}
    assert after[RW].cause == f"{SFT} has succeeded" and not after[RW].object.spec.get("suspend")
    stored = recorded(after)
    same = [Target(item, "unchanged") for item in stored]
    running = following(same, stored, ran(SFT), ran(RW))  # the first one was started again
    assert awaited(running)[RW] == ""
    assert awaited(following(same, stored, DONE[SFT], DONE[RW]))[PPO] == ""


def test_cause_names_job_failure_and_not_its_restart() -> None:
    stored = recorded(following([job("sft"), job("rw", SFT), job("ppo", RW)], []))
    unchanged = [Target(item, "unchanged") for item in stored]
    failed = following(unchanged, stored, ran(SFT, Phase.EXITED, 3))
    assert {failed[ref].cause for ref in (RW, PPO)} == {f"waits for {SFT}, which has failed"}
    asked = replace(stored[0], status={"restartedAt": "now"})
    again = following([Target(asked, "unchanged"), *unchanged[1:]], stored, ran(SFT, Phase.EXITED, 3))
    assert {again[ref].cause for ref in (RW, PPO)} == {f"waits for {SFT}"}


def test_waiting_job_does_not_start_its_service() -> None:
    service = created("InferenceService", "rw", {})
    service = replace(service, object=replace(service.object, owner=RW))
    found = following([service, job("sft"), job("rw", SFT)], [])
    its_service = found["InferenceService/rw"]
    assert its_service.action == "create" and [layer.manager for layer in its_service.object.layers] == ["apply", JOB]
    stored = recorded(found)
    after = following([Target(item, "unchanged") for item in stored], stored, DONE[SFT])
    assert not after["InferenceService/rw"].object.spec.get("suspend")


def test_manual_resume_or_suspend_overrides_waiting() -> None:
    stored = recorded(following([job("sft"), job("rw", SFT)], []))
    first, second = stored
    resumed = with_layer(second, SUSPEND, {"suspend": False}, "resumed")
    found = following([resumed], stored, ran(SFT))[RW]
    assert not found.object.spec["suspend"] and found.object.awaits == ""
    same = [Target(found.object, "unchanged")]
    for state, cause in ((ran(SFT), f"waits for {SFT} no longer"), (DONE[SFT], f"{SFT} has succeeded")):
        assert following(same, [first, found.object], state, ran(RW))[RW].cause == cause
    stopped = with_layer(second, SUSPEND, {"suspend": True}, "suspended").object
    after = following([Target(stopped, "unchanged")], [first, stopped], DONE[SFT])[RW]
    assert after.object.spec["suspend"] and after.object.awaits == ""


@pytest.mark.parametrize(
    ("state", "reason", "message"),
    [
        (None, "Waiting", f"waits for {SFT}, which is Pending"),
        (ran(SFT), "Waiting", f"waits for {SFT}, which is Running"),
        (DONE[SFT], "Waiting", f"{SFT} has succeeded; it starts when another job ends or a process is stopped, or by "),
        (ran(SFT, Phase.EXITED, 3), "DependencyFailed", f"waits for {SFT}, which has failed (attempt 1: exited 3)"),
    ],
)
def test_waiting_object_status_names_job_and_state(state: RunState | None, reason: str, message: str) -> None:
    first, second = recorded(following([job("sft"), job("rw", SFT)], []))
    seen = Observed({SFT: (ObservedRun(state),)} if state is not None else {})
    health = health_of(second, seen, {SFT: first})
    assert (health.phase, health.ready, health.desired, health.reason) == ("Pending", 0, 1, reason)
    assert health.message.startswith(message)
