"""The trainer's end of ``xccl``: weights staged in memory of our own, and broadcast when the workers wait for them."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import Tensor

from areal.services.web.errors import ApiError
from areal.services.weight_update.group import BroadcastGroup, open_store
from areal.services.weight_update.image import Image, layout_of

_TIMEOUT_S = 300.0
_STAGED = "staged.safetensors"


class BroadcastOutlet:
    """``host`` is where workers meet us; ``folder`` has a link to what is staged."""

    def __init__(self, folder: Path, host: str = "127.0.0.1") -> None:
        self._folder = folder
        self._host = host
        self._store: Any | None = None
        self._group: BroadcastGroup | None = None
        self._image: Image | None = None
        self._size = 0
        self.version: int | None = None
        self.probe: dict[str, Any] | None = None

    # -- the trainer's thread

    def write(self, version: int, weights: Iterable[tuple[str, Tensor]], probe: dict[str, Any] | None) -> None:
        self.probe = probe
        held = list(weights)
        layout = layout_of(held)
        if self._image is None or self._image.layout != layout:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._image = Image(self._folder / _STAGED, layout)
        self.version = None
        for name, tensor in held:
            self._image.write(name, tensor)
        self.version = version

    def staged_file(self, version: int) -> Path | None:
        return self._folder / _STAGED if self._image is not None and self.version == version else None

    def remove(self) -> None:
        self.leave()
        if self._image is not None:
            self._image.remove()
        shutil.rmtree(self._folder, ignore_errors=True)

    # -- the endpoint's threads

    def offer(self, size: int) -> dict[str, Any]:
        """A place to meet for a group of ``size``."""
        self.leave()
        self._store = open_store(self._host, 0, size, _TIMEOUT_S)
        self._size = size
        return {"host": self._host, "port": self._store.port, "world_size": size}

    def join(self) -> None:
        """Returns when all workers have joined."""
        if self._store is None:
            raise ApiError(409, "nobody was asked to meet yet", code="not_connected")
        self._group = BroadcastGroup(self._store, 0, self._size, _TIMEOUT_S)

    def leave(self) -> None:
        self._group, self._store = None, None

    def published(self, version: int) -> dict[str, Any]:
        """What will be broadcast. Raises ApiError 409."""
        image = self._staged(version)
        answer: dict[str, Any] = {"source": {"layout": image.layout}, "bytes": image.bytes}
        return answer | ({"probe": self.probe} if self.probe else {})

    def send(self, version: int) -> None:
        """Raises ApiError 409, RuntimeError where a worker is lost."""
        image, group = self._staged(version), self._group
        if group is None:
            raise ApiError(409, "the process group was not formed", code="not_connected")
        group.broadcast(image.body)

    def _staged(self, version: int) -> Image:
        if self._image is None or self.version != version:
            has = "nothing" if self.version is None else f"version {self.version}"
            raise ApiError(409, f"version {version} is not staged: the trainer has {has}", code="not_staged")
        return self._image
