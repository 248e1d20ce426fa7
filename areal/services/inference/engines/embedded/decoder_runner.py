"""The own decoder behind the runner's contract: padding, masks, and weights read from a model folder."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path

import torch
from torch import Tensor

from areal.errors import ArealError
from areal.services.inference.engines.embedded.arrival import Arrival
from areal.services.inference.engines.embedded.checkpoint import Checkpoint, open_checkpoint
from areal.services.inference.engines.embedded.decoder import Decoder, PrefillShape
from areal.services.inference.engines.embedded.finite import is_finite
from areal.services.inference.engines.embedded.kv_cache import KVCache
from areal.services.inference.engines.embedded.layout import Form, Piece, buffers, check, plan
from areal.services.inference.engines.embedded.lora import Adapter, deltas_of, read_adapter
from areal.services.inference.engines.embedded.matrix import Forms
from areal.services.inference.engines.embedded.memory import free_bytes
from areal.services.inference.engines.embedded.memory_maps import MemoryMaps
from areal.services.inference.engines.embedded.model_config import ModelConfig
from areal.services.inference.engines.embedded.runner import Adapters
from areal.services.inference.engines.embedded.spill import Spill, return_freed_memory
from areal.services.inference.engines.embedded.steps import Copy, Drop, Keep, Limits, Move, Restore

Progress = Callable[[int, int], None]  # bytes done, bytes in all
_ROOM = 1.5  # times the weights that must be free for new ones to be made ready beside those in use


class DecoderRunner:
    keeps_prefixes = True

    def __init__(self, config: ModelConfig, limits: Limits, dtype: torch.dtype, device: torch.device) -> None:
        self.vocab_size = config.vocab_size
        self.max_positions = config.max_positions
        self.device = device
        self._config = config
        self._pieces = sorted(plan(config), key=lambda piece: (piece.target, piece.start))
        self._shapes = buffers(config)
        self._decoder = Decoder(config, limits.max_length, dtype, device)
        self._cache = KVCache(config.layers, config.kv_heads, config.head_dim, limits.kv_tokens, dtype, device)
        self._spill: Spill | None = None
        self._maps = MemoryMaps()
        self._kept: dict[int, list[Tensor]] = {}  # by number: [2 * kv_heads, positions, head_dim] of each layer
        size = sum(math.prod(shape) for shape in self._shapes.values())
        self._bytes = size * dtype.itemsize
        self.description = f"own decoder, {size} parameters, {str(dtype).removeprefix('torch.')} on {device}"

    def position_bytes(self) -> int:
        return position_bytes(self._config, self._decoder.dtype)

    def reserve(self, rows: int, width: int) -> None:
        self._cache.reserve(rows, width)

    def copy(self, copy: Copy) -> None:
        match copy:
            case Move(source, target, length):
                self._cache.move(source, target, length)
            case Keep(row, length, number):
                self._kept[number] = self._cache.read(row, length)
            case Restore(number, target, length):
                self._cache.write(target, self._kept[number], length)
            case Drop(number):
                del self._kept[number]

    @torch.inference_mode()
    def prefill(
        self, tokens: Sequence[Sequence[int]], starts: Sequence[int], first_row: int, adapters: Adapters = ()
    ) -> Tensor:
        lengths = [len(each) for each in tokens]
        time = max(lengths)
        padded = torch.tensor([[*each, *[0] * (time - len(each))] for each in tokens], device=self.device)
        count = torch.tensor(lengths, device=self.device)
        start = torch.tensor(starts, device=self.device)
        steps = torch.arange(time, device=self.device)
        row, step = (steps < count[:, None]).nonzero(as_tuple=True)
        width = max(begin + length for begin, length in zip(starts, lengths, strict=True))
        offsets = (start[:, None] + steps).clamp_(max=width - 1)  # padding may stand anywhere
        shape = PrefillShape(
            first_row=first_row,
            offsets=offsets,
            valid=row * time + step,
            rows=row + first_row,
            positions=offsets[row, step],
            mask=self._causal_mask(offsets, width) if any(starts) else None,
            width=width,
        )
        last = torch.arange(len(tokens), device=self.device) * time + count - 1
        deltas = deltas_of(adapters, time, self.device)
        return self._decoder.prefill(self._cache, padded, shape, last, deltas)

    def _causal_mask(self, offsets: Tensor, width: int) -> Tensor:
        hidden = torch.arange(width, device=self.device) > offsets[:, :, None]
        return self._additive(hidden).unsqueeze(1)

    @torch.inference_mode()
    def decode(self, tokens: Tensor, positions: Tensor, width: int, adapters: Adapters = ()) -> Tensor:
        mask = None
        if len(tokens) > 1:
            hidden = torch.arange(width, device=self.device) > positions[:, None]
            mask = self._additive(hidden)[:, None, None]
        deltas = deltas_of(adapters, 1, self.device)
        return self._decoder.decode(self._cache, tokens, positions, width, mask, deltas)

    def _additive(self, hidden: Tensor) -> Tensor:
        mask = torch.zeros(hidden.shape, dtype=self._decoder.dtype, device=self.device)
        return mask.masked_fill_(hidden, float("-inf"))

    def load(self, folder: Path, progress: Progress = lambda done, total: None) -> None:
        """The first load, told by the bytes."""
        checkpoint = open_checkpoint(folder)
        check(self._pieces, checkpoint, tied=self._config.tied)
        self._copy(checkpoint, progress)

    def prepare(self, folder: Path, arrival: Arrival | None = None) -> Callable[[], object]:
        checkpoint = open_checkpoint(folder)
        check(self._pieces, checkpoint, tied=self._config.tied)
        if self._bytes * _ROOM < free_bytes(self.device):
            new = self._aside(checkpoint, arrival)
            return lambda: self._decoder.adopt(new)
        with checkpoint.reader(self._maps) as read:
            for piece in self._pieces:
                _finite(read, folder, arrival)(piece.source)  # reads each page once, ahead of the swap
        return lambda: self._copy(checkpoint, lambda done, total: None)

    def forget(self) -> None:
        self._maps.forget()

    @torch.inference_mode()
    def _aside(self, checkpoint: Checkpoint, arrival: Arrival | None) -> dict[str, Tensor | Forms]:
        """The weights as the decoder computes with them, beside those in use; in the order in which they arrive."""
        groups = [(target, list(group)) for target, group in groupby(self._pieces, key=lambda piece: piece.target)]
        if arrival is not None:
            ends = arrival.ends
            groups.sort(key=lambda group: max(ends[piece.source] for piece in group[1]))
        new: dict[str, Tensor | Forms] = {}
        with checkpoint.reader(self._maps) as read:
            finite = _finite(read, checkpoint.folder, arrival)
            for target, pieces in groups:
                new |= self._decoder.aside(target, self._assemble(pieces, finite))
        return new

    def read_adapter(self, name: str, folder: Path) -> Adapter:
        return read_adapter(name, folder, self._config, self._decoder.dtype, self.device)

    @torch.inference_mode()
    def release(self) -> None:
        spill = Spill(self.device)
        try:
            for name, values in self._decoder.large():
                spill.put(name, values)
        except ArealError:
            spill.close()
            raise
        self._spill = spill
        self._decoder.release()
        self._cache.release()
        self._kept.clear()
        return_freed_memory(self.device)

    @torch.inference_mode()
    def restore(self) -> None:
        assert self._spill is not None
        for name, values in self._spill.tensors():
            self._decoder.install(name, values)
        self._spill.close()
        self._spill = None

    @torch.inference_mode()
    def _copy(self, checkpoint: Checkpoint, progress: Progress) -> None:
        done, total = 0, sum(checkpoint.entries[piece.source].size for piece in self._pieces)
        with checkpoint.reader(self._maps) as read:
            for target, group in groupby(self._pieces, key=lambda piece: piece.target):
                pieces = list(group)
                self._decoder.install(target, self._assemble(pieces, read))
                done += sum(checkpoint.entries[piece.source].size for piece in pieces)
                progress(done, total)

    def _assemble(self, pieces: list[Piece], read: Callable[[str], Tensor]) -> Tensor:
        """The buffer that ``pieces`` make up, rotary pairs brought together; a lone plain piece is not copied."""
        if len(pieces) == 1 and pieces[0].form is Form.PLAIN:
            return read(pieces[0].source)
        whole = torch.empty(self._shapes[pieces[0].target], dtype=self._decoder.dtype)
        for piece in pieces:
            tensor = read(piece.source)
            if piece.form is not Form.PLAIN:
                halves = tensor.view(-1, 2, self._config.head_dim // 2, *tensor.shape[1:])
                tensor = halves.transpose(1, 2).reshape(tensor.shape)
            whole[piece.start : piece.stop] = tensor
        return whole


def _finite(read: Callable[[str], Tensor], folder: Path, arrival: Arrival | None) -> Callable[[str], Tensor]:
    """``read`` of what has arrived; it raises ArealError for what is no number."""

    def checked(name: str) -> Tensor:
        if arrival is not None:
            arrival.wait(name)
        tensor = read(name)
        if not is_finite(tensor):
            raise ArealError(f"{folder}: {name} holds values that are not finite")
        return tensor

    return checked


def position_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    return config.layers * 2 * config.kv_heads * config.head_dim * dtype.itemsize
