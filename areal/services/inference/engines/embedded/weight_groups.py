"""Weights that a trainer broadcasts: received into memory as a file, which is then loaded as any other, or computed
with where it lies. Then two files take turns. They have no name on a disk: no end of this process leaves one behind.

One thread of its own does the waiting: a member that does not come holds nobody else up. Whoever leaves a group, or
goes away while it asks for something of it, ends that wait: the next group does not wait for the last one.

A group goes with the last reference to it, and takes as long as the operation that hangs in it: neither the loop's
thread nor one that somebody waits for may have that one. So only ``_Member.group`` and who waits in it refer to it, no
error does, and both hand it to a thread of its own.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from areal.errors import ArealError, Conflict, UsageFault
from areal.services.weight_transfer.memory import TransferProgress

if TYPE_CHECKING:
    import torch

    from areal.services.weight_transfer.group import BroadcastGroup
    from areal.services.weight_transfer.memory import Image

_TIMEOUT_S = 300.0
_CONNECT_S = 30.0
_MOST = 2


@dataclass
class _Member:
    group: BroadcastGroup | None  # None: it was left
    images: list[Image] = field(default_factory=list)  # the newest last
    arrival: TransferProgress | None = None  # of what is received now, or was last


class WeightGroups:
    def __init__(self) -> None:
        self._members: dict[str, _Member] = {}
        self._forming: dict[str, threading.Event] = {}  # by what a group is given up that is not there yet
        self._thread = _one_thread()

    async def join(self, name: str, place: Mapping[str, Any], device: torch.device) -> None:
        """``device`` is the engine's. Raises UsageFault for an incomplete place, ArealError where the group does not
        form."""
        host, port, rank, size = (place.get(field) for field in ("host", "port", "rank", "world_size"))
        numbers = (port, rank, size)
        if not isinstance(host, str) or any(type(number) is not int for number in numbers):
            raise UsageFault("a group has a host, a port, a rank and a world_size")
        self.leave(name)
        given_up = self._forming[name] = threading.Event()
        try:
            group = await self._run(_form, host, port, rank, size, device, given_up)
        except BaseException:
            self._leave_forming(name, given_up)
            raise
        if self._forming.get(name) is not given_up:
            raise ArealError("the process group was left while it formed")
        del self._forming[name]
        self._members[name] = _Member(group)

    async def receiving(self, name: str, layout: object) -> tuple[Path, TransferProgress, asyncio.Future[None]]:
        """The file in which what is broadcast arrives, how far it is, and its end: ArealError where the group breaks.
        Raises Conflict, UsageFault."""
        member = self._members.get(name)
        if member is None:
            raise Conflict(f"this engine has not joined the group {name!r}")
        image, arrival = await self._run(_place, member, layout)
        member.arrival = arrival
        received = asyncio.ensure_future(self._run(_carry, member, image.body, arrival.reach))
        received.add_done_callback(partial(self._ended, name, member, arrival))
        return image.path, arrival, received

    async def receive(self, name: str, layout: object) -> Path:
        """The file that holds what was broadcast. Raises Conflict, UsageFault, ArealError."""
        file, _, received = await self.receiving(name, layout)
        await received
        return file

    def _ended(self, name: str, member: _Member, arrival: TransferProgress, received: asyncio.Future[None]) -> None:
        """Also when its waiter left. After half a broadcast, the rest of the group's data cannot be told apart."""
        if not arrival.is_whole:
            failure = None if received.cancelled() else received.exception()
            arrival.fail("nobody asks for them any more" if failure is None else str(failure))
            if self._members.get(name) is member:
                self.leave(name)

    def leave(self, name: str) -> None:
        if name in self._forming:
            self._leave_forming(name, self._forming[name])
        member = self._members.pop(name, None)
        if member is not None:
            if member.arrival is not None and not member.arrival.is_whole:
                member.arrival.fail("the process group was left")
                self._abandon_thread()
            _let_go(member)
            for image in member.images:
                image.remove()

    def _leave_forming(self, name: str, given_up: threading.Event) -> None:
        given_up.set()
        if self._forming.get(name) is given_up:
            del self._forming[name]
            self._abandon_thread()

    def _abandon_thread(self) -> None:
        """A call that still waits there may do so for minutes."""
        self._thread.shutdown(wait=False)
        self._thread = _one_thread()

    def close(self) -> None:
        for name in list(self._members):
            self.leave(name)
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _run(self, function: Any, *arguments: Any) -> Any:
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._thread, function, *arguments)
        except (RuntimeError, ValueError, OSError) as error:
            raise ArealError(f"the process group failed: {error}") from error


def _form(host: str, port: int, rank: int, size: int, device: torch.device, given_up: threading.Event) -> Any:
    from areal.services.weight_transfer.group import BroadcastGroup, join_store

    store = join_store(host, port, size, _CONNECT_S)
    return BroadcastGroup(store, rank, size, _TIMEOUT_S, device, given_up)


def _carry(member: _Member, body: torch.Tensor, reached: Callable[[int], None]) -> None:
    """Receive a broadcast into ``body``. Raises ArealError."""
    held = [member.group]
    try:
        if held[0] is None:
            raise RuntimeError("it was left")
        held[0].broadcast(body, reached)
        return
    except (RuntimeError, ValueError, OSError) as error:
        why = str(error)
    _drop(held)
    raise ArealError(f"the process group failed: {why}")


def _let_go(member: _Member) -> None:
    held, member.group = [member.group], None
    if held[0] is not None:
        held[0].leave()
    _drop(held)


def _drop(held: list[BroadcastGroup | None]) -> None:
    """Nobody waits for it."""
    threading.Thread(target=held.clear, name="let-go-of-group", daemon=True).start()


def _one_thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="weight-group")


def _place(member: _Member, given: object) -> tuple[Image, TransferProgress]:
    """One that the engine does not compute with. Where it has both on lease, the older one is its alone from now on."""
    from areal.services.weight_transfer.memory import Image, ends, read_layout

    layout = read_layout(given)
    for image in member.images:
        if image.layout == layout and image.seize():
            image.yield_up()  # who reads it waits for each tensor
            member.images.remove(image)
            break
    else:
        if len(member.images) == _MOST:
            member.images.pop(0).remove()
        image = Image(layout)
    member.images.append(image)
    return image, TransferProgress(ends(layout))
