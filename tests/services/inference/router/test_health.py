from __future__ import annotations

from functools import reduce

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal.services.inference.router.health import Answer, WorkerHealth
from areal.wire.routing import DEFAULT_READINESS, Readiness


def after(*answers: Answer) -> WorkerHealth:
    return reduce(WorkerHealth.after, answers, WorkerHealth())


def test_worker_never_seen_is_not_healthy_and_becomes_so_at_its_first_answer() -> None:
    assert not after().healthy
    assert not after(Answer.LOST).healthy
    assert after(Answer.LOST, Answer.READY).healthy


def test_one_lost_probe_is_noise_and_three_in_a_row_are_a_death() -> None:
    assert after(Answer.READY, *[Answer.LOST] * (DEFAULT_READINESS.failure_threshold - 1)).healthy
    assert not after(Answer.READY, *[Answer.LOST] * DEFAULT_READINESS.failure_threshold).healthy
    assert after(Answer.READY, Answer.LOST, Answer.LOST, Answer.READY, Answer.LOST, Answer.LOST).healthy


def test_dead_worker_needs_two_good_answers_in_a_row() -> None:
    dead = after(Answer.READY, *[Answer.LOST] * DEFAULT_READINESS.failure_threshold)
    assert not dead.after(Answer.READY).healthy
    assert not dead.after(Answer.READY).after(Answer.LOST).after(Answer.READY).healthy
    assert reduce(WorkerHealth.after, [Answer.READY] * DEFAULT_READINESS.success_threshold, dead).healthy


def test_worker_that_says_it_is_not_ready_is_believed_at_once() -> None:
    assert not after(Answer.READY, Answer.NOT_READY).healthy


def test_worker_that_says_it_leaves_is_alive_and_gets_nothing_new() -> None:
    leaving = after(Answer.READY, Answer.DRAINING)
    assert leaving.healthy and leaving.leaving
    assert not leaving.after(Answer.READY).leaving


def test_thresholds_are_the_models_own() -> None:
    rules = Readiness(failure_threshold=1, success_threshold=3)
    lost = after(Answer.READY).after(Answer.LOST, rules)
    assert not lost.healthy
    twice = lost.after(Answer.READY, rules).after(Answer.READY, rules)
    assert not twice.healthy and twice.after(Answer.READY, rules).healthy


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
        Readiness.of(given)


@given(st.lists(st.sampled_from(Answer)))
def test_health_never_turns_on_an_answer_that_says_the_opposite(answers: list[Answer]) -> None:
    health = WorkerHealth()
    for answer in answers:
        before, health = health, health.after(answer)
        if answer in (Answer.LOST, Answer.NOT_READY):
            assert before.healthy or not health.healthy
        else:
            assert health.healthy or not before.healthy
