"""Keys and values of all rows: one tensor a layer, [rows, 2 * kv_heads, positions, head_dim], keys first.

The tensors grow by doubling within a bound on rows * positions, and never shrink; a layer is grown at a time, so that
growing costs one layer's memory extra. What lies beyond a sequence's cached length is garbage that no mask lets in.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_STEP = 64  # positions


class KVCache:
    def __init__(
        self, layers: int, kv_heads: int, head_dim: int, limit: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.rows = 0
        self.width = 0
        self._limit = limit  # rows * positions
        self._heads, self._dim = 2 * kv_heads, head_dim
        self._dtype, self._device = dtype, device
        self.layers: list[Tensor] = [self._empty(0, 0) for _ in range(layers)]

    def reserve(self, rows: int, width: int) -> None:
        """Make room for a rectangle; what is cached stays."""
        if rows <= self.rows and width <= self.width:
            return
        rows, width = self._grown(rows, width)
        for index, old in enumerate(self.layers):
            kept_rows, kept_width = min(self.rows, rows), min(self.width, width)
            new = self._empty(rows, width)
            new[:kept_rows, :, :kept_width] = old[:kept_rows, :, :kept_width]
            self.layers[index] = new
        self.rows, self.width = rows, width

    def release(self) -> None:
        """Forget all."""
        self.rows = self.width = 0
        self.layers = [self._empty(0, 0) for _ in self.layers]

    def spread(self, sources: Sequence[int], targets: Sequence[int], length: int) -> None:
        """The first positions of each source row, to its target row; all are read before any is written."""
        if len(sources) == 1:
            for layer in self.layers:
                layer[targets[0], :, :length] = layer[sources[0], :, :length]
            return
        source, target = torch.tensor([sources, targets], device=self._device)
        for layer in self.layers:
            positions = layer.narrow(2, 0, length)
            positions.index_copy_(0, target, positions.index_select(0, source))

    def read(self, row: int, length: int) -> list[Tensor]:
        """A copy of a row's first positions, layer by layer."""
        return [layer[row, :, :length].clone() for layer in self.layers]

    def write(self, row: int, values: list[Tensor], length: int) -> None:
        """The first positions of what ``read`` gave, into a row."""
        for layer, held in zip(self.layers, values, strict=True):
            layer[row, :, :length] = held[:, :length]

    def _grown(self, rows: int, width: int) -> tuple[int, int]:
        """At least what is asked; twice what there is where the bound allows; a side not asked to grow gives way."""
        width = -(-width // _STEP) * _STEP if rows * -(-width // _STEP) * _STEP <= self._limit else width
        grown_rows = max(rows, self.rows if rows <= self.rows else 2 * self.rows)
        grown_width = max(width, self.width if width <= self.width else 2 * self.width)
        if grown_rows * grown_width <= self._limit:
            return grown_rows, grown_width
        if rows * grown_width <= self._limit:
            return min(grown_rows, self._limit // grown_width), grown_width
        return rows, min(grown_width, max(width, self._limit // rows))

    def _empty(self, rows: int, width: int) -> Tensor:
        # Zeros, because a masked score of garbage may be NaN, and NaN survives a mask.
        return torch.zeros(rows, self._heads, width, self._dim, dtype=self._dtype, device=self._device)
