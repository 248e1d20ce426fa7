"""What a dialect is: a body translated to a chat's, and a writer that says the answer in the dialect's way."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import orjson

from areal.services.inference.data_proxy.choice import Choice, Update
from areal.services.inference.data_proxy.parsers import Piece, Reply
from areal.services.inference.data_proxy.shapes import Frame, chat_finish_reason
from areal.services.web.errors import ApiError

Uses = Callable[[str], bool]
"""Whether the model's chat template has a variable of this name."""


@dataclass(frozen=True)
class Outcome:
    """How an answer ended: ``finish`` as a chat completion says it; ``stop`` is the stop string that was met."""

    finish: str
    prompt_tokens: int
    output_tokens: int
    reasoning_tokens: int = 0
    stop: str | None = None


class Writer(Protocol):
    """Says one answer, as events or as a whole."""

    def opening(self, prompt_tokens: int) -> bytes: ...

    def pieces(self, pieces: Iterable[Piece]) -> bytes: ...

    def closing(self, outcome: Outcome) -> bytes: ...

    def whole(self, reply: Reply, outcome: Outcome) -> dict[str, Any]: ...


@dataclass(frozen=True)
class Translated:
    """``chat`` is the body for a chat completion. ``names`` says what its fields are called in the dialect; ``ignored``
    are those of the dialect that had no effect. ``writer`` takes the answer's id, the model's name and
    the second in which the answer was made."""

    chat: dict[str, Any]
    writer: Callable[[str, str, int], Writer]
    ignored: tuple[str, ...] = ()
    names: Mapping[str, str] = field(default_factory=dict)


class DialectShape:
    """A writer, fed from a token engine's answer."""

    def __init__(self, frame: Frame, writer: Writer) -> None:
        self._frame = frame
        self._writer = writer

    def opening(self) -> bytes:
        return self._writer.opening(sum(map(len, self._frame.prompts)))

    def update(self, update: Update) -> bytes:
        return self._writer.pieces(update.pieces)

    def closing(self) -> bytes:
        return self._writer.closing(self._outcome())

    def whole(self) -> bytes:
        return orjson.dumps(self._writer.whole(self._frame.choices[0].reply, self._outcome()))

    def _outcome(self) -> Outcome:
        frame, choice = self._frame, self._frame.choices[0]
        return Outcome(
            finish=str(chat_finish_reason(choice)),
            prompt_tokens=sum(map(len, frame.prompts)),
            output_tokens=len(choice.token_ids),
            reasoning_tokens=choice.reasoning_tokens,
            stop=choice.stop or _stop_token(frame, choice),
        )


def _stop_token(frame: Frame, choice: Choice) -> str | None:
    """The stop string that is a special token, where that ended the choice."""
    text = frame.codec.token_text(choice.token_ids[-1]) if choice.token_ids else ""
    return text if text in frame.answering.stops else None


@contextmanager
def named(names: Mapping[str, str]) -> Iterator[None]:
    """Refusals of a chat's fields, under the names that the caller knows them by."""
    try:
        yield
    except ApiError as error:
        known = names.get(error.param or "")
        if known is None or error.param is None:
            raise
        message = error.message.replace(error.param, known)
        raise ApiError(error.status, message, code=error.code, param=known, headers=error.headers) from error


def sse(kind: str, data: Mapping[str, Any]) -> bytes:
    return b"event: " + kind.encode() + b"\ndata: " + orjson.dumps({"type": kind, **data}) + b"\n\n"
