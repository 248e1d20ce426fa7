"""Weights in memory that several processes use: files without a name on any disk, leases on them, images of weights,
and how far weights that are still being written have come.
"""

from __future__ import annotations

import fcntl
import json
import math
import mmap
import os
import resource
import struct
import threading
from collections.abc import Iterable, Mapping
from itertools import accumulate
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from areal.errors import ArealError
from areal.files import try_lock


class TransferProgress:
    """``ends``: at which byte each tensor is whole. Written by one thread, waited for by another."""

    def __init__(self, ends: Mapping[str, int]) -> None:
        self.ends = ends
        self._whole = max(ends.values(), default=0)
        self._changed = threading.Condition()
        self._bytes = 0
        self._failure: str | None = None

    @property
    def is_whole(self) -> bool:
        return self._bytes >= self._whole

    def reach(self, count: int) -> None:
        """The first ``count`` bytes are there."""
        with self._changed:
            self._bytes = count
            self._changed.notify_all()

    def fail(self, why: str) -> None:
        """End the transfer: no more bytes will come."""
        with self._changed:
            self._failure = self._failure or why
            self._changed.notify_all()

    def wait(self, name: str) -> None:
        """Return when the tensor is there. Raises ArealError when it will not come; one that was not announced is
        waited for as all of them."""
        self.wait_for(self.ends.get(name, self._whole))

    def wait_all(self) -> None:
        self.wait_for(self._whole)

    def wait_for(self, end: int) -> None:
        """Return when the first ``end`` bytes are there. Raises ArealError when they will not come."""
        with self._changed:
            self._changed.wait_for(lambda: self._bytes >= end or self._failure is not None)
            if self._bytes < end:
                raise ArealError(f"the weights did not arrive: {self._failure}")


# A file in memory that dies with its process: no ``kill -9`` leaves gigabytes behind in /dev/shm. It has no name of
# its own: /proc leads to it, for processes of the same user on this machine, and so does a symbolic link, which leads
# nowhere once the process is gone.
#
# A reader may compute with what it has mapped: a ``MemoryLease`` keeps the file as it is, and a writer that cannot
# ``try_lock`` it writes to another one. Locks of the kernel (flock), so that no death leaves one behind. The file is
# sealed against a change of length: no reader's mapping ends in a SIGBUS.

_FIRST = 10_000
_last = [0]


class MemoryFile:
    """``size`` bytes of zeros, found at ``path`` and ``link`` while this process lives; mapped whole as ``map``."""

    def __init__(self, link: Path | None, size: int) -> None:
        self.link = link
        name = "areal" if link is None else f"areal-{link.name}"
        self._file = _with_own_number(os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
        self.path = Path(f"/proc/{os.getpid()}/fd/{self._file}")
        try:
            os.ftruncate(self._file, size)
            fcntl.fcntl(self._file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            self.map = mmap.mmap(self._file, size)
            if link is not None:
                aside = link.with_name(f".{link.name}.{os.getpid()}")
                aside.unlink(missing_ok=True)
                aside.symlink_to(self.path)
                aside.rename(link)
        except BaseException:
            os.close(self._file)
            raise

    def try_lock(self) -> bool:
        """Keep readers out, for writing, until ``unlock``; False where one has it on lease."""
        return try_lock(self._file)

    def unlock(self) -> None:
        fcntl.flock(self._file, fcntl.LOCK_UN)

    def remove(self) -> None:
        """The link goes, and our hold on the memory; whoever has it mapped keeps it. Idempotent."""
        if self._file < 0:
            return
        if self.link is not None:
            self.link.unlink(missing_ok=True)
        os.close(self._file)
        self._file = -1


def _with_own_number(file: int) -> int:
    """``file`` as a descriptor that no other of this process had or gets soon: who comes late with the path of one that
    was removed must not find the next. Others are given low numbers, these are counted upwards."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    first = _FIRST if soft == resource.RLIM_INFINITY else min(_FIRST, soft // 2)
    try:
        _last[0] = fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, max(first, _last[0] + 1))
    except OSError:  # the highest that we may have was reached: from the beginning
        _last[0] = fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, first)
    os.close(file)
    return _last[0]


class MemoryLease:
    """The memory file at ``path`` stays as it is until ``end``, or the end of this process. Raises BlockingIOError
    while it is written, OSError where it is not there."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb")
        try:
            fcntl.flock(self._file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise

    def end(self) -> None:
        """Idempotent. Asks the kernel, for what is mapped from our file holds it open."""
        if not self._file.closed:
            fcntl.flock(self._file, fcntl.LOCK_UN)
            self._file.close()

    def __del__(self) -> None:
        self.end()

    @property
    def fileno(self) -> int:
        return self._file.fileno()


def is_memory_file(path: Path) -> bool:
    """Whether it is one of ours, whose writer respects a lease."""
    with path.open("rb") as file:
        try:
            return bool(fcntl.fcntl(file, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK)
        except OSError:  # a disk's
            return False


# Images: a safetensors file in memory, written again and again in place: one mapping, one copy of each tensor an
# update. The layout (names, shapes, dtypes) is that of the first weights and stays. Format: eight bytes of header
# length, the header as JSON, then the tensors' bytes (https://github.com/huggingface/safetensors).

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
    """Read a layout from JSON. Raises ValueError."""
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


class Image(MemoryFile):
    """Weights of ``layout``. ``body`` [bytes] of uint8 is all tensors, one after the other: what two images of one
    layout have in common."""

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
        super().__init__(link, len(head) + end)
        self.map[: len(head)] = head
        body = memoryview(self.map)[len(head) :]
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
    def tensors(self) -> list[Tensor]:
        """Views of ``body``, in the layout's order."""
        return [self._views[name] for name, _, _ in self.layout if name in self._views]

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._views)

    def remove(self) -> None:
        self._views.clear()
        self.body = torch.empty(0, dtype=torch.uint8)
        super().remove()
