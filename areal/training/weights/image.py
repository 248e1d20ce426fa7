"""A safetensors file that is written again and again in place: one mapping, one copy of each tensor an update.

The layout (names, shapes, dtypes) is that of the first weights and stays. Format: eight bytes of header length, the
header as JSON, then the tensors' bytes (https://github.com/huggingface/safetensors).
"""

from __future__ import annotations

import json
import mmap
import struct
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

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
_ALIGNMENT = 64


class Image:
    """Of ``layout``, as (name, shape, dtype), at ``path``; the file is made whole and its pages are taken at once."""

    def __init__(self, path: Path, layout: Iterable[tuple[str, torch.Size, torch.dtype]]) -> None:
        self.path = path
        places: dict[str, tuple[int, torch.Size, torch.dtype]] = {}
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name, shape, dtype in layout:
            size = shape.numel() * dtype.itemsize
            header[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [end, end + size]}
            places[name] = (end, shape, dtype)
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
        self._views = {
            name: torch.frombuffer(body, dtype=dtype, count=shape.numel(), offset=offset).view(shape)
            for name, (offset, shape, dtype) in places.items()
            if shape.numel()
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
        self.path.unlink(missing_ok=True)
