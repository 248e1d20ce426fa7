"""One choice of an answer while it grows: tokens in, text out, cut at stop strings; and what the text turns out to be.

Keeps every sampled token up to and with the one that ended it, so that tokens, log-probabilities and versions stay in
step; the text leaves out stop strings, special tokens and what came after.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from areal.services.inference.data_proxy.detokenize import TextStream
from areal.services.inference.data_proxy.parsers import PLAIN, Content, Piece, Reader, Reply, joined
from areal.services.inference.data_proxy.stops import StopScanner
from areal.services.inference.engines.base import EngineDelta, FinishReason, TopLogprobs


@dataclass(slots=True)  # not frozen: there is one for each step of each stream, and freezing doubles its cost
class Update:
    """What one delta brought to choice ``index``: text, and the tokens from ``start`` to ``end`` of it. ``pieces`` are
    what became certain of the content, the reasoning and the calls in it. ``after_first_s``: the delta's."""

    index: int
    text: str
    start: int
    end: int
    finish_reason: FinishReason | None = None
    pieces: tuple[Piece, ...] = ()
    after_first_s: float = 0.0


class Choice:
    """``index`` is its place in the whole answer; the engine may count from elsewhere. ``stop`` is the stop string that
    ended it, ``stop_token_id`` the token that did and has no text; ``reply`` is its text as content, reasoning and
    calls."""

    def __init__(self, index: int, stream: TextStream, stops: Sequence[str], reader: Reader | None = None) -> None:
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

    def push(self, delta: EngineDelta) -> Update:
        """Raises AssertionError for a choice that has ended: the caller drops what comes after."""
        assert self.finish_reason is None
        if not self._token_by_token:
            return self._push_plain(delta)
        start = len(self.token_ids)
        hidden = self._ends_with_stop_token(delta)
        visible = delta.token_ids[:-1] if hidden else delta.token_ids
        text, taken = self._read(visible)
        finish = delta.finish_reason
        if taken is not None:
            finish = FinishReason.STOP
        elif finish is not None:
            tail = self._finish_text()
            text, finish = text + tail, finish if self.stop is None else FinishReason.STOP
        self._keep(delta, len(delta.token_ids) if taken is None else taken)
        self.finish_reason = finish
        self._text.append(text)
        if finish is not None:
            self.stop_token_id = delta.stop_token_id if hidden and taken is None else None
            self._pieces.extend(self._reader.flush())
        return Update(self.index, text, start, len(self.token_ids), finish, self._new_pieces(), delta.after_first_s)

    def _push_plain(self, delta: EngineDelta) -> Update:
        """As ``push``, where all text is content and none of it ends the choice."""
        start, finish, tokens = len(self.token_ids), delta.finish_reason, delta.token_ids
        hidden = delta.stop_token_id is not None and self._ends_with_stop_token(delta)
        visible = tokens[:-1] if hidden else tokens
        at_once = finish is not None and not start
        text = self._stream.whole(visible) if at_once else self._stream.push(visible)
        self.token_ids += tokens
        self.logprobs += delta.logprobs
        self.versions += delta.versions
        if delta.top_logprobs is not None:
            self.top_logprobs += delta.top_logprobs
        if finish is not None:
            text += "" if at_once else self._stream.flush()
            self.finish_reason = finish
            self.stop_token_id = delta.stop_token_id if hidden else None
        self._text.append(text)
        if finish is not None:
            self.reply.content = self.text
        pieces = (Content(text),) if text else ()
        return Update(self.index, text, start, len(self.token_ids), finish, pieces, delta.after_first_s)

    def _new_pieces(self) -> tuple[Piece, ...]:
        pieces = joined(self._pieces)
        self._pieces.clear()
        self.reply.add(pieces)
        return pieces

    def _ends_with_stop_token(self, delta: EngineDelta) -> bool:
        stop = delta.stop_token_id
        return stop is not None and bool(delta.token_ids) and delta.token_ids[-1] == stop

    def _read(self, token_ids: tuple[int, ...]) -> tuple[str, int | None]:
        """The text to emit, and how many tokens count when a stop string was met, or the one call that is wanted."""
        text = ""
        for position, token_id in enumerate(token_ids):
            text += self._scanned(self._stream.push((token_id,)))
            self._reasoning_tokens += self._reader.reasoning_open
            if self.stop is not None or self._reader.done:
                return text, position + 1
        return text, None

    def _scanned(self, text: str) -> str:
        scanned = self._scanner.push(text)
        self.stop = scanned.stop
        return self._said(scanned.text)

    def _said(self, text: str) -> str:
        self._pieces.extend(self._reader.push(text))
        return text

    def _finish_text(self) -> str:
        """What was held back, now that no more comes; a stop string may be in it after all."""
        text = self._scanned(self._stream.flush())
        return text if self.stop is not None else text + self._said(self._scanner.flush())

    def _keep(self, delta: EngineDelta, count: int) -> None:
        self.token_ids.extend(delta.token_ids[:count])
        self.logprobs.extend(delta.logprobs[:count])
        self.versions.extend(delta.versions[:count])
        if delta.top_logprobs is not None:
            self.top_logprobs.extend(delta.top_logprobs[:count])
