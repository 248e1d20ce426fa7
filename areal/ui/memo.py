"""What was read from a file, kept while the file stays as it is."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from areal.files import stamp

T = TypeVar("T")


class FileMemo(Generic[T]):
    """``load(path)`` for each of the last ``most`` files, called again when the file is another. Thread-safe."""

    def __init__(self, load: Callable[[Path], T], most: int = 256) -> None:
        self._load = load
        self._most = most
        self._known: dict[Path, tuple[tuple[int, int, int] | None, T]] = {}
        self._lock = threading.Lock()

    def get(self, path: Path) -> T:
        now = stamp(path)
        with self._lock:
            known = self._known.get(path)
        if known is not None and known[0] == now:
            return known[1]
        value = self._load(path)
        with self._lock:
            self._known.pop(path, None)
            self._known[path] = (now, value)
            while len(self._known) > self._most:
                del self._known[next(iter(self._known))]
        return value
