"""Generated histories of calls, rewards and exports, of a session at the inference service and of an agent's: every
call is in one export and no other, with the reward that was given, and a retry gets the answer of its first try."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.services.agent.data_proxy.pair import Pair, start_pair
from tests.services.inference.recorder.rollouts import Rollout
from tests.services.inference.sessions.recording_service import RecordingService, build_recording_service
from tests.services.processes import Answer, Processes

pytestmark = pytest.mark.extended


class Caller(Protocol):
    def call(self) -> None: ...

    def reward(self, body: dict[str, Any], key: str) -> Answer: ...

    def export(self, body: dict[str, Any], key: str) -> Answer: ...

    def acknowledge(self, export_id: str) -> Answer: ...


@dataclass
class AgentCaller:
    pair: Pair
    session: str

    def _post(self, verb: str, body: dict[str, Any], key: str | None = None) -> Answer:
        headers = {"Idempotency-Key": key} if key else {}
        path = self.pair.path(self.session, verb)
        return self.pair.proxy.call("POST", path, body, key=self.pair.key, headers=headers)

    def call(self) -> None:
        self.pair.say(self.session, "model")

    def reward(self, body: dict[str, Any], key: str) -> Answer:
        return self._post("/reward", body, key)

    def export(self, body: dict[str, Any], key: str) -> Answer:
        return self._post("/export", body, key)

    def acknowledge(self, export_id: str) -> Answer:
        return self._post("/export/ack", {"export_id": export_id})


@dataclass
class InferenceCaller:
    """Begins another session where an export has removed the last one, and goes on asking for that one until then."""

    service: RecordingService
    rollout: Rollout
    asked: dict[str, str] = field(default_factory=dict)  # the session of each Idempotency-Key

    def call(self) -> None:
        body = {"messages": [{"role": "user", "content": "hello"}]}
        if self.rollout.post("/v1/chat/completions", body).status == 401:
            self.rollout = self.service.begin()
            assert self.rollout.post("/v1/chat/completions", body).status == 200

    def reward(self, body: dict[str, Any], key: str) -> Answer:
        named = {**body, "session_id": self._session(key)}
        return self._post("/rl/set_reward", named, key)

    def export(self, body: dict[str, Any], key: str) -> Answer:
        return self._post("/export_trajectories", {**body, "session_ids": [self._session(key)]}, key)

    def _session(self, key: str) -> str:
        return self.asked.setdefault(key, self.rollout.session_id)

    def _post(self, path: str, body: dict[str, Any], key: str) -> Answer:
        headers = {"Idempotency-Key": key}
        return self.service.gateway.call("POST", path, body, key=self.service.key, headers=headers)

    def acknowledge(self, export_id: str) -> Answer:
        return self.service.admin("POST", "/export_trajectories/ack", {"export_id": export_id})


@dataclass
class History:
    """What one caller received. A trajectory is a session's id and its number."""

    caller: Caller
    calls: int = 0
    keys: int = 0
    last: dict[str, tuple[dict[str, Any], str, Answer]] = field(default_factory=dict)
    rewards: dict[tuple[str, int], float] = field(default_factory=dict)
    rows: dict[str, dict[tuple[str, int], list[float]]] = field(default_factory=dict)  # by export

    def do(self, step: str) -> None:
        match step.split():
            case ["call"]:
                self.caller.call()
                self.calls += 1
            case ["reward", value]:
                self.reward(float(value))
            case ["export", *value]:
                self.export({"reward": float(value[0])} if value else {})
            case ["retry", what] if what in self.last:
                body, key, first = self.last[what]
                again = getattr(self.caller, what)(body, key)
                assert again.status == 200 and self.comparable(again) == self.comparable(first), (
                    again.body,
                    first.body,
                )
            case ["acknowledge"] if "export" in self.last:
                assert self.caller.acknowledge(self.last.pop("export")[2].json()["export_id"]).status == 200

    def comparable(self, answer: Answer) -> Any:
        reply = answer.json()
        return (reply["export_id"], reply["rows"]) if "export_id" in reply else reply

    def send(self, what: str, body: dict[str, Any]) -> Any:
        self.keys += 1
        key = f"key-{self.keys}"
        answer: Answer = getattr(self.caller, what)(body, key)
        assert answer.status in (200, 400, 404, 409, 425), answer.body
        if answer.status != 200:
            return None
        self.last[what] = body, key, answer
        return answer.json()

    def reward(self, value: float) -> None:
        if (given := self.send("reward", {"reward": value})) is not None:
            self.rewards[given["session_id"], given["trajectory_id"]] = value

    def export(self, body: dict[str, Any]) -> None:
        taken = self.send("export", body)
        if taken is None:
            return
        found = defaultdict[tuple[str, int], list[float]](list)
        for row, reward in zip(taken["rows"], taken["traj"]["original_rewards"], strict=True):
            found[row["session_id"], row["trajectory_id"]].append(reward)
        if "reward" in body:
            self.rewards.setdefault(max(found), body["reward"])
        earlier = self.rows.setdefault(taken["export_id"], dict(found))
        assert earlier == found, "one export has one answer"

    def check(self) -> None:
        taken = [item for rows in self.rows.values() for item in rows]
        assert len(taken) == len(set(taken)), "a trajectory is in one export"
        sizes = [len(rewards) for rows in self.rows.values() for rewards in rows.values()]
        assert sum(sizes) == self.calls, "each call is in an export"
        for rows in self.rows.values():
            for item, rewards in rows.items():
                assert rewards[-1] == self.rewards.get(item, 0.0), item


STEPS = ("call", "call", "call", "reward 0.25", "reward 1", "export", "export 0.5", "acknowledge")
HISTORIES = st.lists(st.sampled_from((*STEPS, "retry reward", "retry export", "retry export")), min_size=4, max_size=14)


def follow(caller: Caller, steps: list[str]) -> None:
    history = History(caller)
    for step in (*steps, "call", "export 0.75"):
        history.do(step)
    history.check()


@pytest.fixture(scope="module")
def inference(
    module_processes: Processes, tokenizer: Path, tmp_path_factory: pytest.TempPathFactory
) -> RecordingService:
    return build_recording_service(module_processes, tokenizer, tmp_path_factory.mktemp("recordings"), replicas=1)


@pytest.fixture(scope="module")
def agents(inference: RecordingService, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    access = {"addr": inference.gateway.url, "admin_key_file": str(inference.processes.key_file), "model": "tiny"}
    yield start_pair(inference.processes, tmp_path_factory.mktemp("state"), "--inference", json.dumps(access))


@settings(max_examples=40)
@given(steps=HISTORIES)
def test_agent_session_history_exports_each_call_once(agents: Pair, steps: list[str]) -> None:
    follow(AgentCaller(agents, agents.start()), steps)


@settings(max_examples=40)
@given(steps=HISTORIES)
def test_history_of_an_inference_session_exports_each_call_once(inference: RecordingService, steps: list[str]) -> None:
    follow(InferenceCaller(inference, inference.begin()), steps)
