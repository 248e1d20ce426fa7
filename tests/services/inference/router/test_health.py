from __future__ import annotations

from functools import reduce

from hypothesis import given
from hypothesis import strategies as st

from areal.services.inference.router.health import DOWN_AFTER, UP_AFTER, Answer, Health


def after(*answers: Answer) -> Health:
    return reduce(Health.after, answers, Health())


def test_worker_never_seen_is_not_healthy_and_becomes_so_at_its_first_answer() -> None:
    assert not after().healthy
    assert not after(Answer.LOST).healthy
    assert after(Answer.LOST, Answer.READY).healthy


def test_one_lost_probe_is_noise_and_three_in_a_row_are_a_death() -> None:
    assert after(Answer.READY, *[Answer.LOST] * (DOWN_AFTER - 1)).healthy
    assert not after(Answer.READY, *[Answer.LOST] * DOWN_AFTER).healthy
    assert after(Answer.READY, Answer.LOST, Answer.LOST, Answer.READY, Answer.LOST, Answer.LOST).healthy


def test_dead_worker_needs_two_good_answers_in_a_row() -> None:
    dead = after(Answer.READY, *[Answer.LOST] * DOWN_AFTER)
    assert not dead.after(Answer.READY).healthy
    assert not dead.after(Answer.READY).after(Answer.LOST).after(Answer.READY).healthy
    assert reduce(Health.after, [Answer.READY] * UP_AFTER, dead).healthy


def test_worker_that_says_it_is_not_ready_is_believed_at_once() -> None:
    assert not after(Answer.READY, Answer.NOT_READY).healthy


def test_worker_that_says_it_leaves_is_alive_and_gets_nothing_new() -> None:
    leaving = after(Answer.READY, Answer.DRAINING)
    assert leaving.healthy and leaving.leaving
    assert not leaving.after(Answer.READY).leaving


@given(st.lists(st.sampled_from(Answer)))
def test_health_never_turns_on_an_answer_that_says_the_opposite(answers: list[Answer]) -> None:
    health = Health()
    for answer in answers:
        before, health = health, health.after(answer)
        if answer in (Answer.LOST, Answer.NOT_READY):
            assert before.healthy or not health.healthy
        else:
            assert health.healthy or not before.healthy
