"""The contract between the engine and a model runner, and the memory that runners share.

Rows of a KV cache are numbered from 0. All methods but ``prepare`` are called by the engine's thread, between or in
steps; ``prepare`` may run beside a step in another thread.
"""

from __future__ import annotations

import ctypes
import mmap
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol

import numpy as np
import torch
from torch import Tensor

from areal.errors import ArealError
from areal.services.inference.engines.embedded.lora import Adapter
from areal.services.inference.engines.embedded.steps import Copy, Span
from areal.services.weight_update.memory import TransferProgress

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

    def prepare(self, folder: Path, arrival: TransferProgress | None = None) -> Callable[[], object]:
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


# -- released weights
#
# They go to an unnamed file, which no crash leaves behind. A CUDA device's weights go to the CPU's memory instead.

_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class _OffloadedTensor:
    name: str
    offset: int
    shape: torch.Size
    dtype: torch.dtype


class WeightOffload:
    """Holds what ``put`` was given; ``tensors`` gives it back, on the CPU."""

    def __init__(self, device: torch.device) -> None:
        self._file: IO[bytes] | None = None
        if device.type == "cpu":
            self._file = tempfile.TemporaryFile(prefix="areal-weights-")  # noqa: SIM115 (open until it is read back)
        self._places: list[_OffloadedTensor] = []
        self._held: list[tuple[str, Tensor]] = []
        self._size = 0

    def put(self, name: str, tensor: Tensor) -> None:
        """Raises ArealError when there is no room for it."""
        if self._file is None:
            self._held.append((name, tensor.to("cpu", copy=True)))
            return
        values = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()
        try:
            self._file.write(values.data)
            self._file.flush()
        except OSError as error:
            raise ArealError(
                f"the weights cannot be put on disk: {error.strerror}",
                hint=f"make room in {tempfile.gettempdir()}, or set TMPDIR to a folder that has it",
            ) from error
        self._places.append(_OffloadedTensor(name, self._size, tensor.shape, tensor.dtype))
        self._size += values.nbytes

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from self._held
        if self._file is None or not self._size:
            return
        pages = mmap.mmap(self._file.fileno(), self._size, access=mmap.ACCESS_COPY)  # unmapped with its last tensor
        for place in self._places:
            size = place.shape.numel() * place.dtype.itemsize
            values = torch.from_numpy(np.frombuffer(pages, np.uint8, size, place.offset))
            yield place.name, values.view(place.dtype).view(place.shape)

    def close(self) -> None:
        self._held.clear()
        if self._file is not None:
            self._file.close()


def free_bytes(device: torch.device) -> int:
    """On a CPU, of this machine and within our group's limit."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    meminfo = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(meminfo["MemAvailable"].split()[0]) * 1024
    limit, used = _CGROUP / "memory.max", _CGROUP / "memory.current"
    if limit.is_file() and used.is_file() and (bound := limit.read_text().strip()).isdigit():
        free = min(free, max(0, int(bound) - int(used.read_text())))
    return free


def return_freed_memory(device: torch.device) -> None:
    """What was freed goes back to whom it came from: allocators keep it for themselves otherwise."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's; elsewhere the allocator decides
    if trim is not None:
        trim(0)
