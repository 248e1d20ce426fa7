"""A small domain with the interface of ``examples.agents.tau2.domains``: rooms with lamps."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from examples.agents.tau2.domains import Ended, Environment, Message, Task, Who

CODE = "code 42"


class Rooms:
    """A user wants light in one room. The user can ``look``, the agent can ``switch`` lamps. It is done when that lamp,
    and no other, is on, and the agent has told the code."""

    lamps: tuple[str, ...] = ("hall", "attic")
    agent_prompt = "You switch lamps."

    def tasks(self) -> Mapping[str, Task]:
        greeting = "Welcome to the {}."
        return {
            name: Task(
                name, [{"role": "assistant", "content": greeting.format(name)}], f"You want light in the {name}."
            )
            for name in (*self.lamps, "cellar", "endless")
        }

    def tools(self, who: Who) -> list[dict[str, Any]]:
        name = "switch" if who == "assistant" else "look"
        room = {"type": "object", "properties": {"room": {"type": "string"}}, "required": ["room"]}
        return [{"type": "function", "function": {"name": name, "description": name, "parameters": room}}]

    def replay(self, task: str, conversation: Sequence[Message]) -> Environment:
        return House(self.lamps, conversation)

    def score(self, task: str, conversation: Sequence[Message], ended: Ended) -> float:
        told = any(CODE in (each["content"] or "") for each in conversation if each["role"] == "assistant")
        return float(ended == "user_stop" and told and House(self.lamps, conversation).lit == {task})


class Sheds(Rooms):
    lamps = ("shed",)


class House:
    """The cellar has no lamp: its switch is broken."""

    def __init__(self, lamps: Sequence[str], conversation: Sequence[Message]) -> None:
        self._lamps = lamps
        self.lit = set[str]()
        for message in conversation:
            for call in message.get("tool_calls", ()):
                if call["function"]["name"] == "switch":
                    self.lit.add(room_of(call))

    def call(self, who: Who, name: str, arguments: Mapping[str, Any]) -> str:
        room = arguments["room"]
        if room == "cellar":
            raise RuntimeError("there is no lamp in the cellar")
        if room not in self._lamps:
            return "Error: there is no such room"
        if name == "switch":
            self.lit.add(room)
        return f"the {room} is {'lit' if room in self.lit else 'dark'}"


def room_of(call: Mapping[str, Any]) -> str:
    return str(json.loads(call["function"]["arguments"])["room"])
