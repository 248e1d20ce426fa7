"""One choice of an answer while it grows: tokens in, text out, cut at stop strings.

Keeps every sampled token up to and with the one that ended it, so that tokens, log-probabilities and versions stay in
step; the text leaves out stop strings, special tokens and what came after.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from areal.services.inference.data_proxy.detokenize import TextStream
from areal.services.inference.data_proxy.stops import StopScanner
from areal.services.inference.engines.base import EngineDelta, FinishReason, TopLogprobs


@dataclass(frozen=True, slots=True)
class Update:
    """What one delta brought to choice ``index``: text, and the tokens from ``start`` to ``end`` of it."""

    index: int
    text: str
    start: int
    end: int
    finish_reason: FinishReason | None = None


class Choice:
    """``index`` is its place in the whole answer; the engine may count from elsewhere."""

    def __init__(self, index: int, stream: TextStream, stops: Sequence[str]) -> None:
        self.index = index
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.versions: list[int] = []
        self.top_logprobs: list[TopLogprobs] = []
        self.finish_reason: FinishReason | None = None
        self._stream = stream
        self._scanner = StopScanner(stops)
        self._token_by_token = bool(stops)
        self._text: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self._text)

    def push(self, delta: EngineDelta) -> Update:
        """Raises AssertionError for a choice that has ended: the caller drops what comes after."""
        assert self.finish_reason is None
        start = len(self.token_ids)
        hidden = self._ends_with_stop_token(delta)
        visible = delta.token_ids[:-1] if hidden else delta.token_ids
        text, taken = self._read(visible)
        finish = delta.finish_reason
        if taken is None:
            taken = len(delta.token_ids)
            if finish is not None:
                tail, met = self._finish_text()
                text, finish = text + tail, FinishReason.STOP if met else finish
        else:
            finish = FinishReason.STOP
        self._keep(delta, taken)
        self.finish_reason = finish
        self._text.append(text)
        return Update(self.index, text, start, len(self.token_ids), finish)

    def _ends_with_stop_token(self, delta: EngineDelta) -> bool:
        stop = delta.stop_token_id
        return stop is not None and bool(delta.token_ids) and delta.token_ids[-1] == stop

    def _read(self, token_ids: tuple[int, ...]) -> tuple[str, int | None]:
        """The text to emit, and how many tokens count when a stop string was met."""
        if not self._token_by_token:
            return self._stream.push(token_ids), None
        text = ""
        for position, token_id in enumerate(token_ids):
            scanned = self._scanner.push(self._stream.push((token_id,)))
            text += scanned.text
            if scanned.stop is not None:
                return text, position + 1
        return text, None

    def _finish_text(self) -> tuple[str, bool]:
        """What was held back, now that no more comes; whether a stop string was in it after all."""
        scanned = self._scanner.push(self._stream.flush())
        if scanned.stop is not None:
            return scanned.text, True
        return scanned.text + self._scanner.flush(), False

    def _keep(self, delta: EngineDelta, count: int) -> None:
        self.token_ids.extend(delta.token_ids[:count])
        self.logprobs.extend(delta.logprobs[:count])
        self.versions.extend(delta.versions[:count])
        if delta.top_logprobs is not None:
            self.top_logprobs.extend(delta.top_logprobs[:count])
