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


def test_worker_never_seen_is_not_healthy_and_becomes_so_at_its_first_answer() -> None:
    assert not after().healthy
    assert not after(ProbeResult.LOST).healthy
    assert after(ProbeResult.LOST, ProbeResult.READY).healthy


def test_one_lost_probe_is_noise_and_three_in_a_row_are_a_death() -> None:
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


def test_worker_that_says_it_is_not_ready_is_believed_at_once() -> None:
    assert not after(ProbeResult.READY, ProbeResult.NOT_READY).healthy


def test_worker_that_says_it_leaves_is_alive_and_gets_nothing_new() -> None:
    leaving = after(ProbeResult.READY, ProbeResult.DRAINING)
    assert leaving.healthy and leaving.leaving
    assert not leaving.after(ProbeResult.READY).leaving


def test_thresholds_are_the_models_own() -> None:
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
def test_readiness_that_is_none_is_refused_by_name(given: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(given))):
        read_fields(Readiness, given)


@given(st.lists(st.sampled_from(ProbeResult)))
def test_health_never_turns_on_an_answer_that_says_the_opposite(answers: list[ProbeResult]) -> None:
    health = WorkerHealth()
    for answer in answers:
        before, health = health, health.after(answer)
        if answer in (ProbeResult.LOST, ProbeResult.NOT_READY):
            assert before.healthy or not health.healthy
        else:
            assert health.healthy or not before.healthy
