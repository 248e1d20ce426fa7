"""The own decoder behind the runner's contract: padding, masks, and weights read from a model folder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from areal.errors import ArealError
from areal.services.inference.engines.embedded.checkpoint import Checkpoint, open_checkpoint
from areal.services.inference.engines.embedded.decoder import Decoder, PrefillShape
from areal.services.inference.engines.embedded.kv_cache import KVCache
from areal.services.inference.engines.embedded.layout import Form, Piece, check, plan
from areal.services.inference.engines.embedded.model_config import ModelConfig
from areal.services.inference.engines.embedded.scheduler import Limits, Move

Progress = Callable[[int, int], None]  # bytes done, bytes in all


class DecoderRunner:
    def __init__(self, config: ModelConfig, limits: Limits, dtype: torch.dtype, device: torch.device) -> None:
        self.vocab_size = config.vocab_size
        self.max_positions = config.max_positions
        self.device = device
        self._config = config
        self._pieces = plan(config)
        self._decoder = Decoder(config, limits.max_length, dtype, device)
        self._cache = KVCache(config.layers, config.kv_heads, config.head_dim, limits.kv_tokens, dtype, device)
        size = sum(buffer.numel() for buffer in self._decoder.buffers.values())
        self.description = f"own decoder, {size} parameters, {str(dtype).removeprefix('torch.')} on {device}"

    def position_bytes(self) -> int:
        return position_bytes(self._config, self._decoder.dtype)

    def reserve(self, rows: int, width: int) -> None:
        self._cache.reserve(rows, width)

    def move(self, move: Move) -> None:
        self._cache.move(move.source, move.target, move.length)

    @torch.inference_mode()
    def prefill(self, tokens: Sequence[Sequence[int]], starts: Sequence[int], first_row: int) -> Tensor:
        lengths = [len(each) for each in tokens]
        time = max(lengths)
        padded = torch.tensor([[*each, *[0] * (time - len(each))] for each in tokens], device=self.device)
        count = torch.tensor(lengths, device=self.device)
        start = torch.tensor(starts, device=self.device)
        steps = torch.arange(time, device=self.device)
        offsets = start[:, None] + steps
        row, step = (steps < count[:, None]).nonzero(as_tuple=True)
        width = max(begin + length for begin, length in zip(starts, lengths, strict=True))
        shape = PrefillShape(
            first_row=first_row,
            offsets=offsets.clamp_(max=width - 1),
            valid=row * time + step,
            rows=row + first_row,
            positions=offsets[row, step],
            mask=self._causal_mask(offsets, width) if any(starts) else None,
            width=width,
        )
        last = torch.arange(len(tokens), device=self.device) * time + count - 1
        return self._decoder.prefill(self._cache, padded, shape, last)

    def _causal_mask(self, offsets: Tensor, width: int) -> Tensor:
        hidden = torch.arange(width, device=self.device) > offsets[:, :, None]
        return self._additive(hidden).unsqueeze(1)

    @torch.inference_mode()
    def decode(self, tokens: Tensor, positions: Tensor, width: int) -> Tensor:
        mask = None
        if len(tokens) > 1:
            hidden = torch.arange(width, device=self.device) > positions[:, None]
            mask = self._additive(hidden)[:, None, None]
        return self._decoder.decode(self._cache, tokens, positions, width, mask)

    def _additive(self, hidden: Tensor) -> Tensor:
        return torch.zeros(hidden.shape, dtype=self._decoder.dtype, device=self.device).masked_fill_(
            hidden, float("-inf")
        )

    def load(self, folder: Path, progress: Progress = lambda done, total: None) -> None:
        """The first load: straight into the buffers, told byte by byte."""
        checkpoint = open_checkpoint(folder)
        check(self._pieces, checkpoint, tied=self._config.tied)
        self._copy(checkpoint, progress)

    def prepare(self, folder: Path) -> Callable[[], None]:
        checkpoint = open_checkpoint(folder)
        check(self._pieces, checkpoint, tied=self._config.tied)
        for name, tensor in checkpoint.tensors({piece.source for piece in self._pieces}):
            # A sum is not finite when any part is not, and reads each page once, ahead of the swap.
            if not torch.isfinite(tensor.sum(dtype=torch.float64)):
                raise ArealError(f"{folder}: {name} holds values that are not finite")
        return lambda: self._copy(checkpoint, lambda done, total: None)

    @torch.inference_mode()
    def _copy(self, checkpoint: Checkpoint, progress: Progress) -> None:
        by_source: dict[str, Piece] = {piece.source: piece for piece in self._pieces}
        done, total = 0, sum(checkpoint.entries[name].size for name in by_source)
        for name, tensor in checkpoint.tensors(set(by_source)):
            _place(by_source[name], tensor, self._decoder.buffers[by_source[name].target], self._config.head_dim)
            done += checkpoint.entries[name].size
            progress(done, total)


def position_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    return config.layers * 2 * config.kv_heads * config.head_dim * dtype.itemsize


def _place(piece: Piece, tensor: Tensor, buffer: Tensor, head_dim: int) -> None:
    """Copy one tensor into its rows, bringing rotary pairs together."""
    if piece.form is not Form.PLAIN:
        halves = tensor.view(-1, 2, head_dim // 2, *tensor.shape[1:])
        tensor = halves.transpose(1, 2).reshape(tensor.shape)
    buffer[piece.start : piece.stop].copy_(tensor)
