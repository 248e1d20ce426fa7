"""The prompts of a run as an endless stream, each knowing its position."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from areal.training.data.frontier import DataOrder, Frontier


class Prompt(dict[str, Any]):
    """The ``row``-th of the data set; workflows see a plain dict. ``position`` counts prompts over epochs."""

    def __init__(self, columns: Mapping[str, Any], position: int, row: int) -> None:
        super().__init__(columns)
        self.position = position
        self.row = row


def each_once(dataset: Sequence[Mapping[str, Any]], start: int = 0) -> list[Prompt]:
    """For evaluation: the rows in their order, counted from ``start``."""
    return [Prompt(columns, number, number) for number, columns in enumerate(dataset, start)]


class PromptStream:
    """Takes positions from the frontier as they are asked for."""

    def __init__(self, dataset: Sequence[Mapping[str, Any]], order: DataOrder, frontier: Frontier) -> None:
        self._dataset = dataset
        self._order = order
        self.frontier = frontier

    def row(self, position: int) -> int:
        return self._order.row(position)

    def __iter__(self) -> Iterator[Prompt]:
        while True:
            position = self.frontier.take()
            row = self.row(position)
            yield Prompt(self._dataset[row], position, row)
