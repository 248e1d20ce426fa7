"""A safetensors file in memory, written again and again in place: one mapping, one copy of each tensor an update. What
somebody has on lease is not written (``memory_file``).

The layout (names, shapes, dtypes) is that of the first weights and stays. Format: eight bytes of header length, the
header as JSON, then the tensors' bytes (https://github.com/huggingface/safetensors).
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable
from itertools import accumulate
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from areal.services.weight_update.memory import MemoryFile

Layout = tuple[tuple[str, tuple[int, ...], str], ...]
"""(name, shape, dtype) of each tensor, in the order of their bytes; dtypes by the format's names."""

_NAMES = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_ALIGNMENT = 64


def layout_of(weights: Iterable[tuple[str, Tensor]]) -> Layout:
    """Raises KeyError for a dtype that the format has no name for."""
    return tuple((name, tuple(tensor.shape), _NAMES[tensor.dtype]) for name, tensor in weights)


def read_layout(given: object) -> Layout:
    """One that came as JSON. Raises ValueError."""
    try:
        layout = tuple((str(name), tuple(int(n) for n in shape), str(dtype)) for name, shape, dtype in given)  # type: ignore[attr-defined]
    except TypeError as error:
        raise ValueError(f"not a list of name, shape and dtype: {error}") from error
    if any(dtype not in _DTYPES or min(shape, default=0) < 0 for _, shape, dtype in layout):
        raise ValueError("a dtype that is none, or a negative length")
    return layout


def header_of(file: IO[bytes]) -> bytes:
    """The eight bytes of length and the header, of a file that is open at its beginning."""
    size = file.read(8)
    return size + file.read(struct.unpack("<Q", size)[0])


def views(header: bytes, buffer: Any) -> dict[str, Tensor]:
    """The tensors of ``buffer``, which begins with ``header``; nothing is copied. Views of one storage, but for those
    whose numbers do not begin at a multiple of their size."""
    found: dict[str, Tensor] = {}
    whole = torch.frombuffer(buffer, dtype=torch.uint8)
    for name, about in json.loads(header[8:]).items():
        if name != "__metadata__":
            begin, end = (len(header) + offset for offset in about["data_offsets"])
            dtype, shape = _DTYPES[about["dtype"]], about["shape"]
            if begin == end:
                found[name] = torch.empty(shape, dtype=dtype)
            elif begin % dtype.itemsize == 0:
                found[name] = whole[begin:end].view(dtype).view(shape)
            else:
                found[name] = torch.frombuffer(buffer, dtype=dtype, count=math.prod(shape), offset=begin).view(shape)
    return found


def ends(layout: Layout) -> dict[str, int]:
    """At which byte of the body each tensor ends."""
    sizes = (math.prod(shape) * _DTYPES[dtype].itemsize for _, shape, dtype in layout)
    return {name: end for (name, _, _), end in zip(layout, accumulate(sizes), strict=True)}


class Image:
    """Of ``layout``, found at ``path``, and at ``link``, while this process lives. ``body`` [bytes] of uint8 is all
    tensors, one after the other: what two images of one layout have in common."""

    def __init__(self, layout: Layout, link: Path | None = None) -> None:
        self.layout = layout
        places: dict[str, tuple[int, tuple[int, ...], torch.dtype]] = {}
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name, shape, dtype in layout:
            size = math.prod(shape) * _DTYPES[dtype].itemsize
            header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + size]}
            places[name] = (end, shape, _DTYPES[dtype])
            end += size
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-(len(text) + 8) % _ALIGNMENT)
        self.bytes = end
        head = struct.pack("<Q", len(text)) + text
        self._file = MemoryFile(link, len(head) + end)
        self._file.map[: len(head)] = head
        body = memoryview(self._file.map)[len(head) :]
        self.body = torch.frombuffer(body, dtype=torch.uint8)
        self._views = {
            name: torch.frombuffer(body, dtype=dtype, count=math.prod(shape), offset=offset).view(shape)
            for name, (offset, shape, dtype) in places.items()
            if math.prod(shape)
        }

    def write(self, name: str, tensor: Tensor) -> None:
        """Raises KeyError for a name that the layout has not."""
        view = self._views[name]
        if view.shape != tensor.shape:
            raise ValueError(f"{name} was {list(view.shape)} and is {list(tensor.shape)} now")
        view.copy_(tensor)

    def seize(self) -> bool:
        """For writing; False where somebody computes with what is in it."""
        return self._file.seize()

    def yield_up(self) -> None:
        """Whoever reads may come."""
        self._file.yield_up()

    @property
    def path(self) -> Path:
        """Until ``remove``."""
        return self._file.path

    @property
    def tensors(self) -> list[Tensor]:
        """Views of ``body``, in the layout's order."""
        return [self._views[name] for name, _, _ in self.layout if name in self._views]

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._views)

    def remove(self) -> None:
        """The file goes; whoever has it mapped keeps it."""
        self._views.clear()
        self.body = torch.empty(0, dtype=torch.uint8)
        self._file.remove()
