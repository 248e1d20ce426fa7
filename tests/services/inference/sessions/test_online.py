"""The human in the loop, and online mode: whoever has the admin key chats and rewards, and takes what is ready."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.services.inference.running_service import CHAT, later
from tests.services.inference.sessions.recording_service import RecordingService, tag_of
from tests.services.inference.test_refusals import refused
from tests.services.processes import Answer

Build = Callable[..., RecordingService]


@pytest.fixture
def online(recording: RecordingService) -> RecordingService:
    """The shared service, with nothing left that other tests did not fetch."""
    while items := take(recording, 1000):
        acknowledge(recording, items)
    return recording


class Human:
    """A conversation with the admin's key."""

    def __init__(self, service: RecordingService, opening: str) -> None:
        self._service = service
        self.messages: list[dict[str, Any]] = []
        self.opening = opening
        self.ids: list[str] = []

    def say(self, text: str | None = None) -> None:
        self.messages.append({"role": "user", "content": text or self.opening})
        answer = self._service.admin("POST", CHAT, {"messages": self.messages})
        assert answer.status == 200, answer.body
        self.ids.append(answer.json()["id"])
        self.messages.append(answer.json()["choices"][0]["message"])


def reward(service: RecordingService, value: float, **more: Any) -> dict[str, Any]:
    answer = service.admin("POST", "/rl/set_reward", {"reward": value, **more})
    assert answer.status == 200, answer.body
    reply: dict[str, Any] = answer.json()
    return reply


def take(
    service: RecordingService, limit: int = 10, wait: float = 0.0, kind: str = "", rows: str = ""
) -> list[dict[str, Any]]:
    wanted = f"&kind={kind}" if kind else ""
    answer = service.admin("GET", f"/trajectories?limit={limit}&wait={wait}{wanted}{rows}")
    assert answer.status == 200, answer.body
    items: list[dict[str, Any]] = answer.json()["items"]
    return items


def acknowledge(service: RecordingService, items: list[dict[str, Any]]) -> int:
    answer = service.admin("POST", "/trajectories/ack", {"lease_ids": [item["lease_id"] for item in items]})
    assert answer.status == 200, answer.body
    released: int = answer.json()["released"]
    return released


def on_two_replicas(service: RecordingService) -> list[Human]:
    """Conversations on each replica, as their answers' ids show."""
    found: dict[str, Human] = {}
    number = 0
    while len(found) < 2:
        human = Human(service, f"conversation {number}")
        human.say()
        found.setdefault(human.ids[0].split("-")[1][:8], human)
        number += 1
        assert number < 100
    return list(found.values())


def test_online_conversation_is_one_trajectory_sealed_by_reward(online: RecordingService) -> None:
    human = Human(online, "a conversation of several turns")
    human.say()
    human.say("and then?")
    human.say("and in the end?")
    reply = reward(online, 0.5)
    assert reply["trajectory_ready"]
    [item] = take(online)
    rows = [row for row in item["rows"] if row["interaction_id"] in human.ids]
    assert [row["interaction_id"] for row in rows] == human.ids
    assert [row["parent_id"] for row in rows] == [None, *human.ids[:-1]]
    assert item["traj"]["rewards"][-1] == 0.5
    assert acknowledge(online, [item]) == 1
    assert acknowledge(online, [item]) == 0


@pytest.mark.parametrize(("style", "rewards"), [("individual", [0.25, 0.5, 1.0]), ("concat", [1.0])])
def test_leased_rows_match_export(online: RecordingService, style: str, rewards: list[float]) -> None:
    human = Human(online, f"three turns, {style}")
    for text in ("one", "two", "three"):
        human.say(text)
    reward(online, 1.0)
    [item] = take(online, rows=f"&style={style}&discount=0.5")
    assert item["traj"]["rewards"] == rewards
    acknowledge(online, [item])


def test_reward_goes_to_replica_of_last_message(online: RecordingService) -> None:
    for human in on_two_replicas(online):
        human.say("once more")
        reply = reward(online, 1.0)
        assert human.ids[-1] in online.admin("GET", f"/rl/sessions/{reply['session_id']}").body.decode()
    items = take(online)
    assert len({tag_of(item["session_id"]) for item in items}) == 2
    acknowledge(online, items)


def test_reward_by_interaction_reaches_the_other_replica(online: RecordingService) -> None:
    first, last = on_two_replicas(online)
    first.say("and then?")
    last.say("the last word")
    reply = reward(online, 0.25, interaction_id=first.ids[-1])
    assert reply["trajectory_ready"]
    acknowledge(online, take(online))


@pytest.mark.extended
def test_reward_finds_conversation_after_replica_removal(build: Build) -> None:
    service = build()
    human = on_two_replicas(service)[0]
    human.say("the last word")
    tag = human.ids[-1].split("-")[1][:8]
    victim = 0 if tag in service.proxies[0].call("GET", "/ready").json()["journals"] else 1
    service.proxies[victim].kill()
    rewarding = later(reward, service, 1.0)
    service.register(service.proxies[1 - victim])
    assert tag_of(rewarding.result(60)["session_id"]) == tag
    [item] = take(service, wait=10.0)
    assert item["rows"][-1]["interaction_id"] == human.ids[-1]


@pytest.mark.extended
def test_leases_repeat_until_acknowledged(build: Build) -> None:
    service = build(proxy_flags=("--visibility-timeout", "0.3"))
    for rollout in service.on_each_replica():
        rollout.chat("a")
        rollout.reward(1.0)
    items = take(service)
    assert len(items) == 2
    assert take(service) == []
    again = take(service, wait=20.0)
    while len(again) < 2:
        again += take(service, wait=20.0)
    assert sorted(item["lease_id"] for item in again) == sorted(item["lease_id"] for item in items)
    assert acknowledge(service, items) == 2
    assert take(service, wait=0.5) == []


def test_waiter_receives_trajectory_of_any_replica(online: RecordingService) -> None:
    for rollout in online.on_each_replica():
        waiting = later(take, online, 10, 30.0)
        rollout.chat("a")
        rollout.reward(1.0)
        [item] = waiting.result(40)
        assert item["session_id"] == rollout.session_id
        acknowledge(online, [item])


def test_offline_session_is_never_offered(online: RecordingService) -> None:
    rollout = online.begin(online=False)
    rollout.chat("a")
    rollout.reward(1.0)
    assert take(online) == []
    assert len(rollout.export()["rows"]) == 1


def test_limit_applies_across_replicas(online: RecordingService) -> None:
    for rollout in online.on_each_replica():
        rollout.chat("a")
        rollout.reward(1.0)
    one = take(online, 1)
    rest = take(online, 10)
    assert (len(one), len(rest)) == (1, 1)
    acknowledge(online, one + rest)


@pytest.mark.parametrize(
    "query",
    [
        "wait=-1",
        "wait=301",
        "wait=nan",
        "wait=x",
        "limit=x",
        "limit=1025",
        "limit=-1",
        "style=x",
        "discount=2",
        "discount=nan",
    ],
)
def test_invalid_query_is_400(online: RecordingService, query: str) -> None:
    refused(online.admin("GET", f"/trajectories?{query}"))


@pytest.mark.parametrize("leases", [None, "lse-aaaaaaaa-1-0", [1], ["lease"], [None]])
def test_invalid_leases_are_400(online: RecordingService, leases: object) -> None:
    assert refused(online.admin("POST", "/trajectories/ack", {"lease_ids": leases}))["param"] == "lease_ids"


def test_lease_of_an_unknown_journal_releases_nothing(online: RecordingService) -> None:
    answer: Answer = online.admin("POST", "/trajectories/ack", {"lease_ids": ["lse-aaaaaaaa-1-0"]})
    assert answer.json() == {"status": "ok", "released": 0}
