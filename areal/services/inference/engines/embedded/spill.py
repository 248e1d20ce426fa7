"""Weights kept out of memory until they are wanted again: in a file without a name, which no crash leaves behind.

A CUDA device's weights go to the CPU's memory instead, which is what such a release is for.
"""

from __future__ import annotations

import ctypes
import mmap
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO

import numpy as np
import torch
from torch import Tensor

from areal.errors import ArealError


@dataclass(frozen=True)
class _Place:
    name: str
    offset: int
    shape: torch.Size
    dtype: torch.dtype


class Spill:
    """Holds what ``put`` was given; ``tensors`` gives it back, on the CPU."""

    def __init__(self, device: torch.device) -> None:
        self._file: IO[bytes] | None = None
        if device.type == "cpu":
            self._file = tempfile.TemporaryFile(prefix="areal-weights-")  # noqa: SIM115 (open until it is read back)
        self._places: list[_Place] = []
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
        self._places.append(_Place(name, self._size, tensor.shape, tensor.dtype))
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


def return_freed_memory(device: torch.device) -> None:
    """What was freed goes back to whom it came from: allocators keep it for themselves otherwise."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's; elsewhere the allocator decides
    if trim is not None:
        trim(0)
