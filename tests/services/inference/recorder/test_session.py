"""The rules of a session by themselves."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal.services.http.errors import ApiError
from areal.services.inference.recorder.session import (
    SealReason,
    SessionRecord,
    SessionState,
    Trajectory,
    TrajectoryPhase,
    apply_reward,
    apply_timeout,
    check_reward,
    end_session,
    holds_key,
    place_turn,
)

SESSION = SessionRecord(1, "task", "grp", 0.0)
OPEN = Trajectory(0, 0)
SEALING = replace(OPEN, phase=TrajectoryPhase.SEALING, due=10.0)
READY = replace(OPEN, phase=TrajectoryPhase.READY, sealed=SealReason.REWARD, ready_at=1.0)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e39, 10**400, True, "1", None, [1]])
def test_non_finite_or_non_number_reward_is_400(value: object) -> None:
    with pytest.raises(ApiError) as caught:
        check_reward(value)
    assert (caught.value.status, caught.value.param) == (400, "reward")


@given(st.integers(-(10**6), 10**6) | st.floats(-1e38, 1e38))
def test_number_is_accepted_as_reward(value: float) -> None:
    assert check_reward(value) == value


def test_sealing_matures_exactly_at_its_due_time() -> None:
    assert apply_timeout(SEALING, 9.9) is SEALING
    assert apply_timeout(SEALING, 10.0) == replace(
        SEALING, phase=TrajectoryPhase.READY, due=None, sealed=SealReason.TIMEOUT, ready_at=10.0
    )


def test_earlier_reward_while_sealing_extends_timeout_only() -> None:
    verdict = apply_reward(SEALING, 1.0, 5.0, 10.0, newest=False, before=None)
    assert (verdict.trajectory.phase, verdict.trajectory.due, verdict.transition) == (
        TrajectoryPhase.SEALING,
        15.0,
        False,
    )


@given(st.floats(-10, 10), st.floats(-10, 10))
def test_sealed_reward_is_replayed_or_409(first: float, second: float) -> None:
    if first == second:
        verdict = apply_reward(READY, second, 5.0, 0.0, newest=True, before=first)
        assert (verdict.changed, verdict.ready, verdict.transition) == (False, True, True)
        return
    with pytest.raises(ApiError) as caught:
        apply_reward(READY, second, 5.0, 0.0, newest=True, before=first)
    assert caught.value.status == 409


def test_late_reward_on_sealed_trajectory_is_409() -> None:
    with pytest.raises(ApiError) as caught:
        apply_reward(READY, 0.0, 5.0, 0.0, newest=False, before=None)
    assert caught.value.code == "trajectory_sealed"


def test_full_hitl_trajectory_stays_open() -> None:
    hitl = replace(SESSION, hitl=True)
    placed = place_turn(hitl, OPEN, 4, 0.0, limit=4)
    assert (placed.opened, placed.before, placed.trajectory) == (True, None, Trajectory(1, 4))
    assert not place_turn(hitl, OPEN, 3, 0.0, limit=4).opened


def test_call_of_other_kind_opens_next_trajectory() -> None:
    placed = place_turn(SESSION, OPEN, 4, 0.0, limit=None, same_kind=False)
    assert (placed.opened, placed.before, placed.trajectory) == (True, None, Trajectory(1, 4))


@pytest.mark.parametrize("life", [SessionState.ENDED, SessionState.REMOVED])
def test_chat_after_the_end_is_409(life: SessionState) -> None:
    with pytest.raises(ApiError) as caught:
        place_turn(replace(SESSION, state=life), OPEN, 1, 0.0, None)
    assert caught.value.code == "session_ended"


def test_end_seals_open_and_keeps_ready_trajectories() -> None:
    ended, trajectories = end_session(SESSION, [OPEN, replace(OPEN, number=1, first=2)], 3.0)
    sealed = replace(OPEN, phase=TrajectoryPhase.READY, sealed=SealReason.END, ready_at=3.0)
    assert (ended.state, trajectories) == (SessionState.ENDED, [sealed, replace(sealed, number=1, first=2)])
    assert end_session(ended, [READY], 4.0) == (ended, [READY])
    assert end_session(SESSION, [], 3.0)[1] == []


def test_hitl_session_never_ends() -> None:
    hitl = replace(SESSION, hitl=True)
    assert end_session(hitl, [OPEN], 3.0)[0] is hitl


@pytest.mark.parametrize(
    ("trajectories", "held"),
    [
        ([], True),
        ([OPEN], True),
        ([SEALING], True),
        ([READY], False),
        ([OPEN, Trajectory(1, 3)], True),
        ([OPEN, replace(READY, number=1)], False),
    ],
)
def test_key_is_held_until_the_first_trajectory_is_ready(trajectories: list[Trajectory], held: bool) -> None:
    assert holds_key(SESSION, trajectories, 5.0) is held
    assert not holds_key(replace(SESSION, state=SessionState.ENDED), trajectories, 5.0)
    assert not holds_key(replace(SESSION, next_trajectory=1), trajectories, 5.0)
