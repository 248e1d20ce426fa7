"""Many callers while one process after the other is killed: each call is recorded once, as the engine saw it."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from tests.reliability.asking import Reply
from tests.reliability.faults import Outcome, fault
from tests.reliability.fleet import Fleet
from tests.reliability.scenes import NOTHING_MORE, RETRY, Scene
from tests.services.inference.recorder.rollouts import begin
from tests.services.inference.running_service import later
from tests.services.processes import wait_until

CALLERS, TURNS = 12, 12
PATIENCE_S = 240.0


class Caller:
    """One conversation, each turn tried until it is answered."""

    def __init__(self, fleet: Fleet, number: int) -> None:
        self.scene = Scene(fleet, begin(fleet.front, fleet.key, online=False))
        self.number = number
        self.turns = 0

    def talk(self) -> None:
        messages: list[dict[str, Any]] = []
        for turn in range(TURNS):
            messages.append({"role": "user", "content": f"question {self.number}.{turn}"})
            body = {"messages": messages, "return_token_ids": True, "stream": bool(turn % 2), "max_tokens": 64}
            reply = self._answered(body, f"key-{turn}")
            messages.append({"role": "assistant", "content": reply.choices[0].text})
            self.turns += 1

    def _answered(self, body: dict[str, Any], key: str) -> Reply:
        self.scene.rollout.front = self.scene.fleet.front
        first = self.scene.ask(body, **{"Idempotency-Key": key})
        if isinstance(first, Reply):
            return first

        def again() -> Reply | None:
            self.scene.rollout.front = self.scene.fleet.front
            reply = self.scene.ask(body, **{"Idempotency-Key": key}, **RETRY)
            return reply if isinstance(reply, Reply) else None

        reply: Reply = wait_until(again, PATIENCE_S, "answered in the end")
        return reply


@pytest.mark.slow
@pytest.mark.timeout(600)
@fault("Killed processes (`kill -9`)", "each in turn", f"with {CALLERS} concurrent callers")
def test_everything_killed_in_turn_under_load_loses_nothing(fleet: Fleet, outcome: Outcome) -> None:
    dice = random.Random(3)
    callers = [Caller(fleet, number) for number in range(CALLERS)]
    talks = [later(caller.talk) for caller in callers]
    victims = itertools.cycle(dice.sample(fleet.members, len(fleet.members)))
    for goal in range(CALLERS, CALLERS * TURNS, CALLERS):
        wait_until(lambda goal=goal: sum(each.turns for each in callers) >= goal, PATIENCE_S, "they come on")
        victim = next(victims)
        victim.kill()
        victim.restart()
        if victim is fleet.router:
            fleet.register()
    for talk in talks:
        talk.result(PATIENCE_S)
    fleet.wait_ready()
    outcome.callers("each call is answered in the end")
    for caller in callers:
        caller.scene.rollout.front = fleet.front
        assert caller.scene.kept() == NOTHING_MORE
        assert len(caller.scene.acknowledged) == TURNS
    outcome.recorded("each call once")
    for caller in callers:
        assert caller.scene.exported()
    outcome.healed("everything is exported as the engine sampled it, as one conversation each")
