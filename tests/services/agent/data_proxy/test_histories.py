"""Generated histories against a model: clients that talk while the data proxy is killed again and again.

The model is what each client received. At the end every acknowledged turn is there once, in its order; one whose
answer was lost is there once or not at all, and once where the client repeated it by its Idempotency-Key; and each
turn's agent had just the complete turns before it.
"""

from __future__ import annotations

import http.client
import json
import random
import threading
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.services.agent.data_proxy.pair import Pair
from tests.services.inference.running_service import later
from tests.services.processes import wait_until

SESSIONS, TURNS, KILLS = 6, 14, 4
KINDS = ("plain", "plain", "tools", "fail", "cut")


@dataclass
class SentMessage:
    """``outcome`` None: the client was not told."""

    message: str
    outcome: str | None


@dataclass
class Client:
    pair: Pair
    session: str
    dice: random.Random
    heard: threading.Semaphore
    sent: list[SentMessage] = field(default_factory=list)

    def talk(self) -> None:
        for number in range(TURNS):
            message = f"{self.dice.choice(KINDS)} {number}"
            self.turn(message, f"key-{number}" if self.dice.random() < 0.5 else None)
            self.heard.release()

    def turn(self, message: str, key: str | None) -> None:
        while True:
            outcome = self.attempt(message, key)
            if key is None or outcome in ("complete", "agent"):
                self.sent.append(SentMessage(message, outcome))
                return
            if outcome == "infra":  # recorded, and a repetition runs it again
                self.sent.append(SentMessage(message, outcome))
                if message.startswith("cut"):
                    return

    def attempt(self, message: str, key: str | None) -> str | None:
        """How the turn ended; None where its answer was lost, also before it began."""
        proxy = self.pair.proxy
        try:
            last = self.pair.turn(self.session, message, idempotency_key=key)[-1]
        except (OSError, http.client.HTTPException, json.JSONDecodeError):
            last = {"type": "lost"}
        if last["type"] == "complete":
            return "complete"
        if last["type"] == "failed":
            return str(last["failure"])
        wait_until(lambda: self.pair.proxy is not proxy, what="the data proxy's successor")
        return None


def check(client: Client) -> None:
    shown = client.pair.show(client.session)
    recorded = [(turn["messages"][0]["content"], turn["outcome"]) for turn in shown["recorded_turns"]]
    left = iter(recorded)
    for reply in client.sent:
        if reply.outcome is not None:
            for message, outcome in left:
                if (message, outcome) == (reply.message, reply.outcome):
                    break
                assert may_be_lost(client, message), (message, outcome, recorded, client.sent)
            else:
                raise AssertionError(f"{reply} is not in {recorded}")
    assert all(may_be_lost(client, message) for message, _ in left)
    done = [message for message, outcome in recorded if outcome == "complete"]
    assert len(done) == len(set(done))
    check_histories(client, shown["recorded_turns"])


def may_be_lost(client: Client, message: str) -> bool:
    """Recorded without the client's knowledge: its answer was lost, or it failed before a repetition."""
    return any(reply.message == message for reply in client.sent)


def check_histories(client: Client, turns: list[dict[str, Any]]) -> None:
    """What the agent was given are the complete turns before."""
    given = {call["run_id"]: call["history"] for call in client.pair.calls(client.session)}
    history: list[Any] = []
    for turn in turns:
        assert given[turn["run_id"]] == history
        if turn["outcome"] == "complete":
            history += turn["messages"]
    assert client.pair.show(client.session)["history"] == history


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.extended) for seed in (1, 2))])
def test_histories_neither_lose_nor_repeat_turns(own: Pair, seed: int) -> None:
    dice, heard = random.Random(seed), threading.Semaphore(0)
    clients = [
        Client(own, own.start(f"session/{number}"), random.Random(f"{seed}-{number}"), heard)
        for number in range(SESSIONS)
    ]
    talks = [later(client.talk) for client in clients]
    for _ in range(KILLS):
        for _ in range(dice.randrange(4, SESSIONS * TURNS // (KILLS + 1))):
            assert heard.acquire(timeout=60)
        own.proxy.kill()
        own.restart()
    for talk in talks:
        talk.result(120)
    own.proxy.kill()
    own.restart()
    for client in clients:
        check(client)
