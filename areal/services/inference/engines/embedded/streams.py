"""From the engine's thread to the event loop: who has something to send, told seldom enough to stay cheap.

A step may append a token to each of many sequences every millisecond; waking the loop, and a client, each time would
cost more than the step. So the loop is woken at once when a sequence began or ended, and otherwise at most every
``FLUSH_S``: what a client reads late by that much comes in one line with more tokens. Steps that take longer are read
one by one, at once. While nobody reads a stream, the loop is left alone until a sequence ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass

from areal.services.inference.engines.embedded.sequence import Finish, Sequence, TopLogprobs

FLUSH_S = 0.025  # longer than the window of a data proxy, which then has nothing to wait for


@dataclass(frozen=True)
class Delta:
    """What one sequence of a request has new. ``finish_reason`` is set on its last delta only."""

    index: int
    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    top_logprobs: list[TopLogprobs] | None
    finish_reason: Finish | None
    stop_token_id: int | None


class Stream:
    """One request's sequences, as far as they were handed on. Used by the event loop only.

    ``whole``: the consumer wants everything at the end and nothing before. ``interval``: how many new tokens a sequence
    that runs waits for. ``first_at``: when the first token was there, by ``time.monotonic``.
    """

    def __init__(self, sequences: list[Sequence], *, whole: bool, interval: int = 1) -> None:
        self.sequences = sequences
        self.whole = whole
        self.first_at: float | None = None
        self._interval = interval
        self._live = list(sequences)
        self._sent = {id(sequence): 0 for sequence in sequences}
        self._news = asyncio.Event()
        self.settled = asyncio.Event()  # the consumer has written all that it took

    @property
    def ended(self) -> bool:
        """Every sequence's last delta was taken."""
        return not self._live

    def is_due(self) -> bool:
        """It has its first token to send, or its last."""
        if self.first_at is None and any(each.produced for each in self._live):
            self.first_at = time.monotonic()
        if self.whole:
            return all(each.finish for each in self._live)
        return any(each.finish or (each.produced and not self._sent[id(each)]) for each in self._live)

    def has_news(self, interval: int | None = None) -> bool:
        """``interval``: another than its own."""
        if self.whole:
            return self.is_due()
        least = self._interval if interval is None else interval
        return any(each.finish or each.produced >= self._sent[id(each)] + least for each in self._live)

    def wake(self) -> None:
        self.settled.clear()
        self._news.set()

    async def next(self) -> list[Delta]:
        """Wait to be woken; what is new since the last call."""
        self.settled.set()
        await self._news.wait()
        self._news.clear()
        return [delta for sequence in list(self._live) if (delta := self._take(sequence)) is not None]

    def _take(self, sequence: Sequence) -> Delta | None:
        finish = sequence.finish  # read before the count: a finished sequence grows no more
        start, stop = self._sent[id(sequence)], sequence.produced
        if start == stop and finish is None:
            return None
        self._sent[id(sequence)] = stop
        if finish is not None:
            self._live.remove(sequence)
        return Delta(
            index=sequence.index,
            token_ids=sequence.output[start:stop],
            logprobs=sequence.logprobs[start:stop],
            versions=sequence.versions[start:stop],
            top_logprobs=sequence.top[start:stop] if sequence.sampling.top_logprobs else None,
            finish_reason=finish,
            stop_token_id=sequence.stop_token if finish is not None else None,
        )


class Streams:
    """All open streams. ``progress`` may be called by any thread, everything else by the event loop's."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._open: set[Stream] = set()
        self._urgent = False  # a flush is on its way
        self._armed = False  # a timer runs, or is about to
        self._timer: asyncio.TimerHandle | None = None
        self._flushed_at = 0.0

    def open(self, sequences: list[Sequence], *, whole: bool, interval: int = 1) -> Stream:
        stream = Stream(sequences, whole=whole, interval=interval)
        self._open.add(stream)
        if self._armed:  # perhaps without a timer, while nobody read
            self._arm()
        return stream

    def close(self, stream: Stream) -> None:
        self._open.discard(stream)
        stream.settled.set()

    def progress(self, urgent: bool) -> None:
        # A lost race between two flags costs one call too many, never one too few: each is cleared before reading.
        if urgent and not self._urgent:
            self._urgent = True
            self._loop.call_soon_threadsafe(self._flush_due)
        elif not urgent and not self._armed:
            self._armed = True
            self._loop.call_soon_threadsafe(self._arm)

    def _arm(self) -> None:
        """Where nobody reads a stream the flag stays up without a timer: no step wakes the loop."""
        if self._timer is not None or all(stream.whole for stream in self._open):
            return
        left_s = self._flushed_at + FLUSH_S - self._loop.time()
        if left_s > 0:
            self._timer = self._loop.call_later(left_s, self._flush)
        else:
            self._flush()

    async def settle(self, deadline_s: float) -> None:
        """Hand on all that somebody reads along and wait until it was written; a client too slow for the deadline is
        left."""
        self._tell(interval=1)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(deadline_s):
                for stream in list(self._open):
                    await stream.settled.wait()

    def _flush_due(self) -> None:
        self._urgent = False
        for stream in self._open:
            if stream.is_due():
                stream.wake()

    def _flush(self) -> None:
        self._timer, self._armed, self._flushed_at = None, False, self._loop.time()
        self._tell()

    def _tell(self, interval: int | None = None) -> None:
        for stream in self._open:
            if stream.has_news(interval):
                stream.wake()
