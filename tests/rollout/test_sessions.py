"""The protocol of rewards, run against documents as the session routes answer them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from areal.errors import UsageFault
from areal.rollout.sessions import SessionCall, seal

DESCRIBE, END = SessionCall("describe"), SessionCall("end")


def session(*trajectories: tuple[str, list[str]]) -> dict[str, Any]:
    return {
        "trajectories": [
            {"state": state, "interactions": [{"interaction_id": name} for name in names]}
            for state, names in trajectories
        ]
    }


def run(reward: float | Mapping[str, float], known: Mapping[str, Any], answers: Mapping[Any, Any]) -> list[SessionCall]:
    """The calls; ``answers``: (trajectory, is it ready) by interaction id."""
    calls: list[SessionCall] = []
    steps, answer = seal(reward), None
    while True:
        try:
            call = steps.send(answer)  # type: ignore[arg-type]
        except StopIteration:
            return calls
        calls.append(call)
        trajectory, ready = answers.get(call.interaction_id, (0, False))
        answer = known if call == DESCRIBE else {"trajectory_id": trajectory, "trajectory_ready": ready}


def reward(value: float, name: str | None = None) -> SessionCall:
    return SessionCall("reward", value, name)


@pytest.mark.parametrize(
    ("given", "answers", "calls"),
    [
        (1.0, {None: (0, True)}, [reward(1.0)]),
        (0.0, {None: (0, True)}, [reward(0.0)]),
        (1.0, {None: (0, False)}, [reward(1.0), END]),
        ({}, {}, [END]),
        ({"": 0.5}, {None: (0, True)}, [reward(0.5)]),
        ({"c": 3.0, "a": 1.0}, {"c": (0, True)}, [DESCRIBE, reward(1.0, "a"), reward(3.0, "c")]),
        ({"a": 1.0}, {"a": (0, False)}, [DESCRIBE, reward(1.0, "a"), END]),
        ({"": 9.0, "a": 1.0}, {None: (0, True)}, [DESCRIBE, reward(1.0, "a"), reward(9.0)]),
        ({"c": 1.0}, {"c": (1, True)}, [DESCRIBE, reward(1.0, "c"), END]),
    ],
)
def test_rewards_go_oldest_first_and_open_rest_is_ended(
    given: Any, answers: Mapping[Any, Any], calls: list[SessionCall]
) -> None:
    assert run(given, session(("open", ["a", "b", "c"])), answers) == calls


def test_episode_reward_goes_to_each_open_trajectory() -> None:
    known = session(("open", ["a", "b"]), ("open", []), ("ready", ["c"]), ("open", ["d"]))
    assert run(1.0, known, {None: (3, True)}) == [reward(1.0), DESCRIBE, reward(1.0, "b"), reward(1.0, "d")]


@pytest.mark.parametrize(
    "reward",
    [[1.0, 0.0], None, "good", "4", {"a": "0.5"}, b"1", {"": [1.0]}, float("nan"), {"a": float("inf")}, 1e39, 10**400],
)
def test_reward_that_is_not_a_number_is_refused_with_its_value(reward: Any) -> None:
    with pytest.raises(
        UsageFault, match=r"the agent's reward is .*; it must be a finite number, or finite numbers by interaction id"
    ):
        next(seal(reward))


def test_reward_of_unknown_interaction_is_refused_first() -> None:
    steps = seal({"a": 1.0, "x": 2.0})
    assert next(steps) == DESCRIBE
    with pytest.raises(UsageFault, match="'x', which is not an interaction"):
        steps.send(session(("open", ["a"])))
