"""Weights in memory that several processes use: files in memory, leases on them, images of weights, and the progress of
a transfer."""

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

_FIRST = 10_000
_last = [0]
Layout = tuple[tuple[str, tuple[int, ...], str], ...]
"""(name, shape, dtype) of each tensor, in the order of their bytes. Dtypes have the format's names."""
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


class TransferProgress:
    """The progress of a transfer. ``ends``: the number of bytes after which each tensor is complete. Written by one
    thread, waited for by another."""

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
        """Record that the first ``count`` bytes are complete."""
        with self._changed:
            self._bytes = count
            self._changed.notify_all()

    def fail(self, why: str) -> None:
        """End the transfer: no more bytes will arrive."""
        with self._changed:
            self._failure = self._failure or why
            self._changed.notify_all()

    def wait(self, name: str) -> None:
        """Wait until the tensor is complete; for an unannounced name, until all tensors are. Raises ArealError if it
        will not arrive."""
        self.wait_for(self.ends.get(name, self._whole))

    def wait_all(self) -> None:
        self.wait_for(self._whole)

    def wait_for(self, end: int) -> None:
        """Wait until the first ``end`` bytes are complete. Raises ArealError if they will not arrive."""
        with self._changed:
            self._changed.wait_for(lambda: self._bytes >= end or self._failure is not None)
            if self._bytes < end:
                raise ArealError(f"the weights did not arrive: {self._failure}")


class MemoryFile:
    """A file of ``size`` zero bytes, found at ``path`` and ``link`` while this process lives, mapped as ``map``.

    Its memory is freed with the process: a ``kill -9`` leaves no gigabytes in /dev/shm. Processes of the same user on
    this machine open it through /proc, or through the symbolic link, which is dangling once the process is gone. A
    reader may compute with the mapped memory. A ``MemoryLease`` keeps the file unchanged meanwhile: a writer that
    cannot ``try_lock`` it writes to another file. The locks are the kernel's (flock), so they end with their process.
    The length is sealed, so that no reader's mapping ends in a SIGBUS.
    """

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
        """Lock readers out, for writing, until ``unlock``. Return False if a reader has a lease."""
        return try_lock(self._file)

    def unlock(self) -> None:
        fcntl.flock(self._file, fcntl.LOCK_UN)

    def remove(self) -> None:
        """Remove the link and free this process's hold on the memory. Those that have mapped it keep it. Idempotent."""
        if self._file < 0:
            return
        if self.link is not None:
            self.link.unlink(missing_ok=True)
        os.close(self._file)
        self._file = -1


def _with_own_number(file: int) -> int:
    """Return ``file`` as a descriptor whose number this process does not soon reuse.

    A process that opens the path of a removed file too late must not find another file there. Other descriptors get low
    numbers; these numbers count upwards.
    """
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    first = _FIRST if soft == resource.RLIM_INFINITY else min(_FIRST, soft // 2)
    try:
        _last[0] = fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, max(first, _last[0] + 1))
    except OSError:  # beyond the highest allowed number: start again at the first
        _last[0] = fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, first)
    os.close(file)
    return _last[0]


class MemoryLease:
    """A lease that keeps the memory file at ``path`` unchanged until ``end`` or the end of this process. Raises
    BlockingIOError while the file is written, OSError if it does not exist."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb")
        try:
            fcntl.flock(self._file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise

    def end(self) -> None:
        """End the lease. Idempotent. The lock is released explicitly, because mappings of the file keep it open."""
        if not self._file.closed:
            fcntl.flock(self._file, fcntl.LOCK_UN)
            self._file.close()

    def __del__(self) -> None:
        self.end()

    @property
    def fileno(self) -> int:
        return self._file.fileno()


def is_memory_file(path: Path) -> bool:
    """Return whether the file is a ``MemoryFile``, whose writer respects leases."""
    with path.open("rb") as file:
        try:
            return bool(fcntl.fcntl(file, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK)
        except OSError:  # a file on disk
            return False


def layout_of(weights: Iterable[tuple[str, Tensor]]) -> Layout:
    """Return the layout of ``weights``. Raises KeyError for a dtype that the format does not have."""
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
    """Return the eight length bytes and the header of a file that is open at its beginning."""
    size = file.read(8)
    return size + file.read(struct.unpack("<Q", size)[0])


def views(header: bytes, buffer: Any) -> dict[str, Tensor]:
    """Return the tensors in ``buffer``, which begins with ``header``, without copies. They are views of one storage,
    except tensors that do not begin at a multiple of their item size."""
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
    """Return the offset in the body at which each tensor ends."""
    sizes = (math.prod(shape) * _DTYPES[dtype].itemsize for _, shape, dtype in layout)
    return {name: end for (name, _, _), end in zip(layout, accumulate(sizes), strict=True)}


class Image(MemoryFile):
    """Weights as a safetensors file in memory that is written repeatedly in place, with one mapping, and one copy of
    each tensor per update. ``layout``: that of the first weights; it does not change. ``body``, uint8 [bytes]: all
    tensors one after the other; images of the same layout have bodies of the same form.

    The format has eight bytes of header length, the header as JSON, then the body
    (https://github.com/huggingface/safetensors).
    """

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
        """Write one tensor. Raises KeyError for a name that is not in the layout."""
        view = self._views[name]
        if view.shape != tensor.shape:
            raise ValueError(f"{name} was {list(view.shape)} and is {list(tensor.shape)} now")
        view.copy_(tensor)

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors as views of ``body``, in the layout's order."""
        return [self._views[name] for name, _, _ in self.layout if name in self._views]

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._views)

    def remove(self) -> None:
        self._views.clear()
        self.body = torch.empty(0, dtype=torch.uint8)
        super().remove()
