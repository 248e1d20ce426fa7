"""What the fault tests share: a session with something in it, and words for what became of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.reliability.asking import CHAT, Failed, Reply, ask
from tests.reliability.fleet import Fleet, Member
from tests.reliability.model import expected_row, unpadded
from tests.services.inference.recorder.rollouts import Rollout, begin
from tests.services.processes import Answer, wait_until

RETRY = {"x-stainless-retry-count": "1"}
SERVED = "served"
NOTHING_MORE = "exactly what was acknowledged"


def failure(reply: Reply | Failed) -> str:
    """How a call went, for its caller."""
    if isinstance(reply, Reply):
        return "answered"
    if reply.status:
        return f"{reply.status} `{reply.code}`"
    if reply.code in ("lost", "cut"):
        return "the stream is cut off" if reply.begun else "connection lost"
    return f"error event `{reply.code}`"


def status_of(answer: Answer) -> str:
    """An answer that is not a model's."""
    return str(answer.status) if answer.status < 400 else f"{answer.status} `{answer.json()['error']['code']}`"


@dataclass
class Scene:
    """One session, and what its callers received."""

    fleet: Fleet
    rollout: Rollout
    acknowledged: list[str] = field(default_factory=list)
    calls: int = 0

    def body(self, **more: Any) -> dict[str, Any]:
        messages = [{"role": "user", "content": f"question {self.calls}"}]
        return {"messages": messages, "return_token_ids": True, **more}

    def ask(self, body: Mapping[str, Any] | None = None, **headers: str) -> Reply | Failed:
        """One call; what is answered is acknowledged."""
        self.calls += 1
        reply = ask(self.fleet.front, self.rollout.key, CHAT, body or self.body(), headers)
        if isinstance(reply, Reply):
            names = [reply.interaction_id(choice) for choice in range(len(reply.choices))]
            self.acknowledged += [name for name in names if name not in self.acknowledged]
        return reply

    def until_answered(self, body: Mapping[str, Any], **headers: str) -> Reply:
        """As an SDK does that does not give up."""

        def answered() -> Reply | None:
            reply = self.ask(body, **headers)
            return reply if isinstance(reply, Reply) else None

        reply: Reply = wait_until(answered, what="answered")
        return reply

    def recorded(self) -> list[str]:
        detail = self.fleet.admin("GET", f"/rl/sessions/{self.rollout.session_id}").json()
        return [turn["interaction_id"] for each in detail["trajectories"] for turn in each["interactions"]]

    def kept(self) -> str:
        """What is recorded, in words."""
        recorded = self.recorded()
        if recorded == self.acknowledged:
            return NOTHING_MORE
        lost = [name for name in self.acknowledged if name not in recorded]
        more = [name for name in recorded if name not in self.acknowledged]
        return f"{len(lost)} acknowledged interactions LOST, {len(more)} that no caller received"

    def exported(self) -> str:
        """Sealed with a reward, unless it is sealed, and exported: every row must be what the engine saw."""
        assert self.rollout.post("/rl/set_reward", {"reward": 1.0}).status in (200, 409)
        request = {"session_ids": [self.rollout.session_id]}
        answer = self.fleet.admin("POST", "/export_trajectories", request)
        assert answer.status == 200, answer.body
        reply = answer.json()
        assert [row["interaction_id"] for row in reply["rows"]] == self.acknowledged
        for place, name in enumerate(self.acknowledged):
            assert unpadded(reply["traj"], place) == expected_row([self.fleet.witness.truth(name)])
        assert self.fleet.admin("POST", "/export_trajectories", request).json() == reply
        return "exported as the engine sampled it"


def scene_at(fleet: Fleet, turns: int = 1) -> Scene:
    scene = Scene(fleet, begin(fleet.front, fleet.key, online=False))
    for _ in range(turns):
        assert isinstance(scene.ask(), Reply)
    return scene


def instruct(engine: Member, **what: Any) -> None:
    assert engine.call("POST", "/script", what).status == 200


def furthest(engine: Member) -> int:
    """Tokens of the furthest call since the last instruction; -1 without any call."""
    most: int = engine.call("GET", "/progress").json()["most"]
    return most


def reached(engine: Member, tokens: int) -> None:
    wait_until(lambda: furthest(engine) >= tokens, what=f"{engine.name} sampled {tokens} tokens")
