"""The prompts of a run as an endless stream, each knowing its position."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from areal.training.data.frontier import DataOrder, Frontier


class Prompt(dict[str, Any]):
    """A row of the data set; workflows see a plain dict."""

    def __init__(self, row: Mapping[str, Any], position: int) -> None:
        super().__init__(row)
        self.position = position


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
            yield Prompt(self._dataset[self.row(position)], position)
