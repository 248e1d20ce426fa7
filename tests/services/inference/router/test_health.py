from __future__ import annotations

from functools import reduce

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal.services.inference.router.health import ProbeResult, WorkerHealth
from areal.wire.fields import read_fields
from areal.wire.routing import DEFAULT_READINESS, Readiness


def after(*answers: ProbeResult) -> WorkerHealth:
    return reduce(WorkerHealth.after, answers, WorkerHealth())


def test_new_worker_becomes_healthy_at_first_answer() -> None:
    assert not after().healthy
    assert not after(ProbeResult.LOST).healthy
    assert after(ProbeResult.LOST, ProbeResult.READY).healthy


def test_worker_dies_after_three_lost_probes_in_a_row() -> None:
    assert after(ProbeResult.READY, *[ProbeResult.LOST] * (DEFAULT_READINESS.failure_threshold - 1)).healthy
    assert not after(ProbeResult.READY, *[ProbeResult.LOST] * DEFAULT_READINESS.failure_threshold).healthy
    assert after(
        ProbeResult.READY, ProbeResult.LOST, ProbeResult.LOST, ProbeResult.READY, ProbeResult.LOST, ProbeResult.LOST
    ).healthy


def test_dead_worker_needs_two_good_answers_in_a_row() -> None:
    dead = after(ProbeResult.READY, *[ProbeResult.LOST] * DEFAULT_READINESS.failure_threshold)
    assert not dead.after(ProbeResult.READY).healthy
    assert not dead.after(ProbeResult.READY).after(ProbeResult.LOST).after(ProbeResult.READY).healthy
    assert reduce(WorkerHealth.after, [ProbeResult.READY] * DEFAULT_READINESS.success_threshold, dead).healthy


def test_not_ready_answer_counts_at_once() -> None:
    assert not after(ProbeResult.READY, ProbeResult.NOT_READY).healthy


def test_draining_worker_is_alive_but_leaving() -> None:
    leaving = after(ProbeResult.READY, ProbeResult.DRAINING)
    assert leaving.healthy and leaving.leaving
    assert not leaving.after(ProbeResult.READY).leaving


PROBES = {"R": ProbeResult.READY, "D": ProbeResult.DRAINING, "N": ProbeResult.NOT_READY, "L": ProbeResult.LOST}


@pytest.mark.parametrize(
    ("probes", "healthy", "in_doubt"),
    [
        ("", False, False),
        ("L", False, False),
        ("N", False, False),
        ("NR", True, False),  # it was never ready before
        ("R", True, False),
        ("RL", True, True),
        ("RLL", True, True),
        ("RLLL", False, False),
        ("RLLLL", False, False),
        ("RLLLR", False, True),
        ("RLLLRL", False, False),
        ("RLLLRR", True, False),
        ("RN", False, False),
        ("RNR", False, True),
        ("RNRR", True, False),
        ("D", True, False),
        ("DLLL", False, False),
        ("DLLLR", False, True),  # it was healthy once
        ("RDLR", True, False),
    ],
)
def test_health_after_a_history_of_probes(probes: str, healthy: bool, in_doubt: bool) -> None:
    found = after(*(PROBES[each] for each in probes))
    assert (found.healthy, found.in_doubt) == (healthy, in_doubt)
    assert found.seen is bool(set(probes) - {"L"}), "it has answered"


def test_thresholds_come_from_model() -> None:
    rules = Readiness(failure_threshold=1, success_threshold=3)
    lost = after(ProbeResult.READY).after(ProbeResult.LOST, rules)
    assert not lost.healthy
    twice = lost.after(ProbeResult.READY, rules).after(ProbeResult.READY, rules)
    assert not twice.healthy and twice.after(ProbeResult.READY, rules).healthy


@pytest.mark.parametrize(
    "given",
    [
        {"period_seconds": 0},
        {"failure_threshold": 1.5},
        {"timeout_seconds": "1"},
        {"period": 1},
        {"period_seconds": True},
    ],
)
def test_invalid_readiness_is_refused_by_name(given: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(given))):
        read_fields(Readiness, given)


@given(st.lists(st.sampled_from(ProbeResult)))
def test_health_never_moves_against_the_answer(answers: list[ProbeResult]) -> None:
    health = WorkerHealth()
    for answer in answers:
        before, health = health, health.after(answer)
        if answer in (ProbeResult.LOST, ProbeResult.NOT_READY):
            assert before.healthy or not health.healthy
        else:
            assert health.healthy or not before.healthy
