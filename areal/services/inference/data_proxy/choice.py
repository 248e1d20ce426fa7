"""One choice of an answer while it grows: tokens become text, cut at stop strings, and the text is parsed.

Keeps every sampled token up to and with the one that ended it, so that tokens, log-probabilities and versions stay in
step; the text leaves out stop strings, special tokens and what came after.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from areal.services.inference.data_proxy.parsers.reader import (
    PLAIN,
    Content,
    Piece,
    Reply,
    ResponseReader,
    first_marker,
    joined,
    possible_start,
)
from areal.services.inference.data_proxy.tokenizer import TextCodec, TextStream
from areal.services.inference.engines.base import EngineDelta, FinishReason, PromptLogprobs, TopLogprobs

# Stop strings. Text that may start a stop string is held back until it is certain; a stop string, or a part of
# one that later completes, is never emitted. The outcome is that of reading character by character and does not depend
# on how tokens split the text: the stop string that *ends* first wins, and of those that end together the longest.


class StopScanner:
    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """The text that may be emitted now, and the stop string that was met; nothing counts after it."""
        if not self._stops:
            return text, None
        text = self._held + text
        met = first_marker(text, 0, self._stops)
        if met is not None:
            self._held = ""
            return text[: met[0]], met[1]
        emitted = len(text) - possible_start(text, 0, self._stops)
        self._held = text[emitted:]
        return text[:emitted], None

    def flush(self) -> str:
        """The held text at the end of the answer: it was not a stop string."""
        held, self._held = self._held, ""
        return held


@dataclass(slots=True)  # not frozen: there is one for each step of each stream, and freezing doubles its cost
class ChoiceUpdate:
    """One delta's contribution to choice ``index``: text, and its tokens from ``start`` to ``end``. ``pieces``: the
    content, reasoning and calls that became certain."""

    index: int
    text: str
    start: int
    end: int
    finish_reason: FinishReason | None = None
    pieces: tuple[Piece, ...] = ()


class Choice:
    """``index`` is its place in the whole answer; the engine may count from elsewhere. ``stop`` is the stop string that
    ended it, ``stop_token_id`` the token that ended it and has no text; ``reply`` is its text as content, reasoning and
    calls."""

    def __init__(
        self, index: int, stream: TextStream, stops: Sequence[str], reader: ResponseReader | None = None
    ) -> None:
        self.index = index
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.versions: list[int] = []
        self.top_logprobs: list[TopLogprobs] = []
        self.finish_reason: FinishReason | None = None
        self._stream = stream
        self._scanner = StopScanner(stops)
        self._reader = reader or PLAIN
        self._token_by_token = bool(stops) or not self._reader.plain
        self._text: list[str] = []
        self._pieces: list[Piece] = []
        self._reasoning_tokens = 0
        self.stop: str | None = None
        self.stop_token_id: int | None = None
        self.reply = Reply()

    @property
    def text(self) -> str:
        return "".join(self._text)

    @property
    def reasoning_tokens(self) -> int:
        return self._reasoning_tokens if self.reply.reasoning else 0

    def push(self, delta: EngineDelta) -> ChoiceUpdate:
        """Raises AssertionError for a choice that has ended: the caller drops later deltas."""
        assert self.finish_reason is None
        start, tokens, finish = len(self.token_ids), delta.token_ids, delta.finish_reason
        hidden = delta.stop_token_id is not None and tokens[-1:] == (delta.stop_token_id,)
        visible = tokens[:-1] if hidden else tokens
        if not self._token_by_token:  # all text is content, and none of it ends the choice
            self.token_ids += tokens
            self.logprobs += delta.logprobs
            self.versions += delta.versions
            if delta.top_logprobs is not None:
                self.top_logprobs += delta.top_logprobs
            if finish is not None and not start:
                text = self._stream.whole(visible)
            else:
                text = self._stream.push(visible) + (self._stream.flush() if finish is not None else "")
            self._text.append(text)
            if finish is not None:
                self.finish_reason = finish
                self.stop_token_id = delta.stop_token_id if hidden else None
                self.reply.content = self.text
            return ChoiceUpdate(self.index, text, start, len(self.token_ids), finish, (Content(text),) if text else ())
        text, taken = self._read(visible)
        if taken is not None:
            finish = FinishReason.STOP
        elif finish is not None:
            text += self._scan(self._stream.flush())
            if self.stop is None:
                text += self._parse(self._scanner.flush())
            else:
                finish = FinishReason.STOP
        count = len(tokens) if taken is None else taken
        self.token_ids += tokens[:count]
        self.logprobs += delta.logprobs[:count]
        self.versions += delta.versions[:count]
        if delta.top_logprobs is not None:
            self.top_logprobs += delta.top_logprobs[:count]
        self.finish_reason = finish
        self._text.append(text)
        if finish is not None:
            self.stop_token_id = delta.stop_token_id if hidden and taken is None else None
            self._pieces.extend(self._reader.flush())
        pieces = joined(self._pieces)
        self._pieces.clear()
        self.reply.add(pieces)
        return ChoiceUpdate(self.index, text, start, len(self.token_ids), finish, pieces)

    def _read(self, token_ids: tuple[int, ...]) -> tuple[str, int | None]:
        """The text to emit, and how many tokens count once a stop string was met or the one wanted call is complete."""
        text = ""
        for position, token_id in enumerate(token_ids):
            text += self._scan(self._stream.push((token_id,)))
            self._reasoning_tokens += self._reader.reasoning_open
            if self.stop is not None or self._reader.done:
                return text, position + 1
        return text, None

    def _scan(self, text: str) -> str:
        text, self.stop = self._scanner.push(text)
        return self._parse(text)

    def _parse(self, text: str) -> str:
        self._pieces.extend(self._reader.push(text))
        return text


# Log-probabilities in the forms of the two APIs. Every sampled token has an entry, also the token that ended the answer
# and those of a stop string: the entries stay in step with ``completion_tokens``. JSON has no minus infinity; the API
# writes -9999.

_LEAST = -9999.0


def _entry(codec: TextCodec, token_id: int, logprob: float) -> dict[str, Any]:
    return {
        "token": codec.token_text(token_id),
        "logprob": max(logprob, _LEAST),
        "bytes": list(codec.bytes_of(token_id)),
    }


def chat_logprobs(codec: TextCodec, choice: Choice, start: int, end: int) -> dict[str, Any]:
    content = []
    for position in range(start, end):
        top = choice.top_logprobs[position] if choice.top_logprobs else ()
        entry = _entry(codec, choice.token_ids[position], choice.logprobs[position])
        content.append({**entry, "top_logprobs": [_entry(codec, token_id, value) for token_id, value in top]})
    return {"content": content, "refusal": None}


def completion_logprobs(codec: TextCodec, choice: Choice, start: int, end: int, offset: int) -> dict[str, Any]:
    """``offset`` is where the first token's text begins in the choice's text."""
    tokens = [codec.token_text(token_id) for token_id in choice.token_ids[start:end]]
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token)
    tops = [
        {codec.token_text(token_id): max(value, _LEAST) for token_id, value in top}
        for top in choice.top_logprobs[start:end]
    ]
    return {
        "tokens": tokens,
        "token_logprobs": plain_logprobs(choice, start, end),
        "top_logprobs": tops or None,
        "text_offset": offsets,
    }


def prompt_logprobs(codec: TextCodec, prompt: Sequence[int], scores: PromptLogprobs, top: int) -> dict[str, Any]:
    """As ``completion_logprobs``, of an echoed prompt; its first token has null."""
    tokens = [codec.token_text(token_id) for token_id in prompt]
    offsets = [0, *accumulate(map(len, tokens[:-1]))]
    tops: list[dict[str, float] | None] = [
        {
            **{codec.token_text(token_id): max(value, _LEAST) for token_id, value in reversed(entry[:top])},
            token: max(value, _LEAST),
        }
        for token, value, entry in zip(tokens[1:], scores.logprobs, scores.top_logprobs, strict=True)
    ]
    return {
        "tokens": tokens,
        "token_logprobs": [None, *(max(value, _LEAST) for value in scores.logprobs)],
        "top_logprobs": [None, *tops] if top else [],
        "text_offset": offsets,
    }


def by_token(codec: TextCodec, prompt: Sequence[int], scores: PromptLogprobs) -> list[dict[str, Any] | None]:
    """vLLM's ``prompt_logprobs``: for each token of a prompt, its own and the likeliest, by token id."""
    told: list[dict[str, Any] | None] = [None]
    for token_id, value, entry in zip(prompt[1:], scores.logprobs, scores.top_logprobs, strict=True):
        every = {token_id: value, **dict(entry)}
        told.append(
            {
                str(each): {"logprob": max(logprob, _LEAST), "decoded_token": codec.token_text(each)}
                for each, logprob in every.items()
            }
        )
    return told


def plain_logprobs(choice: Choice, start: int, end: int) -> list[float]:
    """Of the tokens alone."""
    values = choice.logprobs[start:end]
    return values if not values or min(values) >= _LEAST else [max(value, _LEAST) for value in values]
