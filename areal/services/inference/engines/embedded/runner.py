"""The contract between the engine and whatever computes the model, and the choice of who does.

Rows of a KV cache are numbered from 0. All methods but ``prepare`` are called by the engine's thread, between or in
steps; ``prepare`` may run beside a step in another thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from areal.services.inference.engines.embedded.lora import Adapter
from areal.services.inference.engines.embedded.spans import Span
from areal.services.inference.engines.embedded.steps import Copy
from areal.services.weight_update.arrival import Arrival

Adapters = Sequence[Adapter | None]


class ModelRunner(Protocol):
    vocab_size: int
    max_positions: int
    device: torch.device
    keeps_prefixes: bool  # whether positions can be copied between rows that both go on
    description: str  # for people: architecture, size, dtype, device

    def position_bytes(self) -> int:
        """KV memory of one position of one sequence."""
        ...

    def reserve(self, rows: int, width: int) -> None:
        """Make room for ``rows`` rows of ``width`` positions, keeping what is cached."""
        ...

    def prefill(
        self, tokens: Sequence[Sequence[int]], starts: Sequence[int], first_row: int, adapters: Adapters = ()
    ) -> Tensor:
        """Compute ``tokens[i]`` from position ``starts[i]`` of row ``first_row + i``, on top of what the row caches.

        Logits [len(tokens), vocab] float32 after the last token of each. ``adapters`` has one for each sequence, or
        is empty when none has one.
        """
        ...

    def score(self, tokens: Sequence[int], adapter: Adapter | None = None) -> Iterator[Tensor]:
        """Logits [part, vocab] float32 after each of ``tokens`` in order, part by part; no row is touched."""
        ...

    def decode(self, tokens: Tensor, positions: Tensor, spans: Sequence[Span], adapters: Adapters = ()) -> Tensor:
        """Compute one token for rows 0..n-1, ``positions`` [n] being cached lengths; ``spans`` are of the lengths that
        the rows have with it, and hold all of them in order.

        Logits [n, vocab] float32.
        """
        ...

    def copy(self, copy: Copy) -> None:
        """Move, keep, restore or drop cached positions, as the scheduler's values say."""
        ...

    def prepare(self, folder: Path, arrival: Arrival | None = None) -> Callable[[], object]:
        """Check that ``folder``, or one file, holds this model's weights, whole and finite, without touching those in
        use, and make them ready as far as there is room. Raises ArealError, and then nothing has changed.

        ``arrival``: they are still on their way. The returned function puts them in, while ``folder`` still holds
        them. What it returns is what they replace: freeing it takes time.
        """
        ...

    def forget(self) -> None:
        """Hold on to no folder that ``prepare`` read. Not beside it."""
        ...

    def read_adapter(self, name: str, folder: Path) -> Adapter:
        """By any thread. Raises ArealError where the folder is no adapter of this model, or none can be served."""
        ...

    def release(self) -> None:
        """Give back the memory of weights and cache; all rows are lost. Raises ArealError, with nothing changed, where
        the weights cannot be put elsewhere."""
        ...

    def restore(self) -> None:
        """Have the weights again as they were."""
        ...
