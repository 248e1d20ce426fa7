"""`areal get` and `areal diff --drift` agree on jobs: what does not run, waits for nothing and has no result is named
with a cause. A result (Succeeded, Failed, stopped by a command) is none."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from areal.reconcilers.observe import JOB_FAILED, Observed, ObservedRun
from areal.runtime.backends.base import LastExit, Phase
from tests.reconcilers.kinds.test_job_plan import JOB, driver, job, plan_of
from tests.reconcilers.worlds import assess, unchanged

REASONS = ("", "exited 1", "stopped", "its supervisor died without a word", "stopped after its supervisor had died")


@st.composite
def damaged(draw: st.DrawFn, number: int) -> ObservedRun:
    """A driver of any phase, that ended in any way, or whose records say nothing of its end."""
    run = driver(
        draw(st.sampled_from(list(Phase))),
        reason=draw(st.sampled_from(REASONS)),
        attempt=number + 1,
        restarts=draw(st.integers(0, 4)),
        allowed=draw(st.integers(0, 4)),
    )
    exits = (
        None,
        LastExit(0, None, 5.0, "exited 0"),
        LastExit(1, None, 5.0, "exited 1"),
        LastExit(None, 9, 5.0, "killed"),
    )
    return replace(run, state=replace(run.state, last_exit=draw(st.sampled_from(exits))))


@given(st.data(), st.integers(0, 3), st.booleans(), st.sampled_from(["Never", "OnFailure"]))
def test_unhealthy_job_is_in_drift_with_cause(data: st.DataObject, count: int, suspend: bool, policy: str) -> None:
    runs = tuple(data.draw(damaged(number)) for number in range(count))
    item = job({"suspend": suspend, "restart": {"policy": policy}})
    health = assess(JOB, item.spec, Observed({JOB: runs}))
    plan = plan_of(unchanged(item), runs=runs)
    if health.phase == "Succeeded" or health.reason == JOB_FAILED or (health.phase == "Stopped" and suspend):
        return  # a result
    if health.phase == "Queued" or (health.phase == "Running" and health.ready == health.desired):
        return
    named = [drift.message for drift in plan.drift if drift.ref == JOB]
    named += [op.cause for op in plan.ops if op.ref == JOB]
    named += [each.unseen for each in plan.objects if each.ref == JOB]
    assert any(named), (health, plan.to_text())
