"""What the clients ask for: a tool and a form of answer that a random model ends soon when a grammar holds it."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

SAY = "Hello there, friend!"
TOKENS = 24
ENOUGH = 4000  # tokens: one in 320 ends the answer


class Mood(BaseModel, extra="forbid"):  # a random model would write more properties without an end
    """How somebody feels."""

    mood: Literal["good", "bad"]
    sure: bool


TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "set_light",
        "description": "Switch the light.",
        "parameters": {
            "type": "object",
            "properties": {"state": {"type": "string", "enum": ["on", "off"]}},
            "required": ["state"],
            "additionalProperties": False,
        },
    },
}
