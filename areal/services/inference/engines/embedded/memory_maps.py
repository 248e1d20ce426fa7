"""Weights in memory that a trainer writes again and again: mapped once, and read through the same mapping each time.

Mapping a file anew costs twice what copying it does, a page fault every four kilobytes. What was mapped is kept until
``forget``, or until others took its place; it keeps its memory alive, also when the trainer is gone.

The engine computes with what it has mapped: nothing is copied that its machine multiplies as it lies there. So each
file is opened with a lease, which its reader ends when it computes with the file no more; until then nobody writes to
it. Mappings are read-only: a write of ours would change what other engines serve, and ends in a SIGSEGV instead.
"""

from __future__ import annotations

import mmap
import os
import warnings
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from areal.errors import ArealError

if TYPE_CHECKING:
    from torch import Tensor

    from areal.services.weight_update.memory_file import Lease

_MOST = 2  # files: a trainer's two take turns


class MemoryMaps:
    """One thread at a time."""

    def __init__(self) -> None:
        self._held: OrderedDict[tuple[int, int, bytes], dict[str, Tensor]] = OrderedDict()

    def open(self, file: Path) -> tuple[Mapping[str, Tensor], Lease] | None:
        """Tensors by name; None where ``file`` is on a disk, whose files come and go under one number. Raises
        ArealError while it is written."""
        from areal.services.weight_update.image import header_of
        from areal.services.weight_update.memory_file import Lease, is_memory_file

        if not is_memory_file(file):
            return None
        try:
            lease = Lease(file)
        except BlockingIOError as error:
            raise ArealError(f"{file} is being written") from error
        about = os.fstat(lease.fileno)
        with os.fdopen(os.dup(lease.fileno), "rb") as opened:
            header = header_of(opened)
        key = (about.st_dev, about.st_ino, header)
        if key not in self._held:
            self._held[key] = _map(header, lease.fileno, about.st_size)
        self._held.move_to_end(key)
        while len(self._held) > _MOST:
            self._held.popitem(last=False)
        return self._held[key], lease

    def forget(self) -> None:
        self._held.clear()


def _map(header: bytes, file: int, size: int) -> dict[str, Tensor]:
    from areal.services.weight_update.image import views

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return views(header, mmap.mmap(file, size, access=mmap.ACCESS_READ))
