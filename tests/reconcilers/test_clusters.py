"""Plans and slots of objects whose processes a scheduler places: addresses that are known late, queued runs, and the
scheduler's part in their end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from areal.errors import ArealError, TargetFailed, TimedOut
from areal.reconcilers.converge import begun_only, is_overtaken
from areal.reconcilers.execute import claim_slots
from areal.reconcilers.kinds import controller_of
from areal.reconcilers.kinds.job_status import JobPhase, job_status
from areal.reconcilers.observe import Observed, ObservedRun, Seen
from areal.reconcilers.plan import Op, Plan, Report, Verb
from areal.reconcilers.planner import make_plan
from areal.reconcilers.planning import PlanScope, Policy
from areal.reconcilers.prepare import CommandContext, plan_targets
from areal.runtime.backends.base import NODE_HOST, Capacity, Cause, LastExit, Phase, RunState
from areal.state.home import Home
from areal.state.objects import ObjectStore
from tests.reconcilers.worlds import MODEL, SERVICE, created, model, run, service, stored, unchanged, without, world

REMOTE = {"scheduler": {"type": "slurm"}}
VLLM = {"service": "default", "backend": "vllm:d2", "path": "m"}


class Cluster:
    host = NODE_HOST

    def claim_ports(self, count: int, *, owner: str, prefer: Sequence[int] = ()) -> tuple[int, ...]:
        return (24000,)


def plan_of(observed: Observed | None = None, spec: dict[str, object] | None = None, free_gpus: int = 0) -> Plan:
    targets = (created("InferenceService", "default", REMOTE), created("Model", "qwen", {**VLLM, **(spec or {})}))
    queued = replace(observed or Observed(), capacity=Capacity(queued={"slurm": 4}))
    return make_plan(PlanScope(targets), queued, Policy(free_gpus=free_gpus))


def queued(found: ObservedRun, reason: str = "Priority", cause: Cause = Cause.NONE) -> ObservedRun:
    spec = replace(found.state.spec, url=f"http://{NODE_HOST}:24000")
    state = replace(found.state, spec=spec, phase=Phase.QUEUED, reason=reason, cause=cause, pid=None, shim_pid=None)
    return replace(found, state=state, seen=Seen.UNSEEN)


def test_process_starts_after_address_is_known() -> None:
    plan = plan_of()
    by_id = {op.id: op for op in plan.ops}
    needed = {
        f"{op.ref} {op.target}": [by_id[need].target for need in op.needs if by_id[need].verb is Verb.SPAWN]
        for op in plan.ops
        if op.verb is Verb.SPAWN
    }
    assert needed[f"{SERVICE} gateway/0"] == ["router/0"]
    assert [needed[f"{MODEL} data-proxy/{n}"] for n in (0, 1)] == [["engine/0"], ["engine/1"]]
    assert needed[f"{MODEL} engine/0"] == needed[f"{SERVICE} router/0"] == []


def test_agents_start_after_their_gateway() -> None:
    agents = {**REMOTE, "agent": "a:B", "inference": {"service": "default"}}
    targets = (created("InferenceService", "default", REMOTE), created("AgentService", "talk", agents))
    plan = make_plan(PlanScope(targets), Observed(), Policy())
    spawned = {f"{op.ref} {op.target}": op for op in plan.ops if op.verb is Verb.SPAWN}
    gateway = spawned[f"{SERVICE} gateway/0"].id
    assert gateway in spawned["AgentService/talk gateway/0"].needs
    assert gateway in spawned["AgentService/talk data-proxy/0"].needs


def test_no_wait_submits_only_processes_without_addresses() -> None:
    begun = [op.target for op in begun_only(plan_of()).ops if op.verb is Verb.SPAWN]
    assert begun == ["router/0", "engine/0", "engine/1"]


def test_replicas_beyond_free_gpus_are_queued() -> None:
    plan = plan_of(spec={"replicas": 9})
    engines = [op for op in plan.ops if op.verb is Verb.SPAWN and op.target.startswith("engine/")]
    assert len(engines) == 9 and {op.args.gpus for op in engines} == {1}


def test_cluster_slots_use_placeholder_host() -> None:
    plan = plan_of()
    specs = {target.ref: target.object.spec for target in (created("InferenceService", "default", REMOTE),)}
    specs[MODEL] = created("Model", "qwen", VLLM).object.spec
    owners: list[int] = []
    slots = claim_slots(
        plan, Observed(), specs, lambda name: Cluster(), lambda ref: REMOTE["scheduler"], owner_of=owners.append
    )
    assert not owners
    gateway = slots[f"+{SERVICE}/gateway/0"]
    assert (gateway.url, gateway.host, gateway.port) == (f"http://{NODE_HOST}:8080", NODE_HOST, 8080)
    assert {slot.host for slot in slots.values()} == {NODE_HOST}


def test_public_cluster_gateway_is_called_at_its_node() -> None:
    spec = {**REMOTE, "gateway": {"host": "0.0.0.0"}}
    plan = make_plan(PlanScope((created("InferenceService", "default", spec),)), Observed(), Policy())
    slots = claim_slots(plan, Observed(), {SERVICE: spec}, lambda name: Cluster(), lambda ref: REMOTE["scheduler"])
    gateway = slots[f"+{SERVICE}/gateway/0"]
    assert (gateway.host, gateway.url) == ("0.0.0.0", f"http://{NODE_HOST}:8080")


def test_queued_run_is_awaited_without_address() -> None:
    home = service(REMOTE)
    router, gateway = queued(run(home, "router")), run(home, "gateway", routerUrl="http://10.0.0.1:20001")
    plan = make_plan(PlanScope((unchanged(home),)), world([router, gateway]), Policy())
    assert [(op.verb, op.target, op.cause) for op in plan.ops][:1] == [(Verb.AWAIT, "router/0", "queued: Priority")]
    assert not plan.drift and router.url == ""
    health = controller_of("InferenceService").health(SERVICE, home.spec, world([router, gateway]), None)
    assert (health.phase, health.reason) == ("Degraded", "Queued") and "router/0: queued: Priority" in health.message


@pytest.mark.parametrize("cause", [Cause.NODE_LOST, Cause.PREEMPTED, Cause.TIME_LIMIT])
def test_run_ended_by_scheduler_restarts_with_that_cause(cause: Cause) -> None:
    home = service(REMOTE)
    router = run(home, "router", phase=Phase.DEAD)
    last = LastExit(None, None, 5.0, str(cause))
    lost = replace(router, state=replace(router.state, cause=cause, last_exit=last))
    plan = make_plan(PlanScope((unchanged(home),)), world([lost]), Policy())
    assert [(drift.kind, drift.target) for drift in plan.drift] == [(cause, "router/0")]
    assert any(op.verb is Verb.SPAWN and op.cause == f"{cause}: {cause}" for op in plan.ops)


def test_requeued_run_is_drift_and_awaited() -> None:
    home = service(REMOTE)
    router = queued(run(home, "router"), "BeginTime", Cause.REQUEUED)
    plan = make_plan(PlanScope((unchanged(home),)), world([router]), Policy())
    assert [drift.kind for drift in plan.drift] == ["requeued"]
    assert not [op for op in plan.ops if op.verb is Verb.SPAWN and op.target == "router/0"]


JOB = stored("TrainJob", "learn", {"driver": "a:b", **REMOTE})


def driver(phase: Phase, cause: Cause = Cause.NONE, reason: str = "") -> ObservedRun:
    found = run(service(), "router")
    spec = replace(found.state.spec, owner="TrainJob/learn", component="driver", url=None, spec=JOB.spec)
    return replace(found, state=replace(found.state, spec=spec, phase=phase, cause=cause, reason=reason))


@pytest.mark.parametrize(
    ("state", "phase"),
    [
        (driver(Phase.QUEUED, reason="Resources"), JobPhase.QUEUED),
        (driver(Phase.EXITED, Cause.PREEMPTED, "stopped"), JobPhase.LOST),
        (driver(Phase.DEAD, Cause.NODE_LOST), JobPhase.LOST),
        (driver(Phase.EXITED, reason="stopped"), JobPhase.STOPPED),
    ],
)
def test_job_status_includes_scheduler_state(state: ObservedRun, phase: JobPhase) -> None:
    assert job_status([state], suspended=False).phase is phase


def test_preempted_job_continues_with_that_cause() -> None:
    found = driver(Phase.EXITED, Cause.PREEMPTED, "stopped")
    plan = make_plan(PlanScope((unchanged(JOB),)), world([found]), Policy())
    assert [drift.kind for drift in plan.drift] == ["preempted"]
    assert any(op.verb is Verb.SPAWN and op.cause.startswith("preempted") for op in plan.ops)


def test_queued_job_is_left_in_queue() -> None:
    plan = make_plan(PlanScope((unchanged(JOB),)), world([driver(Phase.QUEUED)]), Policy())
    assert plan.is_empty


def test_run_of_silent_scheduler_is_left_alone() -> None:
    item = model()
    observed = without(world([run(item, "engine"), run(item, "data-proxy")]), "qwen-engine-0", Phase.UNKNOWN)
    plan = make_plan(PlanScope((unchanged(service(REMOTE)), unchanged(item))), observed, Policy())
    assert not [op for op in plan.ops if op.verb in (Verb.STOP, Verb.FORGET) or op.target == "engine/0"]


# -- converging


def test_plan_queries_scheduler_once(tmp_path: Path) -> None:
    asked = []

    class Asked:
        def observe(self, uids: Sequence[str] | None = None) -> dict[str, RunState]:
            asked.append(uids)
            return {}

    command = CommandContext(cast(Any, None), ObjectStore(Home(tmp_path)), cast(Any, Asked()))

    plan_targets(command, lambda objects: (unchanged(stored("InferenceService", "default", REMOTE)),), Policy())

    assert asked == [None]


ENDED_BY_ITSELF = {"phase": Phase.EXITED, "reason": "exited 1"}


@pytest.mark.parametrize(
    ("ended", "error", "overtaken"),
    [
        ({"phase": Phase.EXITED, "reason": "stopped"}, TargetFailed("a"), True),
        ({"phase": Phase.EXITED, "reason": "exited 1", "cause": Cause.CANCELLED}, TargetFailed("a"), True),
        ({"phase": Phase.DEAD, "cause": Cause.NODE_LOST}, TargetFailed("a"), True),
        (ENDED_BY_ITSELF, TargetFailed("a"), False),
        ({"phase": Phase.CRASHLOOP}, TargetFailed("a"), False),
        ({"phase": Phase.RUNNING}, TimedOut("a"), False),
    ],
)
def test_process_ended_by_others_during_wait_is_replanned(
    ended: dict[str, Any], error: ArealError, overtaken: bool
) -> None:
    state = replace(run(model(), "engine").state, **ended)
    waits: Op = Op(0, Verb.AWAIT, "Model/qwen", "engine/0", "not ready yet", run="r1")

    assert is_overtaken(Report(Plan(ops=(waits,)), failed={0: error}), lambda uids: {"r1": state}) is overtaken


@pytest.mark.parametrize("verb", [Verb.SPAWN, Verb.KICK])
def test_process_failing_after_start_is_a_failure(verb: Verb) -> None:
    dead = replace(run(model(), "engine").state, phase=Phase.DEAD)
    begun: Op = Op(0, verb, "Model/qwen", "engine/0", "", run="r1")
    waits: Op = Op(1, Verb.AWAIT, "Model/qwen", "engine/0", "", (0,), run="r1")
    report = Report(Plan(ops=(begun, waits)), {0}, {1: TargetFailed("a")})

    assert not is_overtaken(report, lambda uids: {"r1": dead})
    assert not is_overtaken(Report(Plan(ops=(begun, waits)), {0, 1}), lambda uids: {"r1": dead})
