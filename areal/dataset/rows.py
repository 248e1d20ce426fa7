"""A data set in memory: a sequence of dicts, with as much of the interface of ``datasets`` as training needs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, overload

Row = dict[str, Any]


class Rows(Sequence[Row]):
    """Immutable: ``map`` and ``filter`` give new ones. ``source``, and ``places`` of the rows in it, are for errors."""

    def __init__(self, rows: Iterable[Row], source: str = "", places: Sequence[str] = ()) -> None:
        self._rows = list(rows)
        self.source = source
        self._places = places

    def place(self, index: int) -> str:
        """Where a row came from."""
        return self._places[index] if index < len(self._places) else f"{self.source or 'the data set'}: row {index}"

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> Row: ...

    @overload
    def __getitem__(self, index: slice) -> Rows: ...

    def __getitem__(self, index: int | slice) -> Row | Rows:
        return Rows(self._rows[index], self.source) if isinstance(index, slice) else self._rows[index]

    def __iter__(self) -> Iterator[Row]:
        return iter(self._rows)

    def __repr__(self) -> str:
        return f"Rows({len(self._rows)} rows of {self.column_names}, from {self.source or 'memory'})"

    @property
    def column_names(self) -> list[str]:
        return list(self._rows[0]) if self._rows else []

    def map(self, function: Callable[[Row], Row]) -> Rows:
        return Rows((function(row) for row in self._rows), self.source)

    def filter(self, function: Callable[[Row], bool]) -> Rows:
        return Rows((row for row in self._rows if function(row)), self.source)

    def select(self, indices: Iterable[int]) -> Rows:
        return Rows((self._rows[index] for index in indices), self.source)
