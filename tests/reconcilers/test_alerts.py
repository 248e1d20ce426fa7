"""Alerts of jobs and replicas, from numbers alone."""

from __future__ import annotations

import json
import math
import random
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal.reconcilers.alerts import JobFacts, gather, job_alerts, replica_alerts
from areal.reconcilers.kinds.job_status import JobPhase, JobStatus
from areal.state.home import Home
from areal.wire.processes import WEIGHT_UPDATE_FILE
from areal.wire.training_health import WITHOUT_SPREAD
from tests.cli.conftest import home, record  # noqa: F401

RUNS, ENDED = JobFacts("learn", True, 1, "waited 71% for rollouts"), JobFacts("learn", False, 1)


def learning(count: int, **numbers: Any) -> list[dict[str, Any]]:
    draw = random.Random(1)
    return [
        {
            "step": step,
            "attempt": 1,
            "time": 1000.0 + step,
            "time/step": 1.0,
            "total_steps": 10_000,
            "reward/mean": min(0.9, step / 200) + draw.gauss(0, 0.02),
            "reward/min": 0.0,
            "reward/max": 1.0,
            "grad_norm": 0.5,
            "approx_kl": abs(draw.gauss(0, 0.01)),
            WITHOUT_SPREAD: 0.25,
            **numbers,
        }
        for step in range(1, count + 1)
    ]


def rules(steps: list[dict[str, Any]], facts: JobFacts = ENDED, now: float = 1000.0) -> list[str]:
    return [each.rule for each in job_alerts(steps, facts, now)]


def test_learning_run_has_no_alert() -> None:
    steps = learning(300)
    assert all(rules(steps[:count], RUNS, 1000.0 + count) == [] for count in range(0, 300, 7))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_non_finite_number_alerts_for_ten_steps(value: float) -> None:
    steps = learning(50)
    steps[39] |= {"loss": value, "grad_norm": value}
    (alert,) = job_alerts(steps[:45], ENDED, 0.0)
    word = "NaN" if math.isnan(value) else "infinite"
    assert (alert.rule, alert.severity, alert.step, alert.since) == ("not-finite", "error", 40, 1040.0)
    assert alert.message == f"grad_norm is {word} and 1 more at step 40"
    assert "areal train metrics learn" in alert.next and alert.cause
    assert rules(steps[:39]) == [] == rules(steps[:50])


def test_kl_spike_is_relative_to_median() -> None:
    steps = learning(60)
    steps[55]["approx_kl"] = 2.0
    (alert,) = job_alerts(steps, ENDED, 0.0)
    assert alert.rule == "kl-spike" and alert.message.startswith("approx_kl is 2 at step 56, where 0.0")
    steps[55]["approx_kl"] = 0.05  # below any spike
    assert rules(steps) == []


def test_ten_steps_of_groups_without_spread_raise_alert() -> None:
    steps = [*learning(20), *learning(9, **{WITHOUT_SPREAD: 1.0})]
    assert rules(steps) == []
    (alert,) = job_alerts([*steps, steps[-1]], ENDED, 0.0)
    assert (alert.rule, alert.message) == ("no-spread", "no group with spread for 10 steps")


@given(seed=st.integers(0, 50), best=st.floats(0.5, 0.95), noise=st.floats(0.0, 0.1), count=st.integers(80, 500))
def test_reward_collapse_is_a_fall_to_near_zero(seed: int, best: float, noise: float, count: int) -> None:
    draw = random.Random(seed)
    means = [best] * count + [0.02] * (count // 5)
    steps = [{"reward/mean": mean + draw.gauss(0, noise), "reward/min": 0.0, "reward/max": 1.0} for mean in means]
    assert "reward-collapse" in rules(steps)
    assert "reward-collapse" not in rules(steps[:count])


def test_stall_is_ten_times_longest_step() -> None:
    steps = learning(30)
    assert rules(steps, RUNS, 1030.0 + 119) == [] == rules(steps, ENDED, 9e9)
    (alert,) = job_alerts(steps, RUNS, 1030.0 + 130)
    assert alert.rule == "stall" and alert.message == "no step for 2m10s, where 1s is usual"
    assert alert.cause.endswith("its last step waited 71% for rollouts")
    steps[-5]["time/step"] = 60.0  # an evaluation
    assert rules(steps, RUNS, 1030.0 + 500) == []
    assert rules([], RUNS, 9e9) == []  # it loads its model
    steps[-1]["total_steps"] = 30  # its final save
    assert rules(steps, RUNS, 9e9) == []


@pytest.mark.parametrize(
    ("slow", "waited", "stalls"),
    [
        (1.0, 120, False),  # two minutes
        (1.0, 121, True),
        (30.0, 300, False),  # ten times the longest
        (30.0, 301, True),
        (-30.0, 121, True),  # no time
        (1e300, 121, True),
    ],
)
def test_stall_is_above_two_minutes_and_ten_times_the_longest_of_hundred_steps(
    slow: float, waited: float, stalls: bool
) -> None:
    steps = learning(150)
    steps[-100]["time/step"] = slow
    assert rules(steps, RUNS, 1150.0 + waited) == ["stall"] * stalls
    steps[-100]["time/step"], steps[-101]["time/step"] = 1.0, slow
    assert rules(steps, RUNS, 1150.0 + waited) == ["stall"] * (waited > 120), "earlier steps are forgotten"


def test_stall_has_place_time_and_log_of_its_job() -> None:
    steps = learning(5)
    (alert,) = job_alerts(steps, JobFacts("learn", True, 1, "training"), 9e9)
    assert (alert.severity, alert.object, alert.step, alert.since) == ("error", "TrainJob/learn", 5, 1005.0)
    assert alert.next == "areal train logs learn -n 50" and "its last step" not in alert.cause
    bare = [{"step": 1, "time": 1000.0}]
    (alert,) = job_alerts(bare, JobFacts("learn", True, 1), 1200.0)
    assert alert.message == "no step for 3m20s", "no step says what is usual"
    assert rules([{"step": 1}], RUNS, 9e9) == [] == rules([{"step": 1, "time": "soon"}], RUNS, 9e9)
    assert rules([{"step": 7, "total_steps": 6, "time": 0.0}], RUNS, 9e9) == []


def test_warning_has_severity_of_its_rule_and_time_of_its_step() -> None:
    steps = learning(200, **{"reward/mean": 0.25, "reward/max": 1.0})
    (alert,) = job_alerts(steps, ENDED, 0.0)
    assert (alert.rule, alert.severity, alert.step, alert.since) == ("flat-reward", "warning", 1, None)
    assert alert.next == "areal train trajectories learn --step 200 --sort best"
    (alert,) = job_alerts(steps[-40:], ENDED, 0.0)
    assert (alert.step, alert.since) == (161, 1161.0)
    (alert,) = job_alerts(learning(20, grad_norm=0.0), ENDED, 0.0)
    assert (alert.rule, alert.severity, alert.next) == (
        "no-spread",
        "warning",
        "areal train trajectories learn --step 20",
    )


def test_restart_loop_is_two_starts_without_a_step() -> None:
    steps = learning(5)
    assert rules(steps, JobFacts("learn", True, 2), 1005.0) == []
    (alert,) = job_alerts(steps, JobFacts("learn", True, 3), 1005.0)
    assert (alert.rule, alert.next) == ("restart-loop", "areal train logs learn --attempt 2")
    assert rules([], JobFacts("learn", True, 3), 1005.0) == ["restart-loop"]
    assert alert.message == "it was started 2 times without finishing a step"
    assert (alert.severity, alert.object, alert.step) == ("error", "TrainJob/learn", 5)
    assert rules([], JobFacts("learn", True, 1), 1005.0) == [] == rules([], JobFacts("learn", True, 2), 1005.0)
    assert rules(steps, JobFacts("learn", False, 3), 1005.0) == [], "it runs no longer"
    assert rules([{"attempt": 2}], JobFacts("learn", True, 3), 0.0) == []
    assert rules([{"attempt": 2}], JobFacts("learn", True, 4), 0.0) == ["restart-loop"]


def test_replica_two_versions_behind_is_named() -> None:
    workers = [
        {"url": "http://a", "version": 7, "state": ""},
        {"url": "http://b", "version": 5},
        {"url": "http://c", "version": None},
    ]
    (alert,) = replica_alerts("learn", [{"version": 7, "inference_workers": workers}])
    assert alert.message == "http://b serves version 5, where 7 is published"
    assert (alert.rule, alert.severity, alert.object) == ("replica-behind", "warning", "TrainJob/learn")
    assert alert.next == "areal weight-update status --service learn"
    assert replica_alerts("learn", [{"version": 6, "inference_workers": workers}, {"version": None}, {}]) == []
    both, (alert,) = (replica_alerts("learn", [{"version": now, "inference_workers": workers}]) for now in (8, 9))
    assert [each.message for each in both] == ["http://b serves version 5, where 8 is published"]
    assert alert.message == "http://a serves version 7, where 9 is published, and 1 more"


class _Pairs(BaseHTTPRequestHandler):
    """A weight-update gateway whose second worker is two versions behind."""

    def do_GET(self) -> None:
        workers = [{"url": "http://a", "version": 7}, {"url": "http://b", "version": 5}]
        body = json.dumps({"pairs": [{"version": 7, "inference_workers": workers}]}).encode()
        self.send_response(200 if self.path == "/pairs" else 404)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        pass


@pytest.mark.parametrize(("phase", "asks"), [(JobPhase.RUNNING, True), (JobPhase.FAILED, False)])
def test_replicas_of_running_jobs_are_asked_for(
    home: Home,  # noqa: F811
    record: Any,  # noqa: F811
    phase: JobPhase,
    asks: bool,
) -> None:
    job = record("TrainJob", "learn", {"driver": "m:f"})
    with ThreadingHTTPServer(("127.0.0.1", 0), _Pairs) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        folder = home.jobs / "learn"
        folder.mkdir(parents=True)
        file = {"url": f"http://127.0.0.1:{server.server_port}", "pid": 1, "admin_key_file": None}
        (folder / WEIGHT_UPDATE_FILE).write_text(json.dumps(file))

        def found(**options: bool) -> list[str]:
            statuses = {"learn": JobStatus(phase, attempt=3)}
            alerts = gather(home, [job], statuses, {"learn": learning(5)}, **options)
            return [each.rule for each in alerts if each.rule != "stall"]

        of_steps = ["restart-loop"] if phase is JobPhase.RUNNING else []
        assert found() == [*of_steps, *["replica-behind"] * asks]
        assert found(with_replicas=False) == of_steps
        server.shutdown()
    assert found() == of_steps, "a gateway that has ended"


NAMES = [
    "step",
    "attempt",
    "time",
    "time/step",
    "total_steps",
    "grad_norm",
    "reward/mean",
    "reward/min",
    "reward/max",
    "approx_kl",
    "ref_kl",
    WITHOUT_SPREAD,
    "loss",
]


@given(
    st.lists(
        st.dictionaries(
            st.sampled_from(NAMES), st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=3)
        ),
        max_size=80,
    ),
    st.integers(0, 5),
    st.floats(0, 2e9),
    st.integers(1, 40),
)
def test_job_alerts_accept_any_numbers(steps: list[dict[str, Any]], attempt: int, now: float, times: int) -> None:
    for alert in job_alerts(steps * times, JobFacts("learn", True, attempt), now):
        assert alert.message and alert.cause and alert.next.startswith("areal ")


@given(
    st.lists(
        st.dictionaries(
            st.sampled_from(["version", "inference_workers"]),
            st.none()
            | st.integers()
            | st.lists(
                st.none() | st.dictionaries(st.sampled_from(["url", "version"]), st.none() | st.integers() | st.text())
            ),
        ),
        max_size=5,
    )
)
def test_replica_alerts_accept_any_pairs(pairs: list[dict[str, Any]]) -> None:
    replica_alerts("learn", pairs)
