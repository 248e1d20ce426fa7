"""The values that scheduler, sampler, runner and HTTP side share: sequences, steps, and the spans of a decode step.

The engine's thread appends to a sequence's ``output``, ``logprobs`` and ``versions`` (equal lengths, one entry a token)
and raises ``produced`` last; any other thread may read the first ``produced`` entries at any time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from areal.services.inference.engines.embedded.grammar import Matcher
    from areal.services.inference.engines.embedded.lora import Adapter
    from areal.wire.sampling import SamplingParams


TopLogprobs = list[tuple[int, float]]


class Finish(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"  # whoever asked for it wanted no more
    LOST = "lost"  # the engine ended first: no answer, though there may be tokens


class TokenSequence:
    """``row`` is its place in the KV cache while it is admitted, ``cached`` how many positions of it are computed."""

    __slots__ = (
        "adapter",
        "allowance",
        "arrival",
        "cached",
        "counts",
        "finish",
        "index",
        "key",
        "logprobs",
        "matcher",
        "output",
        "produced",
        "prompt",
        "row",
        "sampling",
        "seen",
        "stop_ids",
        "stop_token",
        "top",
        "versions",
    )

    def __init__(
        self,
        prompt: list[int],
        sampling: SamplingParams,
        *,
        allowance: int,
        stop_ids: frozenset[int] = frozenset(),
        index: int = 0,
        key: int = 0,
        adapter: Adapter | None = None,
        matcher: Matcher | None = None,
    ) -> None:
        self.prompt = prompt
        self.sampling = sampling
        self.allowance = allowance  # tokens it may generate
        self.stop_ids = stop_ids
        self.index = index  # which of the request's n choices
        self.key = key  # of its random numbers (sampling.stream_key)
        self.adapter = adapter
        self.matcher = matcher  # of its grammar, and at the newest token's place in it
        self.row: int | None = None
        self.cached = 0
        self.arrival = 0  # order of arrival, given by the scheduler
        self.output: list[int] = []
        self.logprobs: list[float] = []
        self.versions: list[int] = []
        self.top: list[TopLogprobs] = []
        self.produced = 0
        self.finish: Finish | None = None
        self.stop_token: int | None = None
        self.counts: Tensor | None = None  # [vocabulary] times generated; kept while penalties need it
        self.seen: Tensor | None = None  # [vocabulary] in prompt or output

    @property
    def kind(self) -> int:
        """Sequences of different kinds have different keys and values for the same tokens."""
        return self.adapter.serial if self.adapter else 0

    @property
    def length(self) -> int:
        """Tokens known: prompt and output. The newest one is not in the cache yet."""
        return len(self.prompt) + len(self.output)

    def tokens(self, start: int, stop: int) -> list[int]:
        """Positions ``start:stop`` of prompt and output together."""
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
    kept_tokens: int = 0  # positions kept beside the cache for prompts that begin alike
    shortest_share: int = 32  # positions; fewer are computed again rather than copied
    copies_rows: bool = True  # whether positions can be in two rows that both go on


@dataclass(frozen=True)
class Move:
    """Copy the first ``length`` positions of row ``source`` to row ``target``."""

    source: int
    target: int
    length: int


@dataclass(frozen=True)
class Keep:
    """Copy the first ``length`` positions of ``row`` aside, as ``number``."""

    row: int
    length: int
    number: int


@dataclass(frozen=True)
class Restore:
    """Copy the first ``length`` positions of what was kept as ``number`` to row ``target``."""

    number: int
    target: int
    length: int


@dataclass(frozen=True)
class Drop:
    """Forget what was kept as ``number``."""

    number: int


@dataclass(frozen=True)
class Spread:
    """Copy the first ``length`` positions of each of the rows ``sources`` to the row of ``targets`` in its place, all
    at the same time: a target may be another's source."""

    sources: tuple[int, ...]
    targets: tuple[int, ...]
    length: int


Copy = Move | Keep | Restore | Drop | Spread


def joined(copies: Iterable[Copy]) -> Iterator[Copy]:
    """The same copies, neighbouring moves as one: what each target has when the last of them is done."""
    for are_moves, group in groupby(copies, key=lambda copy: isinstance(copy, Move)):
        if not are_moves:
            yield from group
            continue
        origin: dict[int, int] = {}  # of what is in a row
        longest = 0
        for move in group:
            assert isinstance(move, Move)
            origin[move.target] = origin.get(move.source, move.source)
            longest = max(longest, move.length)
        yield Spread(tuple(origin.values()), tuple(origin), longest)


@dataclass(frozen=True)
class Chunk:
    """Compute positions start:stop of a sequence; when ``stop`` is its length, its next token is sampled."""

    sequence: TokenSequence
    start: int
    stop: int

    @property
    def completes(self) -> bool:
        return self.stop == self.sequence.length


@dataclass(frozen=True)
class PromptCopy:
    """A sequence whose tokens are those of a chunk that completes: not computed, but copied. ``chunk`` is its place."""

    sequence: TokenSequence
    chunk: int


@dataclass(frozen=True)
class Prefill:
    """The chunks' sequences hold consecutive rows from ``first_row``, and their copies the rows after those.

    Executed in this order: ``moves``, room for the rectangle, ``fills`` (what new rows share), the chunks, ``spread``.
    """

    chunks: tuple[Chunk, ...]
    first_row: int
    rows: int  # the rectangle that the step needs
    width: int
    moves: tuple[Copy, ...] = ()
    fills: tuple[Copy, ...] = ()
    copies: tuple[PromptCopy, ...] = ()

    @property
    def completed(self) -> tuple[tuple[TokenSequence, int], ...]:
        """The sequences that have all their positions after the step, by row, and whose chunk's logits are theirs."""
        own = [(chunk.sequence, place) for place, chunk in enumerate(self.chunks) if chunk.completes]
        return (*own, *((copy.sequence, copy.chunk) for copy in self.copies))

    @property
    def spread(self) -> Spread | None:
        """The copies of what was computed to the copies' rows."""
        if not self.copies:
            return None
        sources = tuple(self.first_row + copy.chunk for copy in self.copies)
        first = self.first_row + len(self.chunks)
        longest = max(self.chunks[copy.chunk].stop for copy in self.copies)
        return Spread(sources, tuple(range(first, first + len(self.copies))), longest)


@dataclass(frozen=True)
class Decode:
    """One token more for each of ``sequences``, which hold rows 0, 1, ...; ``moves`` come before."""

    sequences: tuple[TokenSequence, ...]
    rows: int  # the rectangle that the step needs, a partial prefill's row included
    width: int
    moves: tuple[Copy, ...] = ()


# -- spans
#
# Attention over a rectangle of rows costs as much as if all of them were as long as the longest. Rows whose lengths
# differ much are cheaper in several rectangles, each of which costs a call; rows of one length need no mask besides.
# All rows of a batch grow together, so a cut stays the best one for as long as the batch is the same.

_MOST_RUNS = 32  # looked at; beyond it, lengths count by the ``_COARSE`` of them
_COARSE = 32


@dataclass(frozen=True, slots=True)
class Span:
    """Rows start:stop, the longest of which has ``width`` positions. ``even``: all of them have."""

    start: int
    stop: int
    width: int
    even: bool

    def grown(self, by: int) -> Span:
        return Span(self.start, self.stop, self.width + by, self.even)

    def cost(self, call: int) -> int:
        """In positions looked at; a call is worth so many, and a mask half as many."""
        return _cost(self.stop - self.start, self.width, self.even, call)


def _cost(rows: int, width: int, even: bool, call: int) -> int:
    return rows * width + (call if even else call + call // 2)


def cut(lengths: Sequence[int], call: int) -> tuple[Span, ...]:
    """The rows 0, 1, ... of these lengths in the spans that cost least, where there are not too many lengths to tell;
    ``call`` as in ``Span.cost``."""
    runs = _runs(lengths, 1)
    if len(runs) > _MOST_RUNS:
        runs = _runs(lengths, _COARSE)
    least, begins = [0], [0]  # of the runs before each: what they cost, and where the last span of them begins
    for end in range(1, len(runs) + 1):
        stop, width, even = runs[end - 1].stop, 0, True
        best, begin = -1, 0
        for at in range(end - 1, -1, -1):
            run = runs[at]
            even = even and run.even and width in (0, run.width)
            width = max(width, run.width)
            cost = least[at] + _cost(stop - run.start, width, even, call)
            if best < 0 or cost < best:
                best, begin = cost, at
        least.append(best)
        begins.append(begin)
    spans: list[Span] = []
    end = len(runs)
    while end:
        joined_runs = runs[begins[end] : end]
        widest = max(run.width for run in joined_runs)
        even = all(run.even and run.width == widest for run in joined_runs)
        spans.append(Span(joined_runs[0].start, joined_runs[-1].stop, widest, even))
        end = begins[end]
    return tuple(reversed(spans))


def _runs(lengths: Sequence[int], coarse: int) -> list[Span]:
    """Neighbours of one length."""
    runs: list[Span] = []
    start = 0
    for _, group in groupby(lengths, key=lambda length: length // coarse):
        of_run = list(group)
        widest = max(of_run)
        runs.append(Span(start, start + len(of_run), widest, min(of_run) == widest))
        start += len(of_run)
    return runs
