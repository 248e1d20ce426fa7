"""The trainer's end of ``xccl``: weights staged in memory of our own, and broadcast when the workers wait for them.

What is staged already can travel while the rest is copied: a thread of its own copies, and the trainer waits for it
before it goes on to change the weights.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from areal.errors import ArealError
from areal.services.web.errors import ApiError
from areal.services.weight_update.arrival import Arrival
from areal.services.weight_update.group import Sender, let_go, open_group, open_store
from areal.services.weight_update.image import Image, ends, layout_of

_TIMEOUT_S = 300.0  # for a group to form, or a piece to travel
_CPU = torch.device("cpu")
_STAGED = "staged.safetensors"


@dataclass
class _Meeting:
    """A process group from the moment that it is offered."""

    store: Any
    form: str
    size: int
    name: str
    given_up: threading.Event = field(default_factory=threading.Event)
    group: Sender | None = None


class BroadcastOutlet:
    """``host`` is where workers meet us; ``folder`` has a link to what is staged; ``device`` is the trainer's."""

    def __init__(self, folder: Path, host: str = "127.0.0.1", device: torch.device = _CPU) -> None:
        self._folder = folder
        self._host = host
        self._device = device
        self._meeting: _Meeting | None = None
        self._image: Image | None = None
        self._arrival = Arrival({})
        self._staging: Future[None] | None = None
        self._copying = ThreadPoolExecutor(max_workers=1, thread_name_prefix="weight-staging")
        self.version: int | None = None
        self.probe: dict[str, Any] | None = None

    # -- the trainer's thread

    def write(self, version: int, weights: Iterable[tuple[str, Tensor]], probe: dict[str, Any] | None) -> None:
        self.probe = probe
        held = list(weights)
        layout = layout_of(held)
        if self._image is None or self._image.layout != layout:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._image = Image(layout, self._folder / _STAGED)
        self._arrival, self.version = Arrival(ends(layout)), version
        self._staging = self._copying.submit(_copy, held, self._image, self._arrival)

    def settle(self) -> None:
        staging, self._staging = self._staging, None
        if staging is not None:
            try:
                staging.result()
            except BaseException:
                self.version = None
                raise

    @property
    def staged_version(self) -> int | None:
        return self.version

    def staged_file(self, version: int) -> Path | None:
        whole = self._image is not None and self.version == version and self._arrival.is_whole
        return self._folder / _STAGED if whole else None

    def remove(self) -> None:
        self.leave()
        self._copying.shutdown()
        if self._image is not None:
            self._image.remove()
        shutil.rmtree(self._folder, ignore_errors=True)

    # -- the endpoint's threads

    def offer(self, name: str, size: int, group_form: str) -> dict[str, Any]:
        """A place to meet for a group of ``size``."""
        self.leave()
        store = open_store(self._host, 0, size, _TIMEOUT_S)
        self._meeting = _Meeting(store, group_form, size, name)
        backend = "nccl" if self._device.type == "cuda" else "gloo"
        return {"host": self._host, "port": store.port, "world_size": size, "backend": backend}

    def join(self) -> None:
        """Returns when all workers have joined. Raises RuntimeError where one does not come, or we left meanwhile."""
        meeting = self._meeting
        if meeting is None:
            raise ApiError(409, "nobody was asked to meet yet", code="not_connected")
        about = meeting.form, meeting.store, meeting.size, _TIMEOUT_S, meeting.name, self._device
        meeting.group = open_group(*about, meeting.given_up)
        if meeting.given_up.is_set():
            _part(meeting)
            raise RuntimeError("the process group was left while it formed")

    def leave(self) -> None:
        meeting, self._meeting = self._meeting, None
        if meeting is not None:
            meeting.given_up.set()
            _part(meeting)

    def published(self, version: int) -> dict[str, Any]:
        """What will be broadcast. Raises ApiError 409."""
        image = self._staged(version)
        answer: dict[str, Any] = {"source": {"layout": image.layout}, "bytes": image.bytes}
        return answer | ({"probe": self.probe} if self.probe else {})

    def send(self, version: int) -> None:
        """Raises ApiError 409, RuntimeError where a worker is lost, or the weights do not come."""
        image, meeting = self._staged(version), self._meeting
        group = meeting.group if meeting is not None else None
        if group is None:
            raise ApiError(409, "the process group was not formed", code="not_connected")
        try:
            group.send(image.body, image.tensors, self._arrival.wait_for)
            return
        except (RuntimeError, ArealError) as error:
            why = str(error)
        # Not the error itself: its frames would hold the group, and so its connections, on which the others wait.
        held: list[object] = [group]
        del group
        let_go(held)
        raise RuntimeError(why)

    def _staged(self, version: int) -> Image:
        if self._image is None or self.version != version:
            has = "nothing" if self.version is None else f"version {self.version}"
            raise ApiError(409, f"version {version} is not staged: the trainer has {has}", code="not_staged")
        return self._image


def _part(meeting: _Meeting) -> None:
    """Connections end with the group: the other members would wait on them."""
    if (group := meeting.group) is not None:
        group.leave()
        meeting.group = None
        held: list[object] = [group]
        del group
        let_go(held)


@torch.no_grad()
def _copy(weights: list[tuple[str, Tensor]], image: Image, arrival: Arrival) -> None:
    try:
        for name, tensor in weights:
            image.write(name, tensor)
            arrival.reach(arrival.ends[name])
    except BaseException as error:
        arrival.fail(str(error) or type(error).__name__)
        raise
