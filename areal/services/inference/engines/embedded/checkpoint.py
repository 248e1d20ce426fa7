"""A folder of safetensors files, or one such file, seen as one set of named tensors.

Opening reads only headers (safetensors checks that a file is as long as its header says), so that a missing tensor, a
wrong shape or a torn file is found before anything is loaded, and before torch is imported.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from areal.errors import ArealError

if TYPE_CHECKING:
    from torch import Tensor

    from areal.services.weight_update.memory import MemoryLease


INDEX = "model.safetensors.index.json"
_WIDTHS = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2}


@dataclass(frozen=True)
class TensorEntry:
    """Where one tensor lies. ``dtype`` is the safetensors name (F32, BF16, ...), ``size`` its bytes."""

    file: Path
    shape: tuple[int, ...]
    dtype: str
    size: int


@dataclass(frozen=True)
class TensorReader:
    """``read`` gives the tensor of a name, mapped from the file and not copied. ``leases``: of files in memory, which
    nobody writes until they are ended; with them the tensors stay what they are."""

    read: Callable[[str], Tensor]
    leases: tuple[MemoryLease, ...]
    in_memory: bool  # all of them

    def end(self) -> None:
        for lease in self.leases:
            lease.end()


@dataclass(frozen=True)
class WeightFiles:
    folder: Path
    entries: Mapping[str, TensorEntry]

    @property
    def size(self) -> int:
        """Bytes of all tensors."""
        return sum(entry.size for entry in self.entries.values())

    @contextmanager
    def reader(self, maps: MappedWeights | None = None) -> Iterator[TensorReader]:
        """Files in memory are mapped by ``maps``, and stay on lease after the block when it ends well. Raises
        ArealError for one that is being written."""
        from safetensors import safe_open

        with ExitStack() as stack, ExitStack() as failing:
            opened: dict[Path, Callable[[str], Tensor]] = {}
            leases: list[MemoryLease] = []
            for file in {entry.file for entry in self.entries.values()}:
                held = maps.open(file) if maps is not None else None
                if held is None:
                    opened[file] = stack.enter_context(safe_open(file, framework="pt")).get_tensor
                else:
                    opened[file] = held[0].__getitem__
                    leases.append(held[1])
                    failing.callback(held[1].end)
            in_memory = len(leases) == len(opened)
            yield TensorReader(lambda name: opened[self.entries[name].file](name), tuple(leases), in_memory)
            failing.pop_all()


def open_checkpoint(folder: Path) -> WeightFiles:
    """Read the headers in ``folder``, which may be a file. Raises ArealError naming the file that is missing, torn or
    not safetensors."""
    entries: dict[str, TensorEntry] = {}
    for file in _files(folder):
        for name, entry in _header(file):
            if name in entries:
                raise ArealError(f"tensor {name} is both in {entries[name].file.name} and in {file.name} of {folder}")
            entries[name] = entry
    return WeightFiles(folder, entries)


def _files(folder: Path) -> list[Path]:
    if folder.is_file():
        return [folder]
    index = folder / INDEX
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (OSError, ValueError, KeyError, AttributeError) as error:
            raise ArealError(f"cannot read {index}: {error!r}") from error
        files = [folder / name for name in names]
    else:
        files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ArealError(f"{folder} holds no weights: no *.safetensors file", hint="save it with safe_serialization")
    for file in files:
        if not file.is_file():
            raise ArealError(f"{index.name} names {file.name}, which {folder} does not hold")
    return files


def _header(file: Path) -> Iterator[tuple[str, TensorEntry]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="np") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (not a mapping)
                piece = tensors.get_slice(name)
                shape, dtype = tuple(piece.get_shape()), str(piece.get_dtype())
                yield name, TensorEntry(file, shape, dtype, math.prod(shape) * _WIDTHS.get(dtype, 1))
    except (SafetensorError, OSError) as error:
        raise ArealError(f"cannot read {file}: {error}") from error


# -- weights in a trainer's memory
#
# Mapped once, and read through the same mapping each time. Mapping a file again costs twice what copying it does, a
# page fault every four kilobytes. A mapping is kept until ``forget``, or until others take its place; it keeps its
# memory alive, also when the trainer is gone.
#
# The engine computes with what it has mapped: matrices that need no reordering are not copied. So each file is opened
# with a lease, which its reader ends when it computes with the file no more; until then nobody writes to it. Mappings
# are read-only: a write of ours would change what other engines serve, and ends in a SIGSEGV instead.

_MOST = 2  # files: a trainer's two take turns


class MappedWeights:
    """One thread at a time."""

    def __init__(self) -> None:
        self._held: OrderedDict[tuple[int, int, bytes], dict[str, Tensor]] = OrderedDict()

    def open(self, file: Path) -> tuple[Mapping[str, Tensor], MemoryLease] | None:
        """Tensors by name; None where ``file`` is on a disk, whose files come and go under one number. Raises
        ArealError while it is written."""
        from areal.services.weight_update.image import header_of, views
        from areal.services.weight_update.memory import MemoryLease, is_memory_file

        if not is_memory_file(file):
            return None
        try:
            lease = MemoryLease(file)
        except BlockingIOError as error:
            raise ArealError(f"{file} is being written") from error
        about = os.fstat(lease.fileno)
        with os.fdopen(os.dup(lease.fileno), "rb") as opened:
            header = header_of(opened)
        key = (about.st_dev, about.st_ino, header)
        if key not in self._held:
            mapping = mmap.mmap(lease.fileno, about.st_size, access=mmap.ACCESS_READ)
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="The given buffer is not writable")
                self._held[key] = views(header, mapping)
        self._held.move_to_end(key)
        while len(self._held) > _MOST:
            self._held.popitem(last=False)
        return self._held[key], lease

    def forget(self) -> None:
        self._held.clear()


def is_finite(tensor: Tensor) -> bool:
    """By the extremes, which are not finite when any value is not: at the speed of memory, unlike torch.isfinite."""
    if tensor.numel() == 0 or not tensor.is_floating_point():
        return True
    low, high = tensor.aminmax()
    return bool(low.isfinite()) and bool(high.isfinite())
