"""What is called Ready: only what was asked and has answered, all the way to the gateway."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal.reconcilers import status as waiting
from areal.reconcilers.context import Context, Progress
from areal.reconcilers.doctor import doctor
from areal.reconcilers.observe import (
    Health,
    Observed,
    ObservedRun,
    Seen,
    conditions_of,
    notice_of,
    trouble_of,
)
from areal.reconcilers.planning import Component, decide
from areal.reconcilers.status import _progress, statuses
from areal.resources.kinds import Ref
from areal.runtime.backends import Backends
from areal.runtime.backends.base import LastExit, Phase, RestartPolicy
from areal.state.home import Home
from areal.state.objects import ObjectStore
from areal.state.records import StoredObject
from areal.wire.routing import Snapshot
from tests.reconcilers.kinds.test_job_plan import DONE, FAILED, JOB, STOPPED, driver
from tests.reconcilers.worlds import (
    MODEL,
    SERVICE,
    assess,
    front,
    model,
    replica,
    service,
    snapshot,
    steady,
    table,
    world,
)
from tests.runtime.support import python, run_spec, until


def health(observed: Observed, count: int = 1) -> Health:
    return assess(MODEL, model({"replicas": count}).spec, observed, service().spec)


def changed(observed: Observed, component: str, **changes: Any) -> Observed:
    """The same world, with every run of ``component`` seen or found otherwise."""

    def other(run: ObservedRun) -> ObservedRun:
        if run.state.spec.component != component:
            return run
        phase = changes.get("phase", run.state.phase)
        seen = changes.get("seen", run.seen)
        return replace(run, state=replace(run.state, phase=phase), seen=seen, why="it says so")

    return replace(observed, runs={ref: tuple(map(other, runs)) for ref, runs in observed.runs.items()})


@pytest.mark.parametrize(
    ("answer", "reason", "words"),
    [
        ({"journal_damaged": 2}, "JournalDamaged", "damaged journal entries: 2; calls"),
        ({"journal_damaged": 4, "journal_damage": ["/d/j: torn"]}, "JournalDamaged", "entries: 4 (/d/j: torn; ...);"),
        ({"weights_not_kept": "No space left on device"}, "WeightsNotKept", "No space left on device; free space"),
    ],
)
def test_partial_failure_is_degraded_but_ready(answer: dict[str, Any], reason: str, words: str) -> None:
    notice = notice_of({"journal_damaged": 0, "weights_not_kept": None, **answer})
    found = {each.type: each for each in conditions_of(Health("Ready", 1, 1, "AllReady"), 1, None, (), 0.0, notice)}
    assert (found["Ready"].status, found["Degraded"].status, found["Degraded"].reason) == ("True", "True", reason)
    assert words in found["Degraded"].message
    down = conditions_of(Health("Failed", 0, 1, "CrashLoop", "it died"), 1, None, (), 0.0, notice)
    assert {each.reason for each in down if each.type == "Degraded"} == {"CrashLoop"}


def test_response_without_failure_sets_no_condition() -> None:
    for answer in ({}, {"journal_damaged": 0}, {"journal_damaged": True}, {"weights_not_kept": None}):
        assert notice_of(answer) is None


def ready_condition(found: Health) -> str:
    return next(c.status for c in conditions_of(found, 1, None, (), 0.0) if c.type == "Ready")


def test_model_with_answering_routed_processes_is_ready() -> None:
    _, _, observed = steady(2)
    assert health(observed, 2) == Health("Ready", 2, 2, "AllReady")
    assert assess(SERVICE, service().spec, observed).phase == "Ready"


@pytest.mark.parametrize(
    ("component", "changes", "phase", "reason"),
    [
        ("engine", {"seen": Seen.UNSEEN}, "Unknown", "NoAnswer"),
        ("engine", {"seen": Seen.SILENT}, "Unknown", "NoAnswer"),
        ("engine", {"seen": Seen.REFUSING}, "Progressing", "Starting"),
        ("engine", {"seen": Seen.NOT_READY}, "Progressing", "NotReady"),
        ("engine", {"phase": Phase.STARTING, "seen": Seen.UNSEEN}, "Progressing", "Starting"),
        ("engine", {"phase": Phase.BACKOFF}, "Progressing", "Restarting"),
        ("engine", {"phase": Phase.CRASHLOOP}, "Failed", "CrashLoop"),
        ("engine", {"phase": Phase.DEAD}, "Failed", "ProcessDied"),
        ("engine", {"phase": Phase.UNKNOWN}, "Unknown", "CannotBeSeen"),
        ("data-proxy", {"seen": Seen.SILENT}, "Unknown", "NoAnswer"),
        ("data-proxy", {"phase": Phase.DEAD}, "Failed", "ProcessDied"),
        ("gateway", {"seen": Seen.SILENT}, "Unknown", "GatewayNotReady"),
        ("gateway", {"phase": Phase.DEAD}, "Degraded", "GatewayNotReady"),
    ],
)
def test_unready_model_names_responsible_process(
    component: str, changes: dict[str, object], phase: str, reason: str
) -> None:
    _, _, observed = steady()
    found = health(changed(observed, component, **changes))
    assert (found.phase, found.reason, found.ready) == (phase, reason, 0)
    assert ready_condition(found) == ("Unknown" if phase == "Unknown" else "False")


@pytest.mark.parametrize(
    ("routes", "phase", "reason"),
    [
        (None, "Unknown", "RouterNotReady"),
        ("its table cannot be read: timeout", "Unknown", "RouterNotReady"),
        (snapshot(), "Progressing", "NotRouted"),
        (snapshot({"qwen": [("qwen-data-proxy-0", "", "dead")]}), "Progressing", "NotRouted"),
        (snapshot({"qwen": [("qwen-data-proxy-0", "", "draining")]}), "Progressing", "NotRouted"),
        (snapshot({"other": [("qwen-data-proxy-0", "", "ready")]}), "Progressing", "NotRouted"),
    ],
)
def test_unrouted_model_is_not_ready(routes: Snapshot | str | None, phase: str, reason: str) -> None:
    _, _, observed = steady()
    found = health(replace(observed, routes={} if routes is None else {SERVICE: routes}))
    assert (found.phase, found.reason) == (phase, reason)


def test_model_with_one_of_two_replicas_routed_is_degraded() -> None:
    _, item, observed = steady(2)
    routed = replica(item, 1)[1:]
    found = health(replace(observed, routes={SERVICE: table({"qwen": routed})}), 2)
    assert (found.phase, found.ready, found.reason) == ("Degraded", 1, "NotRouted")


def test_rolling_update_counts_routed_replica() -> None:
    """Predecessor and successor both answer; only one of them gets requests."""
    _, item, observed = steady()
    both = [*front(service()), *replica(item), *replica(item, suffix="-new")]
    assert health(replace(world(both), routes=observed.routes)).phase == "Ready"


def test_invisible_process_is_preferred_to_ended_one() -> None:
    """As in a copied home, or with a damaged record, after a restart: the predecessor says nothing about the health."""
    _, item, observed = steady()
    ended = [
        replace(run, state=replace(run.state, phase=Phase.DEAD, last_exit=LastExit(0, None, 1.0, "stopped")))
        for run in replica(item, suffix="-old")
    ]
    unseen = changed(observed, "engine", phase=Phase.UNKNOWN)
    both = replace(unseen, runs={**unseen.runs, MODEL: (*ended, *unseen.runs[MODEL])})
    assert (health(both).phase, health(both).reason) == ("Unknown", "CannotBeSeen")


def test_model_without_a_service_is_not_ready() -> None:
    _, item, observed = steady()
    assert assess(MODEL, item.spec, observed, None).reason == "NoService"


def test_unready_external_model_is_degraded() -> None:
    item = model({"external": {"url": "http://127.0.0.1:1"}, "backend": None, "path": None})
    proxy = replace(replica(item)[1], seen=Seen.NOT_READY, why="GET /ready answers 503 (it does not take the key)")
    found = assess(MODEL, item.spec, world([*front(service()), proxy], table({})), {})
    assert (found.phase, found.reason) == ("Degraded", "NotReady") and "the key" in found.message


_SEEN = st.sampled_from(list(Seen))
_PHASES = st.sampled_from([Phase.RUNNING] * 6 + list(Phase))
_STATES = st.sampled_from(["ready"] * 6 + ["draining", "cordoned", "dead"])


@given(st.data(), st.integers(1, 3))
def test_ready_requires_every_requested_part_to_answer(data: st.DataObject, count: int) -> None:
    _, _, observed = steady(count)

    def otherwise(runs: Sequence[ObservedRun]) -> tuple[ObservedRun, ...]:
        kept = [run for run in runs if data.draw(st.integers(0, 15))]
        return tuple(
            replace(run, state=replace(run.state, phase=data.draw(_PHASES)), seen=data.draw(_SEEN)) for run in kept
        )

    runs = {ref: otherwise(items) for ref, items in observed.runs.items()}
    workers = tuple((f"qwen-data-proxy-{index}", "", data.draw(_STATES)) for index in range(count))
    tables: list[dict[str, Snapshot | str]] = [{}, {SERVICE: "unreadable"}, {SERVICE: snapshot({"qwen": workers})}]
    routes = data.draw(st.sampled_from(tables))
    world_now = Observed(runs, routes)
    answering = {
        run.uid
        for items in runs.values()
        for run in items
        if run.state.phase is Phase.RUNNING and run.seen is Seen.READY
    }
    routed = (
        {uid for uid, _, state in workers if state == "ready"} if isinstance(routes.get(SERVICE), Snapshot) else set()
    )
    needed = {f"qwen-{name}-{index}" for name in ("engine", "data-proxy") for index in range(count)}
    whole = needed | {"default-gateway-0"} <= answering and {n for n in needed if "proxy" in n} <= routed

    found = health(world_now, count)

    assert (found.phase == "Ready") is whole
    assert (ready_condition(found) == "True") is whole
    assert found.ready <= count and (found.ready < count or whole or found.phase != "Ready")
    front_up = {"default-router-0", "default-gateway-0"} <= answering
    assert (assess(SERVICE, {}, world_now).phase == "Ready") is front_up


@pytest.mark.parametrize(
    "run",
    [
        driver(),
        driver(Phase.STARTING),
        driver(Phase.BACKOFF, code=1),
        driver(Phase.UNKNOWN, reason="elsewhere"),
        DONE,
        FAILED,
        STOPPED,
        replace(driver(), state=replace(driver().state, halted=True)),
    ],
)
@pytest.mark.parametrize("suspend", [False, True])
def test_job_ready_column_matches_ready_condition(run: ObservedRun, suspend: bool) -> None:
    found = assess(JOB, {"suspend": suspend}, Observed({JOB: (run,)}))
    assert (ready_condition(found) == "True") is (found.ready == found.desired == 1)


def test_halted_or_backed_off_job_is_not_ready() -> None:
    halted = replace(driver(), state=replace(driver().state, halted=True))
    for run in (halted, driver(Phase.BACKOFF, code=1)):
        found = assess(JOB, {}, Observed({JOB: (run,)}))
        assert (found.phase, found.fraction) == ("Running", "0/1")
    assert "kill -CONT 7" in assess(JOB, {}, Observed({JOB: (halted,)})).message


# -- the progress of a job that is waited for

STEP = {"step": 12, "total_steps": 200, "time/step": 0.5, "reward/mean": 0.41, "bottleneck": "training"}


@pytest.mark.parametrize(
    ("phase", "step", "told"),
    [
        ("Running", STEP, Progress(JOB, "step", 12, 200, 90.0, "reward 0.41, training", 94.0)),
        ("Running", {"step": 12}, Progress(JOB, "step 12", 12, None, 90.0)),
        ("Running", {}, Progress(JOB, "waiting for completed", elapsed_s=7.0)),
        ("Pending", STEP, Progress(JOB, "waiting for completed", elapsed_s=7.0)),
    ],
)
def test_running_job_reports_step_age_and_eta(tmp_path: Path, phase: str, step: dict[str, Any], told: Progress) -> None:
    home = Home(tmp_path)
    home.job_metrics("grpo").parent.mkdir(parents=True)
    home.job_metrics("grpo").write_text(json.dumps(step) + "\n" if step else "")
    status: Any = SimpleNamespace(phase=phase, age_s=90.0, conditions=())
    assert _progress(home, Ref("TrainJob", "grpo"), status, "completed", 7.0) == told


def test_wait_reports_failed_attempt_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    again = "attempt 2: the one before exited 1: error: no rows"
    messages = ["", again, "attempt 2: exited 1; next start in 3 s: error: no rows", "attempt 3: the one before", ""]
    states = [SimpleNamespace(phase="Running", message=each, age_s=1.0, conditions=()) for each in messages]
    states[-1].phase = "Succeeded"
    seen = iter(states)
    monkeypatch.setattr(waiting, "statuses", lambda home, found, runs: {JOB: next(seen)})
    monkeypatch.setattr(ObjectStore, "get", lambda store, ref: SimpleNamespace(ref=ref))
    monkeypatch.setattr(ObjectStore, "expect", lambda store, ref: None)
    monkeypatch.setattr(waiting, "_fail_if_stalled", lambda *given: None)
    monkeypatch.setattr(waiting, "_POLL_S", 0.0)
    told: list[str] = []
    context = Context(Home(tmp_path), "a", "wait", progress=lambda progress: told.append(progress.stage))
    waiting.wait(context, [Ref("TrainJob", "grpo")], (("completed",),), 60.0)
    assert [each for each in told if "waiting" not in each] == [again, "attempt 3: the one before"]


def test_death_is_judged_by_newest_process_without_exit_record() -> None:
    target = model({"replicas": 1})
    engine, proxy = replica(target)
    stopped = replace(engine.state, phase=Phase.EXITED, pid=None, last_exit=LastExit(0, None, 10.0, "stopped"))
    crashed = LastExit(1, None, 15.0, "exited with 1")  # of an earlier start of the newest
    newest = replace(engine.state, phase=Phase.DEAD, pid=None, started_at=20.0, last_exit=crashed, reason="no word")
    runs = (ObservedRun(newest), ObservedRun(stopped), proxy)
    found = health(Observed({str(target.ref): runs}))
    assert (found.phase, found.message) == ("Failed", "engine/0: no word")
    decision = decide(Component(str(target.ref), "engine", 0, MODEL, target.spec, ()), runs[:2])
    assert decision.drift == ("process-died", "no word")


def test_process_with_legacy_spec_is_compared_as_written() -> None:
    target = model({"replicas": 1})
    engine, _ = replica(target)
    old = {**engine.state.spec.spec, "toolCallParser": "unknown"}
    run = ObservedRun(replace(engine.state, spec=replace(engine.state.spec, spec=old)), Seen.READY)

    def decided(fields: tuple[str, ...]) -> str:
        return decide(Component(str(target.ref), "engine", 0, "Model", target.spec, fields), [run]).cause

    assert decided(("backend", "path")) == ""
    assert decided(("backend", "path", "toolCallParser")) == "spec.toolCallParser changed"


def test_failure_reported_by_driver_is_a_job_condition(tmp_path: Path) -> None:
    home = Home(tmp_path)
    backends = Backends(home.root)
    source = """
import os, time
with open(os.environ["AREAL_STAGE_FILE"], "w") as file:
    file.write('{"stage": "sampling", "failing": "by fault of the reward: no module r"}')
print("written", flush=True)
time.sleep(1000)
"""
    backends.start(run_spec(argv=python(source), owner="TrainJob/learn", component="driver"))
    try:
        runs = until(lambda: found if (found := backends.observe())["r1"].failing else None, "the report")
        item = StoredObject("TrainJob", "learn", "u1")
        status = statuses(home, [item], runs)["TrainJob/learn"]
        degraded = next(each for each in status.conditions if each.type == "Degraded")
        assert (status.phase, degraded.status, degraded.reason) == ("Running", "True", "WorkFails")
        assert "no module r; areal logs TrainJob/learn has all failures" in degraded.message
        assert status.message == degraded.message
        assert degraded.to_json()["lastTransitionTime"] is None, "it is not known since when"
        (found,) = [each for each in doctor(Context(home, "", "")) if "no module r" in each.what]
        assert (found.severity, found.why) == ("error", "WorkFails")
    finally:
        backends.stop("r1")


def test_crash_looping_engine_is_the_message_without_wait(
    tmp_path: Path,
) -> None:
    """Back-off, the next start and the crash loop are each named by the process's own last words."""
    home = Home(tmp_path)
    backends = Backends(home.root)
    mark = {"type": "Degraded", "reason": "RolloutFailed", "observedGeneration": 1, "status": "True"}
    waited = "engine[0] was not ready within 40 s: Connection refused"
    item = model(name="big", generation=1, status={"conditions": [{**mark, "message": waited}]})
    policy = RestartPolicy(budget_count=2, initial_backoff_s=1.0, jitter=0.0)
    source = f"""
import pathlib, time
while not pathlib.Path({str(tmp_path / "die")!r}).exists():
    time.sleep(0.01)
pathlib.Path({str(tmp_path / "die")!r}).unlink()
raise ValueError("32.0 GiB KV cache is needed")
"""
    with socket.create_server(("127.0.0.1", 0)) as closed:  # where nothing listens
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
    backends.start(run_spec(argv=python(source), owner="Model/big", component="engine", restart=policy, url=url))
    waiting = python("import time; time.sleep(1000)")
    backends.start(run_spec("r2", argv=waiting, owner="Model/big", component="data-proxy", url=url))

    def message(phase: Phase, restarts: int) -> str:
        def reached() -> str | None:
            runs = backends.observe()
            if (runs["r1"].phase, runs["r1"].restarts) != (phase, restarts):
                return None
            return statuses(home, [item], runs)["Model/big"].message

        return until(reached, f"{phase} after {restarts} restarts")

    line = "ValueError: 32.0 GiB KV cache is needed"
    try:
        refused = f"engine/0: GET /health: {url}/health: [Errno 111] Connection refused"
        assert message(Phase.RUNNING, 0) == refused
        (tmp_path / "die").touch()
        assert message(Phase.RUNNING, 1) == f"{refused}; restart 1, after exited 1: {line}"
        (tmp_path / "die").touch()
        assert re.fullmatch(f"engine/0: exited 1; next start in [01] s: {line}", message(Phase.BACKOFF, 1))
        message(Phase.RUNNING, 2)
        (tmp_path / "die").touch()
        assert f"2 restarts within 1800 s were not enough: exited 1: {line}" in message(Phase.CRASHLOOP, 2)
    finally:
        backends.stop("r1")
        backends.stop("r2")


@pytest.mark.parametrize(
    ("about", "hint"),
    [
        ({"journal_is_corrupt": True, "journal_is_full": False}, "areal restart"),
        ({"journal_is_corrupt": False, "journal_is_full": True}, "free space"),
        ({"journal_is_corrupt": False, "journal_is_full": False}, "check the disk"),
        ({"journal_is_corrupt": False}, "free space"),
    ],
)
def test_hint_of_failing_journal_fits_its_cause(about: dict[str, bool], hint: str) -> None:
    trouble = trouble_of({"journal_failing": "database error", **about})
    assert trouble is not None and hint in trouble.hint


def test_hint_of_weights_that_are_not_kept_fits_its_cause() -> None:
    notice = notice_of({"journal_damaged": 0, "weights_not_kept": "Input/output error", "weights_lack_room": False})
    assert notice is not None and notice.hint.startswith("check the disk")
