"""Two pairs behind router and gateway: their sessions are spread, found, and outlive their data proxies."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.services.agent.data_proxy.pair import Pair, start_proxy, start_worker
from tests.services.inference.running_service import later
from tests.services.processes import Process, Processes, wait_ready, wait_until


@dataclass
class TwoPairs:
    router: Process
    gateway: Process
    pairs: list[Pair]
    key: str

    def say(self, session: str, message: str) -> str:
        body, headers = {"input": message}, {"X-AReaL-Session-Key": session}
        answer = self.gateway.call("POST", "/v1/responses", body, key=self.key, headers=headers)
        assert answer.status == 200, answer.body
        text: str = answer.json()["output"][0]["content"][0]["text"]
        return text

    def spread(self) -> Counter[int]:
        """Sessions by pair."""
        listed = {
            number: pair.call("GET", "/sessions?limit=1000").json()["sessions"]
            for number, pair in enumerate(self.pairs)
        }
        return Counter({number: len(sessions) for number, sessions in listed.items()})

    def workers(self) -> list[dict[str, Any]]:
        workers: list[dict[str, Any]] = self.router.call("GET", "/workers", key=self.key).json()["workers"]
        return workers


def listed(pair: Pair) -> list[str]:
    return [each["session_key"] for each in pair.call("GET", "/sessions?limit=1000").json()["sessions"]]


@pytest.fixture
def two(processes: Processes, tmp_path: Path) -> Iterator[TwoPairs]:
    known = tmp_path / "router.json"
    router = processes.router("--state-file", str(known))
    pairs = []
    for number in range(2):
        registration = {"router_file": str(known), "worker_id": f"pair-{number}", "expected": 2}
        flags = ("--service", "helper", "--registration", json.dumps(registration))
        worker = start_worker(processes)
        proxy = start_proxy(processes, worker, tmp_path / "state", *flags, uid=f"pair-{number}")
        pairs.append(Pair(processes, worker, proxy, tmp_path / "state", flags))
    gateway = processes.service("agent.gateway", "--router-url", router.url, "--service", "helper")
    wait_ready(gateway)
    two = TwoPairs(router, gateway, pairs, processes.key)
    wait_until(lambda: [each["state"] for each in two.workers()] == ["ready"] * 2)
    yield two


@pytest.mark.extended
def test_sessions_of_dead_pair_continue_on_other_pair(two: TwoPairs) -> None:
    keys = [f"session/{number}" for number in range(12)]
    made = [two.gateway.call("POST", "/sessions", {}, key=two.key).json()["session_key"] for _ in range(8)]
    assert {two.say(key, "a") for key in (*keys, *made)} == {"a 0"}
    assert min(two.spread().values()) >= 4
    with_first = listed(two.pairs[0])
    running = later(two.say, with_first[0], "wait")
    two.pairs[0].wait_begun(with_first[0], 2)
    two.pairs[0].proxy.kill()
    with pytest.raises(AssertionError, match="worker_lost"):
        running.result()
    elsewhere = [key for key in (*keys, *made) if key not in with_first]
    assert {two.say(key, "b") for key in elsewhere} == {"b 2"}  # who is elsewhere never notices
    assert {two.say(key, "b") for key in with_first} == {"b 2"}
    assert two.pairs[1].reported()["calls"][-1]["session_key"] == with_first[-1]


def test_drained_pair_hands_its_sessions_to_the_other(two: TwoPairs) -> None:
    keys = [f"session/{number}" for number in range(10)]
    assert {two.say(key, "a") for key in keys} == {"a 0"}
    before = two.spread()
    assert two.router.call("POST", "/drain", {"worker_id": "pair-0"}, key=two.key).status == 200
    assert {two.say(key, "b") for key in keys} == {"b 2"}
    assert listed(two.pairs[1]) == sorted(keys)
    assert listed(two.pairs[0]) == []
    assert len(two.pairs[0].reported("closed", before[0])["closed"]) == before[0]
