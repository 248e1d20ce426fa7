"""The own decoder behind the runner's contract: padding, masks, and weights read from a model folder.

Of weights in a trainer's memory only what the decoder keeps otherwise (``layout``) is copied: it computes with the rest
where it lies, on lease until the next weights take its place.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from areal.errors import ArealError
from areal.services.inference.engines.embedded.checkpoint import (
    MappedWeights,
    TensorReader,
    WeightFiles,
    is_finite,
    open_checkpoint,
)
from areal.services.inference.engines.embedded.decoder import DecodePart, KVCache, LlamaDecoder, PrefillShape
from areal.services.inference.engines.embedded.lora import Adapter, deltas_of, read_adapter
from areal.services.inference.engines.embedded.matrix import MatrixForms
from areal.services.inference.engines.embedded.model_config import (
    BufferSlice,
    Form,
    ModelConfig,
    buffer_shapes,
    buffer_slices,
    check,
)
from areal.services.inference.engines.embedded.runner import Adapters, WeightOffload, free_bytes, return_freed_memory
from areal.services.inference.engines.embedded.steps import (
    Copy,
    Drop,
    Keep,
    Move,
    Restore,
    SchedulerLimits,
    Span,
    Spread,
)
from areal.services.weight_update.memory import TransferProgress

_SCORED = 256  # tokens of a prompt that is scored at once: their logits are all in memory
Progress = Callable[[int, int], None]  # bytes done, bytes in all
_ROOM = 1.5  # times the weights that must be free for new ones to be made ready beside those in use


class DecoderRunner:
    keeps_prefixes = True

    def __init__(self, config: ModelConfig, limits: SchedulerLimits, dtype: torch.dtype, device: torch.device) -> None:
        self.vocab_size = config.vocab_size
        self.max_positions = config.max_positions
        self.device = device
        self._config = config
        self._pieces = sorted(buffer_slices(config), key=lambda piece: (piece.target, piece.start))
        self._shapes = buffer_shapes(config)
        self._decoder = LlamaDecoder(config, limits.max_length, dtype, device)
        self._cache = KVCache(config.layers, config.kv_heads, config.head_dim, limits.kv_tokens, dtype, device)
        self._spill: WeightOffload | None = None
        self._maps = MappedWeights()
        self._source: TensorReader | None = None  # of what we compute with, where that is borrowed
        self._kept: dict[int, list[Tensor]] = {}  # by number: [2 * kv_heads, positions, head_dim] of each layer
        size = sum(math.prod(shape) for shape in self._shapes.values())
        self._bytes = size * dtype.itemsize
        made = {piece.target for piece in self._pieces if piece.form is not Form.PLAIN}
        self._bytes_made = sum(math.prod(self._shapes[target]) for target in made) * dtype.itemsize
        self.description = f"own decoder, {size} parameters, {str(dtype).removeprefix('torch.')} on {device}"

    def position_bytes(self) -> int:
        return position_bytes(self._config, self._decoder.dtype)

    def reserve(self, rows: int, width: int) -> None:
        self._cache.reserve(rows, width)

    def copy(self, copy: Copy) -> None:
        match copy:
            case Move(source, target, length):
                self._cache.spread((source,), (target,), length)
            case Spread(sources, targets, length):
                self._cache.spread(sources, targets, length)
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

    @torch.inference_mode()
    def score(self, tokens: Sequence[int], adapter: Adapter | None = None) -> Iterator[Tensor]:
        config = self._config
        cache = KVCache(config.layers, config.kv_heads, config.head_dim, len(tokens), self._decoder.dtype, self.device)
        cache.reserve(1, len(tokens))
        for start in range(0, len(tokens), _SCORED):
            part = torch.tensor([list(tokens[start : start + _SCORED])], device=self.device)
            steps = torch.arange(part.shape[1], device=self.device)
            offsets, width = (start + steps).unsqueeze(0), start + part.shape[1]
            shape = PrefillShape(
                first_row=0,
                offsets=offsets,
                valid=steps,
                rows=torch.zeros_like(steps),
                positions=offsets[0],
                mask=self._causal_mask(offsets, width) if start else None,
                width=width,
            )
            deltas = deltas_of((adapter,) if adapter is not None else (), part.shape[1], self.device)
            yield self._decoder.prefill(cache, part, shape, steps, deltas)

    def _causal_mask(self, offsets: Tensor, width: int) -> Tensor:
        hidden = torch.arange(width, device=self.device) > offsets[:, :, None]
        return self._additive(hidden).unsqueeze(1)

    @torch.inference_mode()
    def decode(self, tokens: Tensor, positions: Tensor, spans: Sequence[Span], adapters: Adapters = ()) -> Tensor:
        parts = [self._part(span, positions) for span in spans]
        deltas = deltas_of(adapters, 1, self.device)
        return self._decoder.decode(self._cache, tokens, positions, parts, deltas)

    def _part(self, span: Span, positions: Tensor) -> DecodePart:
        if span.even:
            return DecodePart(span.start, span.stop, span.width)
        own = positions[span.start : span.stop]
        hidden = torch.arange(span.width, device=self.device) > own[:, None]
        rows = torch.arange(span.start, span.stop, device=self.device)
        return DecodePart(span.start, span.stop, span.width, rows, own, self._additive(hidden)[:, None, None])

    def _additive(self, hidden: Tensor) -> Tensor:
        mask = torch.zeros(hidden.shape, dtype=self._decoder.dtype, device=self.device)
        return mask.masked_fill_(hidden, float("-inf"))

    def load(self, folder: Path, progress: Progress = lambda done, total: None) -> None:
        """The first load, told by the bytes."""
        checkpoint = open_checkpoint(folder)
        check(self._pieces, checkpoint, tied=self._config.tied)
        self._copy(checkpoint, progress)

    def prepare(self, folder: Path, arrival: TransferProgress | None = None) -> Callable[[], object]:
        checkpoint = open_checkpoint(folder)
        check(self._pieces, checkpoint, tied=self._config.tied)
        with checkpoint.reader(self._maps) as source:
            finite = _finite(source.read, folder, arrival)
            borrowed = source.in_memory and self.device.type == "cpu" and not self._decoder.reorders
            wanted = self._bytes_made if borrowed else self._bytes  # beside the weights in use
            if wanted * _ROOM < free_bytes(self.device):
                new = self._stage(finite, source.in_memory, arrival)
                return lambda: self._adopt(new, source)
            for piece in self._pieces:
                finite(piece.source)  # reads each page once, ahead of the swap
        return lambda: self._overwrite(checkpoint, source)

    def forget(self) -> None:
        self._maps.forget()

    @torch.inference_mode()
    def _stage(
        self, read: Callable[[str], Tensor], in_memory: bool, arrival: TransferProgress | None
    ) -> dict[str, Tensor | MatrixForms]:
        """The weights as the decoder computes with them, beside those in use; in the order in which they arrive."""
        groups = [
            (target, list(group)) for target, group in itertools.groupby(self._pieces, key=lambda piece: piece.target)
        ]
        if arrival is not None:
            ends = arrival.ends
            groups.sort(key=lambda group: max(ends[piece.source] for piece in group[1]))
        new: dict[str, Tensor | MatrixForms] = {}
        for target, pieces in groups:
            values, is_made = self._assemble(pieces, read)
            new |= self._decoder.stage(target, values, borrowed=is_made or in_memory)
        return new

    def _adopt(self, new: dict[str, Tensor | MatrixForms], source: TensorReader) -> object:
        old = self._decoder.adopt(new)
        self._end_lease()
        self._source = source
        return old

    def _overwrite(self, checkpoint: WeightFiles, source: TensorReader) -> None:
        """``source`` has kept it as it was found."""
        self._copy(checkpoint, lambda done, total: None)
        source.end()
        self._end_lease()

    def _end_lease(self) -> None:
        """Nothing is computed with what was borrowed any more."""
        if self._source is not None:
            self._source.end()
            self._source = None

    def read_adapter(self, name: str, folder: Path) -> Adapter:
        return read_adapter(name, folder, self._config, self._decoder.dtype, self.device)

    @torch.inference_mode()
    def release(self) -> None:
        spill = WeightOffload(self.device)
        try:
            for name, values in self._decoder.large():
                spill.put(name, values)
        except ArealError:
            spill.close()
            raise
        self._spill = spill
        self._decoder.release()
        self._end_lease()
        self._maps.forget()
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
    def _copy(self, checkpoint: WeightFiles, progress: Progress) -> None:
        done, total = 0, sum(checkpoint.entries[piece.source].size for piece in self._pieces)
        with checkpoint.reader(self._maps) as source:
            for target, group in itertools.groupby(self._pieces, key=lambda piece: piece.target):
                pieces = list(group)
                self._decoder.install(target, self._assemble(pieces, source.read)[0])
                done += sum(checkpoint.entries[piece.source].size for piece in pieces)
                progress(done, total)
        source.end()

    def _assemble(self, pieces: list[BufferSlice], read: Callable[[str], Tensor]) -> tuple[Tensor, bool]:
        """The buffer that ``pieces`` make up, and whether it was made for us: plain pieces that follow each other in
        memory are it already. Rotary pairs are brought together."""
        tensors = [read(piece.source) for piece in pieces]
        if len(tensors) == 1 and pieces[0].form is Form.PLAIN:
            return tensors[0], False
        if all(piece.form is Form.PLAIN for piece in pieces) and _follow_each_other(tensors):
            first = tensors[0]
            return first.as_strided((sum(map(len, tensors)), *first.shape[1:]), first.stride()), False
        whole = torch.empty(self._shapes[pieces[0].target], dtype=self._decoder.dtype)
        half = self._config.head_dim // 2
        for piece, tensor in zip(pieces, tensors, strict=True):
            place = whole[piece.start : piece.stop]
            if piece.form is Form.PLAIN:
                place.copy_(tensor)
            else:
                rest = tensor.shape[1:]
                place.view(-1, half, 2, *rest).copy_(tensor.view(-1, 2, half, *rest).transpose(1, 2))
        return whole, True


def _follow_each_other(tensors: Sequence[Tensor]) -> bool:
    """In one storage, row after row."""
    storages = {(tensor.untyped_storage().data_ptr(), tensor.dtype) for tensor in tensors}
    joined = all(
        one.storage_offset() + one.numel() == other.storage_offset() for one, other in itertools.pairwise(tensors)
    )
    return len(storages) == 1 and joined and all(tensor.is_contiguous() for tensor in tensors)


def _finite(read: Callable[[str], Tensor], folder: Path, arrival: TransferProgress | None) -> Callable[[str], Tensor]:
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
