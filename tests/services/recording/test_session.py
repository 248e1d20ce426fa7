"""The rules of a session by themselves."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal.services.inference.recording.session import (
    Life,
    Phase,
    Sealed,
    Session,
    Target,
    Trajectory,
    check_reward,
    end,
    holds_key,
    matured,
    place,
    reward,
)
from areal.services.web.errors import ApiError

SESSION = Session(1, "task", "grp", 0.0)
OPEN = Trajectory(0, 0)
SEALING = replace(OPEN, phase=Phase.SEALING, due=10.0)
READY = replace(OPEN, phase=Phase.READY, sealed=Sealed.REWARD, ready_at=1.0)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e39, 10**400, True, "1", None, [1]])
def test_reward_that_is_no_finite_number_is_400(value: object) -> None:
    with pytest.raises(ApiError) as caught:
        check_reward(value)
    assert (caught.value.status, caught.value.param) == (400, "reward")


@given(st.integers(-(10**6), 10**6) | st.floats(-1e38, 1e38))
def test_reward_that_is_a_number_is_taken(value: float) -> None:
    assert check_reward(value) == value


def test_sealing_matures_exactly_at_its_due_time() -> None:
    assert matured(SEALING, 9.9) is SEALING
    assert matured(SEALING, 10.0) == replace(SEALING, phase=Phase.READY, due=None, sealed=Sealed.TIMEOUT, ready_at=10.0)


def test_earlier_reward_while_sealing_only_moves_the_end() -> None:
    verdict = reward(SEALING, Target(0, newest=False, reward=None), 1.0, 5.0, 10.0)
    assert (verdict.trajectory.phase, verdict.trajectory.due, verdict.transition) == (Phase.SEALING, 15.0, False)


@given(st.floats(-10, 10), st.floats(-10, 10))
def test_sealed_reward_is_replayed_or_409(first: float, second: float) -> None:
    target = Target(0, newest=True, reward=first)
    if first == second:
        verdict = reward(READY, target, second, 5.0, 0.0)
        assert (verdict.changed, verdict.ready, verdict.transition) == (False, True, True)
        return
    with pytest.raises(ApiError) as caught:
        reward(READY, target, second, 5.0, 0.0)
    assert caught.value.status == 409


def test_reward_on_an_unrewarded_turn_of_a_sealed_trajectory_is_409() -> None:
    with pytest.raises(ApiError) as caught:
        reward(READY, Target(0, newest=False, reward=None), 0.0, 5.0, 0.0)
    assert caught.value.code == "trajectory_sealed"


def test_full_trajectory_of_a_standing_session_is_left_behind_open() -> None:
    standing = replace(SESSION, standing=True)
    placed = place(standing, OPEN, 4, 0.0, limit=4)
    assert (placed.opened, placed.before, placed.trajectory) == (True, None, Trajectory(1, 4))
    assert not place(standing, OPEN, 3, 0.0, limit=4).opened


def test_call_of_another_kind_opens_the_next_trajectory_and_leaves_the_last_one_open() -> None:
    placed = place(SESSION, OPEN, 4, 0.0, limit=None, same_kind=False)
    assert (placed.opened, placed.before, placed.trajectory) == (True, None, Trajectory(1, 4))


@pytest.mark.parametrize("life", [Life.ENDED, Life.REMOVED])
def test_chat_after_the_end_is_409(life: Life) -> None:
    with pytest.raises(ApiError) as caught:
        place(replace(SESSION, life=life), OPEN, 1, 0.0, None)
    assert caught.value.code == "session_ended"


def test_end_seals_what_is_open_and_keeps_what_is_ready() -> None:
    ended, trajectories = end(SESSION, [OPEN, replace(OPEN, number=1, first=2)], 3.0)
    sealed = replace(OPEN, phase=Phase.READY, sealed=Sealed.END, ready_at=3.0)
    assert (ended.life, trajectories) == (Life.ENDED, [sealed, replace(sealed, number=1, first=2)])
    assert end(ended, [READY], 4.0) == (ended, [READY])
    assert end(SESSION, [], 3.0)[1] == []


def test_standing_session_never_ends() -> None:
    standing = replace(SESSION, standing=True)
    assert end(standing, [OPEN], 3.0)[0] is standing


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
    assert not holds_key(replace(SESSION, life=Life.ENDED), trajectories, 5.0)
    assert not holds_key(replace(SESSION, next_trajectory=1), trajectories, 5.0)
