"""Dialects are APIs other than chat completions: a body is translated to a chat body, a writer writes the answer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import orjson

from areal.services.http.errors import ApiError, bad_request
from areal.services.inference.data_proxy.choice import ChoiceUpdate
from areal.services.inference.data_proxy.openai import ResponseState, chat_finish_reason
from areal.services.inference.data_proxy.parsers.reader import Piece, Reply

TemplateUses = Callable[[str], bool]
"""Whether the model's chat template has a variable of this name."""


@dataclass(frozen=True)
class ResponseSummary:
    """How an answer ended: ``finish`` is a chat completion's finish reason, ``stop`` the stop string that was met."""

    finish: str
    prompt_tokens: int
    output_tokens: int
    reasoning_tokens: int = 0
    stop: str | None = None


class DialectWriter(Protocol):
    """Writes one answer, as events or as a whole."""

    def opening(self, prompt_tokens: int) -> bytes: ...

    def pieces(self, pieces: Iterable[Piece]) -> bytes: ...

    def closing(self, summary: ResponseSummary) -> bytes: ...

    def whole(self, reply: Reply, summary: ResponseSummary) -> dict[str, Any]: ...


@dataclass(frozen=True)
class ChatTranslation:
    """``chat`` is the body of a chat completion. ``names``: the dialect's names of its fields. ``ignored``: the
    dialect's fields without effect. ``writer`` takes the answer's id, the model's name and the second
    of its creation."""

    chat: dict[str, Any]
    writer: Callable[[str, str, int], DialectWriter]
    ignored: tuple[str, ...] = ()
    names: Mapping[str, str] = field(default_factory=dict)


class DialectSerializer:
    """Gives a token engine's answer to a dialect's writer."""

    def __init__(self, state: ResponseState, writer: DialectWriter) -> None:
        self._state = state
        self._writer = writer

    def opening(self) -> bytes:
        return self._writer.opening(sum(map(len, self._state.prompts)))

    def update(self, update: ChoiceUpdate) -> bytes:
        return self._writer.pieces(update.pieces)

    def closing(self) -> bytes:
        return self._writer.closing(self._summary())

    def whole(self) -> bytes:
        return orjson.dumps(self._writer.whole(self._state.choices[0].reply, self._summary()))

    def _summary(self) -> ResponseSummary:
        state, choice = self._state, self._state.choices[0]
        # A stop string that is a special token has no text: the last token tells.
        last = state.codec.token_text(choice.token_ids[-1]) if choice.token_ids else ""
        return ResponseSummary(
            finish=str(chat_finish_reason(choice)),
            prompt_tokens=sum(map(len, state.prompts)),
            output_tokens=len(choice.token_ids),
            reasoning_tokens=choice.reasoning_tokens,
            stop=choice.stop or (last if last in state.options.stops else None),
        )


@contextmanager
def dialect_field_names(names: Mapping[str, str]) -> Iterator[None]:
    """Errors about a chat body's field name the dialect's own field."""
    try:
        yield
    except ApiError as error:
        known = names.get(error.param or "")
        if known is None or error.param is None:
            raise
        message = error.message.replace(error.param, known)
        raise ApiError(error.status, message, code=error.code, param=known, headers=error.headers) from error


def sse_event(kind: str, data: Mapping[str, Any]) -> bytes:
    return b"event: " + kind.encode() + b"\ndata: " + orjson.dumps({"type": kind, **data}) + b"\n\n"


def string_of(item: Mapping[str, Any], name: str, where: str) -> str:
    """A field of an item at ``where``. Raises 400 unless it is a string."""
    value = item.get(name)
    if not isinstance(value, str):
        raise bad_request(f"{where}.{name} must be a string", param=f"{where}.{name}")
    return value
