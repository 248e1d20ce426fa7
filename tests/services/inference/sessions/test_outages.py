"""What is lost when a process is killed: nothing that was acknowledged, and nobody else notices."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.services.inference.houses import later
from tests.services.inference.recorder.rollouts import Rollout
from tests.services.inference.sessions.recording_house import RecordingHouse, tag_of
from tests.services.processes import engine_calls, script

Build = Callable[..., RecordingHouse]


@pytest.fixture
def house(build: Build) -> RecordingHouse:
    return build("--relays", "2")


def by_replica(house: RecordingHouse, rollouts: list[Rollout]) -> tuple[list[Rollout], list[Rollout]]:
    """The sessions of the first replica, and those of the second."""
    (first,) = house.workers()[0:1]
    tag = house.router.call("GET", "/table", key=house.key).json()["models"]["tiny"]["workers"][0]["journals"][0]
    assert first["worker_addr"] == house.proxy.url
    mine = [rollout for rollout in rollouts if tag_of(rollout.session_id) == tag]
    return mine, [rollout for rollout in rollouts if rollout not in mine]


def test_sessions_of_a_killed_data_proxy_come_back_with_it(house: RecordingHouse) -> None:
    rollouts = [house.begin() for _ in range(10)]
    said = {rollout.session_id: rollout.chat("a")["id"] for rollout in rollouts}
    mine, others = by_replica(house, rollouts)
    assert len(mine) == len(others) == 5
    mine[0].reward(0.5)
    house.proxy.kill()
    waiting = [later(rollout.chat, "b") for rollout in mine[1:]]
    for rollout in others:  # who is elsewhere never notices
        rollout.chat("b")
        rollout.reward(1.0)
    restarted = house.start_proxy(0)
    house.register(restarted, house.proxies[1])
    for rollout, future in zip(mine[1:], waiting, strict=True):
        future.result(60)
        assert rollout.reward(1.0)["interaction_count"] == 2
    exported = {rollout.session_id: rollout.export() for rollout in rollouts}
    assert {each: export["rows"][0]["interaction_id"] for each, export in exported.items()} == said
    assert exported[mine[0].session_id]["traj"]["original_rewards"] == [0.5]


def test_sessions_of_a_data_proxy_that_stays_away_are_adopted(house: RecordingHouse) -> None:
    rollouts = [house.begin() for _ in range(4)]
    first = {rollout.session_id: rollout.chat("a")["id"] for rollout in rollouts}
    house.proxy.kill()
    house.register(house.proxies[1])
    for rollout in rollouts:
        rollout.chat("b")
        rollout.reward(1.0)
        exported = rollout.export()
        assert exported["rows"][0]["interaction_id"] == first[rollout.session_id]
        assert len(exported["rows"]) == 2


def test_call_in_flight_at_a_killed_data_proxy_is_answered_and_recorded_once(house: RecordingHouse) -> None:
    rollout = house.begin()
    mine, _ = by_replica(house, [rollout])
    number = 0 if mine else 1
    engine, proxy = house.engines[number], house.proxies[number]
    script(engine, gate=1)
    asked = later(rollout.chat, "a")
    engine_calls(engine, until="any")
    proxy.kill()
    script(engine, reset=True)
    restarted = [house.start_proxy(number) if each == number else house.proxies[each] for each in range(2)]
    house.register(*restarted)
    answer = asked.result(60)
    rollout.reward(1.0)
    (row,) = rollout.export()["rows"]
    assert row["interaction_id"] == answer["id"]


def test_key_of_the_callers_own_is_found_again_by_its_digest(house: RecordingHouse) -> None:
    keys = [f"key-of-agent-{number}" for number in range(4)]
    rollouts = [house.begin(api_key=key) for key in keys]
    house.proxy.kill()
    house.register(house.proxies[1])
    for rollout in rollouts:  # whoever was adopted is waited for
        rollout.chat("a")


def test_session_survives_a_router_that_comes_back_empty(house: RecordingHouse) -> None:
    rollouts = house.on_each_replica()
    port = house.router.port
    house.router.kill()
    for rollout in rollouts:
        rollout.chat("a")
    starting = later(house.begin)
    router = house.processes.service("router", "--health-period", "0.2", "--port", str(port))
    for rollout in rollouts:
        rollout.chat("b")
    house.processes.register(router, *house.proxies)
    starting.result(60).chat("a")
    for rollout in rollouts:
        rollout.chat("c")
        assert rollout.reward(1.0)["interaction_count"] == 3


def test_own_key_is_asked_for_once_the_router_is_back(house: RecordingHouse) -> None:
    rollout = house.begin(api_key="a-key-of-my-own")
    port = house.router.port
    house.router.kill()
    asked = later(rollout.chat, "a")
    router = house.processes.service("router", "--health-period", "0.2", "--port", str(port))
    house.processes.register(router, *house.proxies)
    asked.result(60)
    assert rollout.reward(1.0)["interaction_count"] == 1


def test_session_starts_once_a_data_proxy_is_there(build: Build) -> None:
    house = build(replicas=1)
    house.proxy.kill()
    house.wait_state("tiny-0", "dead")
    starting = later(house.begin)
    restarted = house.start_proxy(0)
    assert not starting.done()
    house.register(restarted)
    starting.result(60).chat("a")


def test_every_relay_knows_every_session(house: RecordingHouse) -> None:
    """Each call may reach another relay: connections are new ones, and the kernel deals them out."""
    own = house.begin(api_key="the-key-of-somebody")
    for rollout in (*house.on_each_replica(), own):
        for _ in range(12):
            rollout.chat("a")
        assert rollout.reward(1.0)["interaction_count"] == 12
