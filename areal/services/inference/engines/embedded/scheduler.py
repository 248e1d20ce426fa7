"""What runs in the next step; pure, no tensors.

The KV cache is a rectangle of rows, one a sequence, as wide as the longest of them. Invariants:

* Decoding sequences hold rows 0..d-1; at most one sequence, prefilled in part, holds row d. A batch is thus always a
  slice of the cache. When a row falls free the last one moves into it.
* Sequences are admitted in order of arrival, and only the last chunk of a prefill may be cut short, so prefills also
  complete in order.
* rows * width never exceeds ``kv_tokens``. When growing sequences no longer fit, the newest gives up its row, goes back
  to the head of the queue and is computed again later; the oldest always runs on.
* While both have work, prefill and decode alternate: a queue of prompts delays a token by one prefill of at most
  ``prefill_tokens`` padded positions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain

from areal.services.inference.engines.embedded.sequence import Sequence

# Room that a new row leaves for growth, in positions, so that it does not push itself out again at once.
HEADROOM = 64


@dataclass(frozen=True)
class Limits:
    max_rows: int = 32
    max_length: int = 2048  # positions of one sequence, prompt and output
    kv_tokens: int = 65536  # positions of the cache, at least max_length
    prefill_tokens: int = 2048  # padded positions of one prefill


@dataclass(frozen=True)
class Move:
    """Copy the first ``length`` positions of row ``source`` to row ``target``."""

    source: int
    target: int
    length: int


@dataclass(frozen=True)
class Chunk:
    """Compute positions start:stop of a sequence; when ``stop`` is its length, its next token is sampled."""

    sequence: Sequence
    start: int
    stop: int

    @property
    def completes(self) -> bool:
        return self.stop == self.sequence.length


@dataclass(frozen=True)
class Prefill:
    """The chunks' sequences hold consecutive rows from ``first_row``; ``moves`` come before."""

    chunks: tuple[Chunk, ...]
    first_row: int
    rows: int  # the rectangle that the step needs
    width: int
    moves: tuple[Move, ...] = ()


@dataclass(frozen=True)
class Decode:
    """One token more for each of ``sequences``, which hold rows 0, 1, ...; ``moves`` come before."""

    sequences: tuple[Sequence, ...]
    longest: int  # positions that the longest of them has after the step
    rows: int  # the rectangle that the step needs, a partial prefill's row included
    width: int
    moves: tuple[Move, ...] = ()


class Scheduler:
    def __init__(self, limits: Limits) -> None:
        assert limits.kv_tokens >= limits.max_length
        self.limits = limits
        self.waiting: deque[Sequence] = deque()
        self.decoding: list[Sequence] = []  # by row
        self.partial: Sequence | None = None
        self.preemptions = 0
        self._arrivals = 0
        self._decode_is_due = False

    @property
    def running(self) -> list[Sequence]:
        """Admitted sequences, by row."""
        return [*self.decoding, self.partial] if self.partial else list(self.decoding)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.decoding or self.partial)

    def add(self, sequence: Sequence) -> None:
        assert 0 < sequence.length < self.limits.max_length
        sequence.arrival = self._arrivals
        self._arrivals += 1
        self.waiting.append(sequence)

    def schedule(self) -> Prefill | Decode | None:
        """The next step, or None when nothing waits or runs. The caller executes it, then calls ``commit``."""
        moves = self._shed()
        if not (self._decode_is_due and self.decoding):
            prefill = self._prefill(moves)
            if prefill is not None:
                self._decode_is_due = True
                return prefill
        self._decode_is_due = False
        if not self.decoding:
            return None
        rows = len(self.decoding) + (self.partial is not None)
        longest = max(sequence.length for sequence in self.decoding)
        return Decode(tuple(self.decoding), longest, rows, self._width(), moves)

    def commit(self, step: Prefill | Decode) -> None:
        """The step's positions are in the cache now; completed prefills decode from here on."""
        if isinstance(step, Decode):
            for sequence in step.sequences:
                sequence.cached += 1
            return
        for chunk in step.chunks:
            chunk.sequence.cached = chunk.stop
            if not chunk.completes:
                self.partial = chunk.sequence
                continue
            self.decoding.append(chunk.sequence)
            if self.partial is chunk.sequence:
                self.partial = None

    def remove(self, sequences: Iterable[Sequence]) -> tuple[Move, ...]:
        """Take finished or cancelled sequences out, wherever they are; the moves keep the rows dense."""
        moves: list[Move] = []
        for sequence in sorted(sequences, key=lambda each: -1 if each.row is None else each.row, reverse=True):
            if sequence.row is None:
                self.waiting.remove(sequence)
            else:
                moves += self._vacate(sequence)
        return tuple(moves)

    def _prefill(self, moves: tuple[Move, ...]) -> Prefill | None:
        first_row, width = len(self.decoding), self._width()
        chunks: list[Chunk] = []
        for sequence in chain([self.partial] if self.partial else [], self.waiting):
            rows, wider = first_row + len(chunks) + 1, max(width, sequence.length)
            if sequence.row is None and not self._has_room(rows, wider):
                break
            stop = self._stop(chunks, sequence)
            if stop == sequence.cached:
                break
            chunks.append(Chunk(sequence, sequence.cached, stop))
            width = wider
            if stop < sequence.length:
                break
        for offset, chunk in enumerate(chunks):
            if chunk.sequence.row is None:
                assert self.waiting.popleft() is chunk.sequence
                chunk.sequence.row = first_row + offset
        return Prefill(tuple(chunks), first_row, first_row + len(chunks), width, moves) if chunks else None

    def _has_room(self, rows: int, width: int) -> bool:
        roomy = min(width + HEADROOM, self.limits.max_length)
        return rows <= self.limits.max_rows and rows * roomy <= self.limits.kv_tokens

    def _stop(self, chunks: list[Chunk], sequence: Sequence) -> int:
        """Where the sequence's chunk ends; where it starts if it must wait for another batch. A batch keeps the bound
        with its padding, and is never more than half padding."""
        budget = self.limits.prefill_tokens
        wanted = sequence.length - sequence.cached
        if not chunks:
            return sequence.cached + min(wanted, budget)
        total = sum(chunk.stop - chunk.start for chunk in chunks) + wanted
        padded = (len(chunks) + 1) * max(wanted, *(chunk.stop - chunk.start for chunk in chunks))
        return sequence.length if padded <= min(budget, 2 * total) else sequence.cached

    def _width(self) -> int:
        """Positions that the widest admitted row has once its newest token is computed."""
        width = max((sequence.length for sequence in self.decoding), default=0)
        return max(width, self.partial.length) if self.partial else width

    def _shed(self) -> tuple[Move, ...]:
        """Give rows back, newest first, until the rectangle holds every row."""
        moves: list[Move] = []
        while (rows := len(self.running)) > 1 and rows * self._width() > self.limits.kv_tokens:
            newest = self.partial or max(self.decoding, key=lambda each: each.arrival)
            moves += self._vacate(newest)
            self.waiting.appendleft(newest)
            self.preemptions += 1
        return tuple(moves)

    def _vacate(self, sequence: Sequence) -> list[Move]:
        """Free the row; the last decoding row fills the gap, and a partial one follows down."""
        row, sequence.row, sequence.cached = sequence.row, None, 0
        if sequence is self.partial:
            self.partial = None
            return []
        moves: list[Move] = []
        last = self.decoding.pop()
        if last is not sequence:
            assert row is not None
            self.decoding[row] = last
            moves.append(self._move(last, row))
        if self.partial:
            moves.append(self._move(self.partial, len(self.decoding)))
        return moves

    @staticmethod
    def _move(sequence: Sequence, target: int) -> Move:
        assert sequence.row is not None
        move = Move(sequence.row, target, sequence.cached)
        sequence.row = target
        return move
