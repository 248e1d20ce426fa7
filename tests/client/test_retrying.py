"""When a call is sent again: a pure decision."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from areal.client.errors import (
    Blame,
    CallerError,
    ClientError,
    ConnectionLost,
    DeadlineExceeded,
    Overloaded,
    ServiceError,
    Unreachable,
    error_of_answer,
)
from areal.client.transport import RetryPolicy, may_repeat

STATUSES = st.integers(300, 599)
ERRORS = st.one_of(
    st.sampled_from([Unreachable("x"), ConnectionLost("x"), DeadlineExceeded("x")]),
    st.builds(lambda status: error_of_answer(status, {}, {}, "x"), STATUSES),
)


@given(ERRORS, st.integers(1, 10), st.integers(1, 10), st.booleans(), st.floats(0, 1))
def test_attempts_and_pauses_are_bounded(
    error: ClientError, attempts: int, made: int, repeatable: bool, jitter: float
) -> None:
    policy = RetryPolicy(attempts, first_s=0.1, longest_s=2.0)
    pause = policy.pause_s(made, error, repeatable=repeatable, jitter=jitter)
    if made >= attempts:
        assert pause is None
    if pause is not None:
        assert 0.0 < pause <= 2.0
        assert not isinstance(error, CallerError)


@given(ERRORS)
def test_started_call_is_retried_only_if_repeatable(error: ClientError) -> None:
    if may_repeat(error, repeatable=False):
        assert isinstance(error, Unreachable | Overloaded)
        assert may_repeat(error, repeatable=True)


@given(STATUSES)
def test_every_status_blames_the_caller_or_the_service(status: int) -> None:
    error = error_of_answer(status, "<html>", {}, "GET /x")
    assert error.blame is (Blame.CALLER if isinstance(error, CallerError) else Blame.SERVICE)
    assert isinstance(error, ServiceError) == (status >= 500 or status == 429)
    assert str(status) in error.message


def test_retry_after_is_a_lower_bound() -> None:
    error = error_of_answer(503, {"error": {"message": "busy"}}, {"Retry-After": "9"}, "x")
    assert RetryPolicy().pause_s(1, error, repeatable=False, jitter=0.0) == 9.0
