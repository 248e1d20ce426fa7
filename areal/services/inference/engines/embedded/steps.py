"""What the scheduler is bound by, and what it tells the runner to do: plain values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby

from areal.services.inference.engines.embedded.sequence import Sequence


@dataclass(frozen=True)
class Limits:
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

    sequence: Sequence
    start: int
    stop: int

    @property
    def completes(self) -> bool:
        return self.stop == self.sequence.length


@dataclass(frozen=True)
class Twin:
    """A sequence whose tokens are those of a chunk that completes: not computed, but copied. ``chunk`` is its place."""

    sequence: Sequence
    chunk: int


@dataclass(frozen=True)
class Prefill:
    """The chunks' sequences hold consecutive rows from ``first_row``, and their twins the rows after those.

    Executed in this order: ``moves``, room for the rectangle, ``fills`` (what new rows share), the chunks, ``spread``.
    """

    chunks: tuple[Chunk, ...]
    first_row: int
    rows: int  # the rectangle that the step needs
    width: int
    moves: tuple[Copy, ...] = ()
    fills: tuple[Copy, ...] = ()
    twins: tuple[Twin, ...] = ()

    @property
    def completed(self) -> tuple[tuple[Sequence, int], ...]:
        """The sequences that have all their positions after the step, by row, and whose chunk's logits are theirs."""
        own = [(chunk.sequence, place) for place, chunk in enumerate(self.chunks) if chunk.completes]
        return (*own, *((twin.sequence, twin.chunk) for twin in self.twins))

    @property
    def spread(self) -> Spread | None:
        """The copies of what was computed to the twins' rows."""
        if not self.twins:
            return None
        sources = tuple(self.first_row + twin.chunk for twin in self.twins)
        first = self.first_row + len(self.chunks)
        longest = max(self.chunks[twin.chunk].stop for twin in self.twins)
        return Spread(sources, tuple(range(first, first + len(self.twins))), longest)


@dataclass(frozen=True)
class Decode:
    """One token more for each of ``sequences``, which hold rows 0, 1, ...; ``moves`` come before."""

    sequences: tuple[Sequence, ...]
    rows: int  # the rectangle that the step needs, a partial prefill's row included
    width: int
    moves: tuple[Copy, ...] = ()
