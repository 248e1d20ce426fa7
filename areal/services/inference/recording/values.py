"""What is recorded of a model call, and what comes back out."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from areal.services.inference.recording.conversation import Conversation

TRUNCATED = "length"


@dataclass(frozen=True)
class TokenSample:
    """One choice, token for token as the engine saw and sampled it. The last three lists have equal lengths.

    ``after`` digests the conversation including this answer; ``text`` is the length and digest of the prompt and
    answer as text, by which a next turn knows that it may go on with these very tokens. ``temperature`` is that of the
    logprobs and of the sampling, 0 for a greedy answer.
    """

    prompt_ids: Sequence[int]
    output_ids: Sequence[int]
    logprobs: Sequence[float]
    versions: Sequence[int]
    finish_reason: str
    temperature: float = 1.0
    after: bytes | None = None
    text: tuple[int, bytes] | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)  # what a replay needs besides, as JSON


@dataclass(frozen=True)
class TextSample:
    """One choice of an external model: messages in, the assistant's message out."""

    messages: Sequence[Mapping[str, Any]]
    response: Mapping[str, Any]
    finish_reason: str
    after: bytes | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)


Sample = TokenSample | TextSample


@dataclass(frozen=True)
class Call:
    """One answered model call: all its choices, recorded together or not at all.

    ``conversation`` is None for a call without messages. ``digest`` is that of the request body, ``idempotency``
    that of the caller's Idempotency-Key.
    """

    answer_id: str
    model: str
    created: int
    digest: bytes
    samples: Sequence[Sample]
    conversation: Conversation | None = None
    idempotency: bytes | None = None

    def interaction_id(self, choice: int) -> str:
        return self.answer_id if choice == 0 else f"{self.answer_id}-{choice}"


@dataclass(frozen=True)
class Turn:
    """One recorded interaction, read back. ``parent`` is the sequence number of the turn it continues.

    ``joined``: its prompt begins with exactly the parent's tokens.
    """

    seq: int
    interaction_id: str
    answer_id: str
    created: int
    parent: int | None
    joined: bool
    model: str
    finish_reason: str
    reward: float | None
    at: float

    @property
    def truncated(self) -> bool:
        return self.finish_reason == TRUNCATED

    def size(self) -> dict[str, int]:
        """How long it is, for people."""
        return {}


@dataclass(frozen=True)
class TokenTurn(Turn):
    prompt_ids: array[int]
    output_ids: array[int]
    logprobs: array[float]
    versions: array[int]
    extra: Mapping[str, Any]
    temperature: float = 1.0

    def size(self) -> dict[str, int]:
        return {"prompt_tokens": len(self.prompt_ids), "output_tokens": len(self.output_ids)}


@dataclass(frozen=True)
class TextTurn(Turn):
    messages: Sequence[Mapping[str, Any]]
    response: Mapping[str, Any]
    extra: Mapping[str, Any]

    def size(self) -> dict[str, int]:
        return {"messages": len(self.messages)}


@dataclass(frozen=True)
class TrajectoryTurns:
    """One trajectory with all its turns, in the order in which they were recorded."""

    session_id: str
    number: int
    turns: Sequence[Turn]
    failures: Mapping[str, int] = field(default_factory=dict)  # calls that failed, by code
