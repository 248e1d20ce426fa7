"""Sessions over HTTP for tests: start, chat, reward, export, at a data proxy or a gateway."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tests.services.processes import Answer, Process, Stream

CHAT = "/v1/chat/completions"


@dataclass
class Rollout:
    """One session and its conversation so far."""

    front: Process
    admin_key: str
    session_id: str
    key: str
    group_id: str = ""
    messages: list[dict[str, Any]] = field(default_factory=list)

    def post(self, path: str, body: Any, **headers: str) -> Answer:
        return self.front.call("POST", path, body, key=self.key, headers=headers)

    def body(self, text: str | None, **more: Any) -> dict[str, Any]:
        messages = [*self.messages, {"role": "user", "content": text}] if text is not None else self.messages
        return {"messages": messages, **more}

    def chat(self, text: str | None = "Hello", headers: dict[str, str] | None = None, **more: Any) -> dict[str, Any]:
        """One more turn of the conversation: the answer."""
        body = self.body(text, **more)
        answered = self.post(CHAT, body, **(headers or {}))
        assert answered.status == 200, answered.body
        reply: dict[str, Any] = answered.json()
        self.messages = [*body["messages"], reply["choices"][0]["message"]]
        return reply

    def stream(self, text: str = "Hello", **more: Any) -> Stream:
        return Stream(self.front.port, CHAT, self.body(text, **more), self.key)

    def reward(self, value: float, **more: Any) -> dict[str, Any]:
        answered = self.post("/rl/set_reward", {"reward": value, **more})
        assert answered.status == 200, answered.body
        reply: dict[str, Any] = answered.json()
        return reply

    def export(self, **more: Any) -> dict[str, Any]:
        return export(self.front, self.admin_key, [self.session_id], **more)


def begin_group(front: Process, admin_key: str, size: int, **more: Any) -> list[Rollout]:
    body = {"task_id": "task", "group_size": size, **more}
    answer = front.call("POST", "/rl/start_session", body, key=admin_key)
    assert answer.status == 201, answer.body
    started = answer.json()
    return [
        Rollout(front, admin_key, each["session_id"], each["session_api_key"], started["group_id"])
        for each in started["sessions"]
    ]


def begin(front: Process, admin_key: str, **more: Any) -> Rollout:
    (rollout,) = begin_group(front, admin_key, 1, **more)
    return rollout


def export(front: Process, admin_key: str, session_ids: list[str], **more: Any) -> dict[str, Any]:
    answer = front.call("POST", "/export_trajectories", {"session_ids": session_ids, **more}, key=admin_key)
    assert answer.status == 200, answer.body
    reply: dict[str, Any] = answer.json()
    return reply
