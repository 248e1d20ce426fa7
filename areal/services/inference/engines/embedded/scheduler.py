"""The scheduler of an engine's steps: pure, no tensors.

The KV cache is a rectangle of rows, one per sequence, as wide as the longest of them. Invariants:

* Decoding sequences hold rows 0..d-1; at most one sequence, prefilled in part, holds row d. A batch is thus always a
  slice of the cache. When a row becomes free the last one moves into it.
* Sequences are admitted in order of arrival, and only the last chunk of a prefill may be cut short, so prefills also
  complete in order.
* rows * width never exceeds ``kv_tokens``. When growing sequences no longer fit, the newest is preempted: it goes back
  to the head of the queue and is computed again later. The oldest always runs on.
* Tokens that a running row or a cached prefix has computed under the same weights are copied. A prompt that shares a
  prefix with one being computed waits for it; an identical prompt is added to the batch as its copy.
* While both have work, prefill and decode alternate: a queue of prompts delays a token by one prefill of at most
  ``prefill_tokens`` padded positions.

The engine's thread appends to a sequence's ``output``, ``logprobs`` and ``versions`` (one entry per token each) and
increments ``produced`` last; any other thread may read the first ``produced`` entries at any time.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum
from functools import cached_property
from itertools import chain, groupby
from typing import TYPE_CHECKING

from areal.dataclasses import dataclass, field

if TYPE_CHECKING:
    from torch import Tensor

    from areal.dataset.vision import Pixels
    from areal.services.inference.engines.embedded.grammar import Matcher
    from areal.services.inference.engines.embedded.linear import Adapter
    from areal.wire.sampling import SamplingParams

TopLogprobs = list[tuple[int, float]]
# Positions that must be free for a new row's growth, so that it is not preempted at once.
HEADROOM = 64


class Finish(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"  # cancelled by its caller
    DEAD_END = "dead_end"  # its grammar allows no further token: see ``fault``
    LOST = "lost"  # the engine ended first: the output is incomplete


@dataclass(slots=True, eq=False)
class TokenSequence:
    prompt: list[int]
    sampling: SamplingParams
    allowance: int  # tokens it may generate
    stop_ids: frozenset[int] = frozenset()
    index: int = 0  # its place among the request's choices
    key: int = 0  # the key of its random numbers (``sampler.stream_key``)
    adapter: Adapter | None = None
    matcher: Matcher | None = None  # its grammar's state at the newest token
    pixels: Pixels | None = None  # the images in its prompt
    row: int | None = None  # its row of the KV cache, while it is admitted
    cached: int = 0  # positions that are computed
    arrival: int = 0  # order of arrival, given by the scheduler
    output: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    top: list[TopLogprobs] = field(default_factory=list)
    produced: int = 0
    finish: Finish | None = None
    fault: str = ""  # why its grammar allows no further token
    stop_token: int | None = None
    counts: Tensor | None = None  # [vocab] times generated, while penalties need it
    seen: Tensor | None = None  # [vocab] whether in prompt or output

    @property
    def kind(self) -> int:
        """The adapter's serial: sequences of different kinds cannot share keys and values."""
        return self.adapter.serial if self.adapter else 0

    @property
    def length(self) -> int:
        """Tokens of prompt and output. The newest one is not in the cache yet."""
        return len(self.prompt) + len(self.output)

    def tokens(self, start: int, stop: int) -> list[int]:
        """Return positions ``start:stop`` of prompt and output together."""
        count = len(self.prompt)
        if stop <= count:
            return self.prompt[start:stop]
        return self.prompt[start:] + self.output[max(0, start - count) : stop - count]


@dataclass(frozen=True)
class SchedulerLimits:
    max_rows: int = 32
    max_length: int = 2048  # positions of one sequence, prompt and output
    kv_tokens: int = 65536  # positions of the cache, at least max_length
    prefill_tokens: int = 2048  # padded positions of one prefill
    kept_tokens: int = 0  # positions of the prefix cache
    shortest_share: int = 32  # shortest prefix, in positions, that is copied
    copies_rows: bool = True  # whether a running row's positions can be copied to another


@dataclass(frozen=True)
class Move:
    """Copy the first ``length`` positions of row ``source`` to row ``target``."""

    source: int
    target: int
    length: int


@dataclass(frozen=True)
class Keep:
    """Copy the first ``length`` positions of ``row`` to the prefix cache, as entry ``number``."""

    row: int
    length: int
    number: int


@dataclass(frozen=True)
class Restore:
    """Copy the first ``length`` positions of entry ``number`` to row ``target``."""

    number: int
    target: int
    length: int


@dataclass(frozen=True)
class Drop:
    """Delete entry ``number``."""

    number: int


@dataclass(frozen=True)
class Spread:
    """Copy the first ``length`` positions of rows ``sources`` to rows ``targets``, all at once: a row may be both."""

    sources: tuple[int, ...]
    targets: tuple[int, ...]
    length: int


Copy = Move | Keep | Restore | Drop | Spread


def merge_moves(copies: Iterable[Copy]) -> Iterator[Copy]:
    """Yield the same copies, with successive moves as one ``Spread`` of the same effect."""
    for are_moves, group in groupby(copies, key=lambda copy: isinstance(copy, Move)):
        if not are_moves:
            yield from group
            continue
        origin: dict[int, int] = {}  # target row -> row whose content it has
        longest = 0
        for move in group:
            assert isinstance(move, Move)
            origin[move.target] = origin.get(move.source, move.source)
            longest = max(longest, move.length)
        yield Spread(tuple(origin.values()), tuple(origin), longest)


@dataclass(frozen=True)
class Chunk:
    """Compute positions start:stop of a sequence; if ``stop`` is its length, its next token is sampled."""

    sequence: TokenSequence
    start: int
    stop: int

    @property
    def completes(self) -> bool:
        return self.stop == self.sequence.length


@dataclass(frozen=True)
class PromptCopy:
    """A sequence that is copied from an identical one, the completing chunk with index ``chunk``."""

    sequence: TokenSequence
    chunk: int


@dataclass(frozen=True)
class Prefill:
    """The chunks' sequences hold consecutive rows from ``first_row``, and their copies the rows after those.

    Order of execution: ``moves``, room for the rectangle, ``fills`` (shared prefixes of new rows), the chunks,
    ``spread``.
    """

    chunks: tuple[Chunk, ...]
    first_row: int
    rows: int  # the rectangle that the step needs
    width: int
    moves: tuple[Copy, ...] = ()
    fills: tuple[Copy, ...] = ()
    copies: tuple[PromptCopy, ...] = ()

    @cached_property
    def completed(self) -> tuple[tuple[TokenSequence, int], ...]:
        """The sequences that are complete after the step, by row, with the index of the chunk that has their logits."""
        own = [(chunk.sequence, place) for place, chunk in enumerate(self.chunks) if chunk.completes]
        return (*own, *((copy.sequence, copy.chunk) for copy in self.copies))

    @property
    def spread(self) -> Spread | None:
        """Copies computed chunks to the rows of their identical sequences."""
        if not self.copies:
            return None
        sources = tuple(self.first_row + copy.chunk for copy in self.copies)
        first = self.first_row + len(self.chunks)
        longest = max(self.chunks[copy.chunk].stop for copy in self.copies)
        return Spread(sources, tuple(range(first, first + len(self.copies))), longest)


@dataclass(frozen=True)
class Decode:
    """One more token for each of ``sequences``, which hold rows 0, 1, .... ``moves`` are executed first."""

    sequences: tuple[TokenSequence, ...]
    rows: int  # the rectangle that the step needs, a partial prefill's row included
    width: int
    moves: tuple[Copy, ...] = ()


class PrefixCache:
    """The index of prefixes whose keys and values the runner holds under the same number. ``find`` returns the entry
    with the longest common prefix of one kind. An entry is dropped when a longer one contains it. When the entries
    exceed the capacity, the least recently used is dropped."""

    def __init__(self, capacity: int, shortest: int) -> None:
        self.capacity = capacity  # tokens of all entries
        self.shortest = shortest  # tokens; less is not worth a copy
        self.size = 0
        self._entries: OrderedDict[int, list[int]] = OrderedDict()  # least recently used first
        self._heads: dict[int, tuple[int, ...]] = {}  # kind and first tokens, by number
        self._by_head: dict[tuple[int, ...], list[int]] = {}  # the inverse
        self._numbers = 0

    def has_room(self, count: int) -> bool:
        """Return whether an entry of ``count`` tokens is worth a copy and fits."""
        return self.shortest <= count <= self.capacity

    def add(self, tokens: list[int], kind: int = 0) -> tuple[int | None, list[int]]:
        """Add an entry. Returns its number, None if too short, too long or known, and the dropped numbers."""
        count = len(tokens)
        if not self.has_room(count):
            return None, []
        head = self._head(tokens, kind)
        alike = self._by_head.get(head, [])
        shared = {number: common_prefix(self._entries[number], tokens, self.shortest) for number in alike}
        if count in shared.values():
            return None, []
        dropped = [number for number, length in shared.items() if length == len(self._entries[number])]
        for number in dropped:
            self._drop(number)
        while self.size + count > self.capacity:
            dropped.append(next(iter(self._entries)))
            self._drop(dropped[-1])
        self._numbers += 1
        self._entries[self._numbers] = tokens
        self._heads[self._numbers] = head
        self._by_head.setdefault(head, []).append(self._numbers)
        self.size += count
        return self._numbers, dropped

    def find(self, tokens: Sequence[int], kind: int = 0) -> tuple[int, int]:
        """Return (number, length) of the entry with the longest common prefix; length 0 if it is too short."""
        best, length = 0, 0
        for number in self._by_head.get(self._head(tokens, kind), []):
            shared = common_prefix(self._entries[number], tokens, self.shortest)
            if shared > length:
                best, length = number, shared
        if length:
            self._entries.move_to_end(best)
        return best, length

    def clear(self) -> list[int]:
        """Drop all entries. Returns their numbers."""
        numbers = list(self._entries)
        self._entries.clear()
        self._heads.clear()
        self._by_head.clear()
        self.size = 0
        return numbers

    def _head(self, tokens: Sequence[int], kind: int) -> tuple[int, ...]:
        return (kind, *tokens[: self.shortest])

    def _drop(self, number: int) -> None:
        tokens = self._entries.pop(number)
        self.size -= len(tokens)
        head = self._heads.pop(number)
        self._by_head[head].remove(number)
        if not self._by_head[head]:
            del self._by_head[head]


def common_prefix(one: Sequence[int], other: Sequence[int], shortest: int) -> int:
    """Return the length of the common prefix, 0 if it is below ``shortest``. Bisects, to compare slices."""
    high = min(len(one), len(other))
    low = max(shortest, 1)
    if high < low or one[:low] != other[:low]:
        return 0
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


class BatchScheduler:
    def __init__(self, limits: SchedulerLimits) -> None:
        assert limits.kv_tokens >= limits.max_length
        self.limits = limits
        self.waiting: deque[TokenSequence] = deque()
        self.decoding: list[TokenSequence] = []  # by row
        self.partial: TokenSequence | None = None
        self.preemptions = 0
        self.shared_tokens = 0  # positions copied instead of computed
        self.prefixes = PrefixCache(limits.kept_tokens, limits.shortest_share)
        self._arrivals = 0
        self._decode_is_due = False

    @property
    def running(self) -> list[TokenSequence]:
        """Admitted sequences, by row."""
        return [*self.decoding, self.partial] if self.partial else list(self.decoding)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.decoding or self.partial)

    def add(self, sequence: TokenSequence) -> None:
        assert 0 < sequence.length < self.limits.max_length
        sequence.arrival = self._arrivals
        self._arrivals += 1
        self.waiting.append(sequence)

    def schedule(self) -> Prefill | Decode | None:
        """Return the next step, or None without work. The caller executes it, then calls ``commit``."""
        moves = self._preempt()
        if not (self._decode_is_due and self.decoding):
            prefill = self._prefill(moves)
            if prefill is not None:
                self._decode_is_due = True
                return prefill
        self._decode_is_due = False
        if not self.decoding:
            return None
        rows = len(self.decoding) + (self.partial is not None)
        return Decode(tuple(self.decoding), rows, self._width(), moves)

    def commit(self, step: Prefill | Decode) -> None:
        """Record that the step's positions are in the cache. Completed prefills decode from now on."""
        if isinstance(step, Decode):
            for sequence in step.sequences:
                sequence.cached += 1
            return
        for chunk in step.chunks:
            chunk.sequence.cached = chunk.stop
            if not chunk.completes:
                self.partial = chunk.sequence
            elif self.partial is chunk.sequence:
                self.partial = None
        for sequence, place in step.completed:
            sequence.cached = step.chunks[place].stop
            self.decoding.append(sequence)

    def forget_cache(self) -> tuple[Copy, ...]:
        """Invalidate all cached positions. Every sequence returns to the queue, in order of arrival."""
        for sequence in sorted(self.running, key=lambda each: each.arrival, reverse=True):
            sequence.row, sequence.cached = None, 0
            self.waiting.appendleft(sequence)
        self.decoding.clear()
        self.partial = None
        return tuple(Drop(number) for number in self.prefixes.clear())

    def remove(self, sequences: Iterable[TokenSequence]) -> tuple[Copy, ...]:
        """Remove ended sequences. The returned copies close the gaps between the rows."""
        moves: list[Copy] = []
        for sequence in sorted(sequences, key=lambda each: -1 if each.row is None else each.row, reverse=True):
            if sequence.row is None:
                self.waiting.remove(sequence)
            else:
                moves += self._vacate(sequence)
        return tuple(moves)

    def _prefill(self, moves: tuple[Copy, ...]) -> Prefill | None:
        if not (self.partial or self.waiting):
            return None
        first_row, width = len(self.decoding), self._width()
        chunks: list[Chunk] = []
        fills: list[Copy] = []
        copies: list[PromptCopy] = []
        for sequence in chain([self.partial] if self.partial else [], self.waiting):
            rows, wider = first_row + len(chunks) + len(copies) + 1, max(width, sequence.length)
            start, fill = sequence.cached, None
            if sequence.row is None:
                if not self._has_room(rows, wider):
                    break
                if chunks and self._is_copy(sequence, chunks[-1]):
                    copies.append(PromptCopy(sequence, len(chunks) - 1))
                    continue
                start, fill = self._shared(sequence, first_row + len(chunks))
                if self._is_being_computed(sequence, start, chunks):
                    break
            stop = self._stop(chunks, start, sequence.length)
            if stop == start or (copies and stop < sequence.length):  # a chunk that is cut short must hold the last row
                break
            chunks.append(Chunk(sequence, start, stop))
            fills += [fill] if fill else []
            width = wider
            if stop < sequence.length:
                break
        if not chunks:
            return None
        rows = first_row + len(chunks) + len(copies)
        step = Prefill(tuple(chunks), first_row, rows, width, moves, tuple(fills), tuple(copies))
        self._admit(step)
        return step

    def _admit(self, step: Prefill) -> None:
        """Assign rows to the waiting sequences of the step."""
        held = [(chunk.sequence, chunk.start) for chunk in step.chunks]
        held += [(copy.sequence, step.chunks[copy.chunk].stop) for copy in step.copies]
        for row, (sequence, copied) in enumerate(held, step.first_row):
            if sequence.row is None:
                sequence.row, sequence.cached = row, copied
                self.shared_tokens += copied
                self.waiting.popleft()

    def _is_copy(self, sequence: TokenSequence, chunk: Chunk) -> bool:
        """Return whether the chunk computes an identical prompt, as for several samples of one prompt."""
        other = chunk.sequence
        fresh = not sequence.output and not other.output
        same = sequence.kind == other.kind and sequence.prompt == other.prompt
        return self.limits.copies_rows and chunk.completes and fresh and same

    def _shared(self, sequence: TokenSequence, row: int) -> tuple[int, Copy | None]:
        """Return the length of the sequence's prefix that is computed already, and the copy of it to ``row``. Never the
        whole sequence: its last token is always computed, for its logits."""
        if sequence.length <= self.limits.shortest_share:
            return 0, None
        wanted = sequence.tokens(0, sequence.length - 1)
        number, best = self.prefixes.find(wanted, sequence.kind)
        copy: Copy | None = Restore(number, row, best) if best else None
        for other in self.running:
            if other.kind == sequence.kind:
                length = self._common(wanted, other, other.cached)
                if length > best:
                    assert other.row is not None
                    best, copy = length, Move(other.row, row, length)
        return best, copy

    def _is_being_computed(self, sequence: TokenSequence, shared: int, chunks: list[Chunk]) -> bool:
        """Return whether the batch computes a prefix of the sequence that is worth waiting for."""
        if sequence.length <= self.limits.shortest_share:
            return False
        wanted = sequence.tokens(0, sequence.length - 1)
        worth = shared + self.limits.shortest_share
        alike = (chunk for chunk in chunks if chunk.sequence.kind == sequence.kind)
        return any(self._common(wanted, chunk.sequence, chunk.stop) >= worth for chunk in alike)

    def _common(self, tokens: list[int], other: TokenSequence, computed: int) -> int:
        head = self.limits.shortest_share
        if other.prompt[:head] != tokens[: min(head, len(other.prompt))]:
            return 0
        return common_prefix(tokens, other.tokens(0, computed), self.limits.shortest_share)

    def _has_room(self, rows: int, width: int) -> bool:
        roomy = min(width + HEADROOM, self.limits.max_length)
        return rows <= self.limits.max_rows and rows * roomy <= self.limits.kv_tokens

    def _stop(self, chunks: list[Chunk], start: int, length: int) -> int:
        """Return the end of a sequence's chunk; ``start`` if it must wait for another batch. A batch with its padding
        is within ``prefill_tokens``, and at most half of it is padding."""
        budget = self.limits.prefill_tokens
        wanted = length - start
        if not chunks:
            return start + min(wanted, budget)
        total = sum(chunk.stop - chunk.start for chunk in chunks) + wanted
        padded = (len(chunks) + 1) * max(wanted, *(chunk.stop - chunk.start for chunk in chunks))
        return length if padded <= min(budget, 2 * total) else start

    def _width(self) -> int:
        """Return the length of the longest admitted row with its newest token, the only one that is not cached."""
        width = max([sequence.cached for sequence in self.decoding], default=-1) + 1
        return max(width, self.partial.length) if self.partial else width

    def _preempt(self) -> tuple[Copy, ...]:
        """Preempt sequences, newest first, until the rectangle fits."""
        moves: list[Copy] = []
        if (len(self.decoding) + 1) * self.limits.max_length <= self.limits.kv_tokens:
            return ()  # at any length
        while (rows := len(self.running)) > 1 and rows * self._width() > self.limits.kv_tokens:
            newest = self.partial or max(self.decoding, key=lambda each: each.arrival)
            moves += self._vacate(newest)
            self.waiting.appendleft(newest)
            self.preemptions += 1
        return tuple(moves)

    def _vacate(self, sequence: TokenSequence) -> list[Copy]:
        """Free the row. The last decoding row fills the gap, and a partial one moves down."""
        moves = self._keep(sequence)
        row, sequence.row, sequence.cached = sequence.row, None, 0
        if sequence is self.partial:
            self.partial = None
            return moves
        last = self.decoding.pop()
        if last is not sequence:
            assert row is not None
            self.decoding[row] = last
            moves.append(self._move(last, row))
        if self.partial:
            moves.append(self._move(self.partial, len(self.decoding)))
        return moves

    def _keep(self, sequence: TokenSequence) -> list[Copy]:
        """Keep the row's prefix for a later turn of the conversation, or for the sequence itself when it runs again."""
        if sequence.row is None or not self.prefixes.has_room(sequence.cached):
            return []
        number, dropped = self.prefixes.add(sequence.tokens(0, sequence.cached), sequence.kind)
        copies: list[Copy] = [Drop(each) for each in dropped]
        if number is not None:
            copies.append(Keep(sequence.row, sequence.cached, number))
        return copies

    @staticmethod
    def _move(sequence: TokenSequence, target: int) -> Move:
        assert sequence.row is not None
        move = Move(sequence.row, target, sequence.cached)
        sequence.row = target
        return move
