"""Weights in memory that a trainer writes again and again: mapped once, and read through the same mapping each time.

Mapping a file anew costs twice what copying it does, a page fault every four kilobytes. What was mapped is kept until
``forget``, or until others took its place; it keeps its memory alive, also when the trainer is gone.
"""

from __future__ import annotations

import mmap
import os
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

_MOST = 2  # files: a trainer's two take turns


class MemoryMaps:
    """One thread at a time."""

    def __init__(self) -> None:
        self._held: OrderedDict[tuple[int, int, bytes], dict[str, Tensor]] = OrderedDict()

    def tensors(self, file: Path) -> Mapping[str, Tensor] | None:
        """By name; None where ``file`` is on a disk, whose files come and go under one number."""
        from areal.services.weight_update.image import header_of, views

        with file.open("rb") as opened:
            if not str(Path(f"/proc/self/fd/{opened.fileno()}").readlink()).startswith("/memfd:"):
                return None
            about = os.fstat(opened.fileno())
            header = header_of(opened)
        key = (about.st_dev, about.st_ino, header)
        if key not in self._held:
            with file.open("r+b") as opened:  # writable only because torch wants it so
                self._held[key] = views(header, mmap.mmap(opened.fileno(), about.st_size))
        self._held.move_to_end(key)
        while len(self._held) > _MOST:
            self._held.popitem(last=False)
        return self._held[key]

    def forget(self) -> None:
        self._held.clear()
