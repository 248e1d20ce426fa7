"""A folder of safetensors files, or one such file, seen as one set of named tensors.

Opening reads only headers (safetensors checks that a file is as long as its header says), so that a missing tensor, a
wrong shape or a torn file is found before anything is loaded, and before torch is imported.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from areal.errors import ArealError

if TYPE_CHECKING:
    from torch import Tensor

    from areal.services.inference.engines.embedded.memory_maps import MemoryMaps
    from areal.services.weight_update.memory_file import Lease

INDEX = "model.safetensors.index.json"
_WIDTHS = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2}


@dataclass(frozen=True)
class Entry:
    """Where one tensor lies. ``dtype`` is the safetensors name (F32, BF16, ...), ``size`` its bytes."""

    file: Path
    shape: tuple[int, ...]
    dtype: str
    size: int


@dataclass(frozen=True)
class Reader:
    """``read`` gives the tensor of a name, mapped from the file and not copied. ``leases``: of files in memory, which
    nobody writes until they are ended; with them the tensors stay what they are."""

    read: Callable[[str], Tensor]
    leases: tuple[Lease, ...]
    in_memory: bool  # all of them

    def end(self) -> None:
        for lease in self.leases:
            lease.end()


@dataclass(frozen=True)
class Checkpoint:
    folder: Path
    entries: Mapping[str, Entry]

    @property
    def size(self) -> int:
        """Bytes of all tensors."""
        return sum(entry.size for entry in self.entries.values())

    @contextmanager
    def reader(self, maps: MemoryMaps | None = None) -> Iterator[Reader]:
        """Files in memory are mapped by ``maps``, and stay on lease after the block when it ends well. Raises
        ArealError for one that is being written."""
        from safetensors import safe_open

        with ExitStack() as stack, ExitStack() as failing:
            opened: dict[Path, Callable[[str], Tensor]] = {}
            leases: list[Lease] = []
            for file in {entry.file for entry in self.entries.values()}:
                held = maps.open(file) if maps is not None else None
                if held is None:
                    opened[file] = stack.enter_context(safe_open(file, framework="pt")).get_tensor
                else:
                    opened[file] = held[0].__getitem__
                    leases.append(held[1])
                    failing.callback(held[1].end)
            in_memory = len(leases) == len(opened)
            yield Reader(lambda name: opened[self.entries[name].file](name), tuple(leases), in_memory)
            failing.pop_all()


def open_checkpoint(folder: Path) -> Checkpoint:
    """Read the headers in ``folder``, which may be a file. Raises ArealError naming the file that is missing, torn or
    not safetensors."""
    entries: dict[str, Entry] = {}
    for file in _files(folder):
        for name, entry in _header(file):
            if name in entries:
                raise ArealError(f"tensor {name} is both in {entries[name].file.name} and in {file.name} of {folder}")
            entries[name] = entry
    return Checkpoint(folder, entries)


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


def _header(file: Path) -> Iterator[tuple[str, Entry]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="np") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (not a mapping)
                piece = tensors.get_slice(name)
                shape, dtype = tuple(piece.get_shape()), str(piece.get_dtype())
                yield name, Entry(file, shape, dtype, _bytes(shape, dtype))
    except (SafetensorError, OSError) as error:
        raise ArealError(f"cannot read {file}: {error}") from error


def _bytes(shape: tuple[int, ...], dtype: str) -> int:
    return math.prod(shape) * _WIDTHS.get(dtype, 1)
