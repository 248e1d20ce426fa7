"""A finished interaction as one value: the function boundary between answering a call and keeping what it was."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from areal.services.inference.engines.base import FinishReason


@dataclass(frozen=True)
class Interaction:
    """One prompt and one choice, token for token as the engine saw and sampled them.

    ``output_ids``, ``logprobs`` and ``versions`` have equal lengths and include the token that ended the choice.
    A stop string cuts ``text`` but not the tokens that spell it. For a chat, ``messages`` are the caller's and
    ``answer`` is the assistant's message that it got; both in OpenAI's form, whichever API the call came by.
    """

    request_id: str
    model: str
    choice: int
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    finish_reason: FinishReason
    text: str
    metadata: Mapping[str, Any] = field(default_factory=dict)
    messages: Sequence[Mapping[str, Any]] = ()
    answer: Mapping[str, Any] = field(default_factory=dict)


Finished = Callable[[Interaction], Awaitable[None]]
"""Called for each choice before the answer's last byte; what it raises fails the request."""
