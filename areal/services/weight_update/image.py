"""A safetensors file that is written again and again in place: one mapping, one copy of each tensor an update.

The layout (names, shapes, dtypes) is that of the first weights and stays. Format: eight bytes of header length, the
header as JSON, then the tensors' bytes (https://github.com/huggingface/safetensors).
"""

from __future__ import annotations

import json
import math
import mmap
import struct
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

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


class Image:
    """Of ``layout`` at ``path``. ``body`` [bytes] of uint8 is all tensors, one after the other: what two images of one
    layout have in common."""

    def __init__(self, path: Path, layout: Layout) -> None:
        self.path = path
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
        with path.open("w+b") as file:
            file.truncate(8 + len(text) + end)
            file.write(struct.pack("<Q", len(text)) + text)
            file.flush()
            self._map = mmap.mmap(file.fileno(), 8 + len(text) + end)
        body = memoryview(self._map)[8 + len(text) :]
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

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._views)

    def remove(self) -> None:
        """The file goes; whoever has it mapped keeps it."""
        self._views.clear()
        self.body = torch.empty(0, dtype=torch.uint8)
        self.path.unlink(missing_ok=True)
