"""The contract between the engine and a model runner, helpers for memory, and the runner of areal's own decoder.

Rows of a KV cache are numbered from 0. The engine's thread calls all methods in or between steps, except ``prepare``
and ``read_adapter``, which other threads may run during a step.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import mmap
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import Tensor

from areal.dataclasses import dataclass, replace
from areal.errors import ArealError
from areal.services.inference.engines.embedded.decoder import DecodePart, KVCache, LlamaDecoder, PrefillShape, RowSpan
from areal.services.inference.engines.embedded.linear import Adapter, MatrixForms, deltas_of, read_adapter
from areal.services.inference.engines.embedded.model_folder import (
    BufferSlice,
    Form,
    MappedWeights,
    ModelConfig,
    TensorReader,
    WeightFiles,
    buffer_shapes,
    buffer_slices,
    check,
    is_finite,
    open_checkpoint,
)
from areal.services.inference.engines.embedded.scheduler import Copy, Drop, Keep, Move, Restore, SchedulerLimits, Spread
from areal.services.weight_transfer.memory import TransferProgress

if TYPE_CHECKING:
    from areal.dataset.vision import Pixels

Adapters = Sequence[Adapter | None]
Progress = Callable[[int, int], None]  # bytes done, bytes in all
_CGROUP = Path("/sys/fs/cgroup")
_SCORED = 256  # tokens of a prompt that are scored at once: all of their logits are in memory
_ROOM = 1.5  # to stage new weights, as many times their size must be free


@dataclass(frozen=True)
class PartImages:
    """The images of a prompt that is computed in parts. ``used``: the number of placeholders in earlier parts."""

    pixels: Pixels
    used: int

    def after(self, tokens: Sequence[int]) -> PartImages:
        """Return the images for the part after ``tokens``."""
        return replace(self, used=self.used + tokens.count(self.pixels.token_id))


class ModelRunner(Protocol):
    vocab_size: int
    max_positions: int
    device: torch.device
    keeps_prefixes: bool  # whether a running row's positions can be copied
    description: str  # architecture, size, dtype, device

    def position_bytes(self) -> int:
        """Return the KV memory of one position of one sequence, in bytes."""

    def reserve(self, rows: int, width: int) -> None:
        """Make room for ``rows`` rows of ``width`` positions, and keep the cached values."""

    def prefill(
        self,
        tokens: Sequence[Sequence[int]],
        starts: Sequence[int],
        first_row: int,
        adapters: Adapters = (),
        images: Sequence[PartImages | None] = (),
    ) -> Tensor:
        """Compute ``tokens[i]`` from position ``starts[i]`` of row ``first_row + i``, after what the row caches.

        Returns logits [len(tokens), vocab] float32 after the last token of each. ``adapters`` and ``images`` have one
        entry for each sequence, or are empty if none has one.
        """

    def score(self, tokens: Sequence[int], adapter: Adapter | None = None) -> Iterator[Tensor]:
        """Yield logits [part, vocab] float32 after each of ``tokens``, part by part. Uses no row."""

    def decode(self, tokens: Tensor, positions: Tensor, spans: Sequence[RowSpan], adapters: Adapters = ()) -> Tensor:
        """Compute one token for rows 0..n-1 with cached lengths ``positions`` [n]. ``spans`` divide the rows by their
        lengths including that token. Returns logits [n, vocab] float32."""

    def copy(self, copy: Copy) -> None:
        """Move, keep, restore or drop cached positions, as the scheduler decided."""

    def prepare(self, folder: Path, arrival: TransferProgress | None = None) -> Callable[[], object]:
        """Check that ``folder``, or one file, has all weights of this model with finite values, and stage them besides
        those in use if there is room. Raises ArealError, and then nothing has changed.

        ``arrival``: the progress of weights that are still arriving. The returned function installs them, while
        ``folder`` still has them, and returns the replaced ones, because freeing those takes time.
        """

    def forget(self) -> None:
        """Release the sources that ``prepare`` mapped. Not concurrently with it."""

    def read_adapter(self, name: str, folder: Path) -> Adapter:
        """Read an adapter, in any thread. Raises ArealError if the folder is no adapter of this model, or the runner
        supports none."""

    def release(self) -> None:
        """Offload the weights and free the cache; all rows are lost. Raises ArealError, with nothing changed, if there
        is no room for the weights."""

    def restore(self) -> None:
        """Bring offloaded weights back."""


class WeightOffload:
    """Released weights. Those of a CPU are in an unnamed file, which a crash does not leave behind; those of a CUDA
    device are in the CPU's memory. ``tensors`` returns them on the CPU."""

    def __init__(self, weights: Iterable[tuple[str, Tensor]], device: torch.device) -> None:
        """Offload ``weights``. Raises ArealError if there is no room."""
        self._file: IO[bytes] | None = None
        if device.type == "cpu":
            self._file = tempfile.TemporaryFile(prefix="areal-weights-")  # noqa: SIM115 (open until it is read back)
        self._places: list[tuple[str, int, torch.Size, torch.dtype]] = []  # name, and offset in the file
        self._held: list[tuple[str, Tensor]] = []
        self._size = 0
        try:
            for name, tensor in weights:
                self._put(name, tensor)
        except OSError as error:
            self.close()
            raise ArealError(
                f"the weights cannot be put on disk: {error.strerror}",
                hint=f"make room in {tempfile.gettempdir()}, or set TMPDIR to a folder that has it",
            ) from error

    def _put(self, name: str, tensor: Tensor) -> None:
        if self._file is None:
            self._held.append((name, tensor.to("cpu", copy=True)))
            return
        values = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()
        self._file.write(values.data)
        self._file.flush()
        self._places.append((name, self._size, tensor.shape, tensor.dtype))
        self._size += values.nbytes

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from self._held
        if self._file is None or not self._size:
            return
        pages = mmap.mmap(self._file.fileno(), self._size, access=mmap.ACCESS_COPY)  # unmapped with its last tensor
        for name, offset, shape, dtype in self._places:
            values = torch.from_numpy(np.frombuffer(pages, np.uint8, shape.numel() * dtype.itemsize, offset))
            yield name, values.view(dtype).view(shape)

    def close(self) -> None:
        self._held.clear()
        if self._file is not None:
            self._file.close()


def free_bytes(device: torch.device) -> int:
    """Return the free memory of the device in bytes; of a CPU, that of the machine within the control group's limit."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    meminfo = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(meminfo["MemAvailable"].split()[0]) * 1024
    limit, used = _CGROUP / "memory.max", _CGROUP / "memory.current"
    if limit.is_file() and used.is_file() and (bound := limit.read_text().strip()).isdigit():
        free = min(free, max(0, int(bound) - int(used.read_text())))
    return free


def return_freed_memory(device: torch.device) -> None:
    """Make the allocator return freed memory to the system."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # only glibc has it
    if trim is not None:
        trim(0)


def position_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    return config.layers * 2 * config.kv_heads * config.head_dim * dtype.itemsize


class DecoderRunner:
    """Runs ``LlamaDecoder``: padding, masks, and weights from a model folder.

    Of weights in a trainer's memory it copies only those that it keeps in another memory layout. With the rest it
    computes in place, under a lease, until the next weights replace them.
    """

    keeps_prefixes = True

    def __init__(self, config: ModelConfig, limits: SchedulerLimits, dtype: torch.dtype, device: torch.device) -> None:
        self.vocab_size = config.vocab_size
        self.max_positions = config.max_positions
        self.device = device
        self._config = config
        pieces = sorted(buffer_slices(config), key=lambda piece: (piece.target, piece.start))
        self._pieces = {target: list(group) for target, group in itertools.groupby(pieces, lambda piece: piece.target)}
        self._shapes = buffer_shapes(config)
        self._decoder = LlamaDecoder(config, limits.max_length, dtype, device)
        self._cache = self._new_cache(limits.kv_tokens)
        self._offload: WeightOffload | None = None
        self._maps = MappedWeights()
        self._source: TensorReader | None = None  # of borrowed weights in use
        self._kept: dict[int, list[Tensor]] = {}  # number -> [2 * kv_heads, positions, head_dim] of each layer
        size = sum(math.prod(shape) for shape in self._shapes.values())
        self._bytes = size * dtype.itemsize
        made = {piece.target for piece in pieces if piece.form is not Form.PLAIN}
        self._bytes_made = sum(math.prod(self._shapes[target]) for target in made) * dtype.itemsize
        self.description = f"own decoder, {size} parameters, {str(dtype).removeprefix('torch.')} on {device}"

    def _new_cache(self, limit: int) -> KVCache:
        config = self._config
        return KVCache(config.layers, config.kv_heads, config.head_dim, limit, self._decoder.dtype, self.device)

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

    def prefill(
        self,
        tokens: Sequence[Sequence[int]],
        starts: Sequence[int],
        first_row: int,
        adapters: Adapters = (),
        images: Sequence[PartImages | None] = (),
    ) -> Tensor:
        assert not images, "requests with images are refused"
        return self._prefill(self._cache, tokens, starts, first_row, adapters)

    def score(self, tokens: Sequence[int], adapter: Adapter | None = None) -> Iterator[Tensor]:
        cache = self._new_cache(len(tokens))
        cache.reserve(1, len(tokens))
        for start in range(0, len(tokens), _SCORED):
            yield self._prefill(cache, [tokens[start : start + _SCORED]], [start], 0, (adapter,), every=True)

    @torch.inference_mode()
    def _prefill(
        self,
        cache: KVCache,
        tokens: Sequence[Sequence[int]],
        starts: Sequence[int],
        first_row: int,
        adapters: Adapters,
        *,
        every: bool = False,
    ) -> Tensor:
        """Compute a batch. With ``every``, return logits after each token of the only sequence, else after the last of
        each."""
        lengths = [len(each) for each in tokens]
        time = max(lengths)
        padded = torch.tensor([[*each, *[0] * (time - len(each))] for each in tokens], device=self.device)
        count = torch.tensor(lengths, device=self.device)
        start = torch.tensor(starts, device=self.device)
        steps = torch.arange(time, device=self.device)
        row, step = (steps < count[:, None]).nonzero(as_tuple=True)
        width = max(begin + length for begin, length in zip(starts, lengths, strict=True))
        offsets = (start[:, None] + steps).clamp_(max=width - 1)  # any position will do for padding
        mask = None
        if any(starts):
            hidden = torch.arange(width, device=self.device) > offsets[:, :, None]
            mask = self._additive(hidden).unsqueeze(1)
        shape = PrefillShape(
            first_row=first_row,
            offsets=offsets,
            valid=row * time + step,
            rows=row + first_row,
            positions=offsets[row, step],
            mask=mask,
            width=width,
        )
        last = steps if every else torch.arange(len(tokens), device=self.device) * time + count - 1
        return self._decoder.prefill(cache, padded, shape, last, deltas_of(adapters, time, self.device))

    @torch.inference_mode()
    def decode(self, tokens: Tensor, positions: Tensor, spans: Sequence[RowSpan], adapters: Adapters = ()) -> Tensor:
        parts = [DecodePart(span) if span.even else self._uneven(span, positions) for span in spans]
        return self._decoder.decode(self._cache, tokens, positions, parts, deltas_of(adapters, 1, self.device))

    def _uneven(self, span: RowSpan, positions: Tensor) -> DecodePart:
        own = positions[span.start : span.stop]
        hidden = torch.arange(span.width, device=self.device) > own[:, None]
        rows = torch.arange(span.start, span.stop, device=self.device)
        return DecodePart(span, rows, own, self._additive(hidden)[:, None, None])

    def _additive(self, hidden: Tensor) -> Tensor:
        mask = torch.zeros(hidden.shape, dtype=self._decoder.dtype, device=self.device)
        return mask.masked_fill_(hidden, float("-inf"))

    def load(self, folder: Path, progress: Progress = lambda done, total: None) -> None:
        """Load the first weights. ``progress`` gets the bytes that are done, and all bytes."""
        self._copy(self._open(folder), progress)

    def _open(self, folder: Path) -> WeightFiles:
        checkpoint = open_checkpoint(folder)
        check([piece for group in self._pieces.values() for piece in group], checkpoint, tied=self._config.tied)
        return checkpoint

    def prepare(self, folder: Path, arrival: TransferProgress | None = None) -> Callable[[], object]:
        checkpoint = self._open(folder)
        with checkpoint.reader(self._maps) as source:

            def read(name: str) -> Tensor:
                """Return a tensor, once it has arrived. Raises ArealError for values that are not finite."""
                if arrival is not None:
                    arrival.wait(name)
                tensor = source.read(name)
                if not is_finite(tensor):
                    raise ArealError(f"{folder}: {name} holds values that are not finite")
                return tensor

            borrowed = source.in_memory and self.device.type == "cpu" and not self._decoder.reorders
            wanted = self._bytes_made if borrowed else self._bytes  # besides the weights in use
            if wanted * _ROOM < free_bytes(self.device):
                new = self._stage(read, source.in_memory, arrival)

                def adopt() -> object:
                    old = self._decoder.adopt(new)
                    self._end_lease()
                    self._source = source
                    return old

                return adopt
            for group in self._pieces.values():
                for piece in group:
                    read(piece.source)  # checks it, and brings it into the page cache before the swap

        def overwrite() -> None:
            self._copy(checkpoint)  # unchanged since the check, because ``source`` has leases
            source.end()
            self._end_lease()

        return overwrite

    def forget(self) -> None:
        self._maps.forget()

    @torch.inference_mode()
    def _stage(
        self, read: Callable[[str], Tensor], in_memory: bool, arrival: TransferProgress | None
    ) -> dict[str, Tensor | MatrixForms]:
        """Return the weights in the decoder's forms, besides those in use. Staged as they arrive."""
        groups = list(self._pieces.items())
        if arrival is not None:
            ends = arrival.ends
            groups.sort(key=lambda group: max(ends[piece.source] for piece in group[1]))
        new: dict[str, Tensor | MatrixForms] = {}
        for target, pieces in groups:
            values, is_made = self._assemble(pieces, read)
            new |= self._decoder.stage(target, values, borrowed=is_made or in_memory)
        return new

    def _end_lease(self) -> None:
        """End the lease of borrowed weights after their use."""
        if self._source is not None:
            self._source.end()
            self._source = None

    def read_adapter(self, name: str, folder: Path) -> Adapter:
        return read_adapter(name, folder, self._config, self._decoder.dtype, self.device)

    @torch.inference_mode()
    def release(self) -> None:
        self._offload = WeightOffload(self._decoder.large_buffers(), self.device)
        self._decoder.release()
        self._end_lease()
        self._maps.forget()
        self._cache.release()
        self._kept.clear()
        return_freed_memory(self.device)

    @torch.inference_mode()
    def restore(self) -> None:
        assert self._offload is not None
        for name, values in self._offload.tensors():
            self._decoder.install(name, values)
        self._offload.close()
        self._offload = None

    @torch.inference_mode()
    def _copy(self, checkpoint: WeightFiles, progress: Progress = lambda done, total: None) -> None:
        sizes = {
            target: sum(checkpoint.entries[piece.source].size for piece in pieces)
            for target, pieces in self._pieces.items()
        }
        done, total = 0, sum(sizes.values())
        with checkpoint.reader(self._maps) as source:
            for target, pieces in self._pieces.items():
                self._decoder.install(target, self._assemble(pieces, source.read)[0])
                done += sizes[target]
                progress(done, total)
        source.end()

    def _assemble(self, pieces: list[BufferSlice], read: Callable[[str], Tensor]) -> tuple[Tensor, bool]:
        """Return the buffer that consists of ``pieces``, and whether it is a copy: plain pieces that are adjacent in
        memory need none. Rotary pairs are interleaved."""
        tensors = [read(piece.source) for piece in pieces]
        if len(tensors) == 1 and pieces[0].form is Form.PLAIN:
            return tensors[0], False
        if all(piece.form is Form.PLAIN for piece in pieces) and _are_adjacent(tensors):
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


def _are_adjacent(tensors: Sequence[Tensor]) -> bool:
    """Return whether the tensors are contiguous and adjacent in one storage."""
    storages = {(tensor.untyped_storage().data_ptr(), tensor.dtype) for tensor in tensors}
    joined = all(
        one.storage_offset() + one.numel() == other.storage_offset() for one, other in itertools.pairwise(tensors)
    )
    return len(storages) == 1 and joined and all(tensor.is_contiguous() for tensor in tensors)
