"""Random histories: nothing acknowledged is lost, nothing is there twice, what is exported is what the engine saw."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis.stateful import run_state_machine_as_test

from tests.reliability.asking import CHAT
from tests.reliability.fleet import Fleet, running_fleet
from tests.reliability.machine import machine_of
from tests.reliability.model import Call
from tests.reliability.profiles import profile


@pytest.fixture
def alone(tmp_path: Path, tokenizer: Path) -> Iterator[Fleet]:
    with running_fleet(tmp_path, tokenizer) as fleet:
        yield fleet


@pytest.mark.parametrize("key", [None, "key-of-a-sealed-turn"])
def test_unkeyed_retry_gets_no_answer_of_sealed_trajectory(alone: Fleet, key: str | None) -> None:
    machine = machine_of(alone, kills=0)()
    machine.begin(1)
    (session,) = machine.sessions
    body = {"messages": [{"role": "user", "content": "Hello"}], "return_token_ids": True, "max_tokens": 64}
    call = Call(CHAT, body, key)
    machine._answered(session, call, None, machine._ask(session, call))
    (turn,) = session.turns()
    machine.retry(session, turn)
    assert session.rollout.post("/rl/set_reward", {"reward": 1.0}).status == session.reward(turn, 1.0) == 200
    machine.retry(session, turn)
    machine.retry(session, turn)  # from the newest of that body
    assert [len(each.turns) for each in session.trajectories] == ([1, 1] if key is None else [1])
    machine.teardown()


def test_one_data_proxy_histories_match_model(alone: Fleet) -> None:
    run_state_machine_as_test(machine_of(alone, kills=1), settings=profile(6, 25, derandomize=True))


@pytest.mark.extended
def test_whole_data_plane_histories_match_model(fleet: Fleet) -> None:
    run_state_machine_as_test(machine_of(fleet, kills=1), settings=profile(5, 25, derandomize=True))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_many_one_data_proxy_histories_match_model(alone: Fleet) -> None:
    run_state_machine_as_test(machine_of(alone, kills=2), settings=profile(80, 50))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_many_whole_data_plane_histories_match_model(fleet: Fleet) -> None:
    run_state_machine_as_test(machine_of(fleet, kills=2), settings=profile(60, 50))
