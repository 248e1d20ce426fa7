"""A process group that transfers weights: the trainer broadcasts, inference workers receive.

It uses torch's own parts and no global state, so that a trainer's default group is not affected. The members meet at a
store that the trainer opens. If a member does not join, or leaves, the others fail after ``timeout_s``, or earlier when
``given_up`` is set, both while the group forms and during a transfer. gloo itself cannot be interrupted, so an
abandoned operation ends in a thread of its own.

Each member writes its device to the store. If each has a CUDA device of its own, NCCL transfers the weights, through a
bucket of device memory; otherwise gloo transfers them between host memories.
"""

from __future__ import annotations

import datetime
import threading
import time
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

_PIECE = 32 * 1024 * 1024  # bytes of one broadcast: the next one is read while this one travels
_MEET_S = 0.01
_CONNECT_S = 30.0  # once all members have joined
_LOOK_S = 0.5
_PART_S = 1.0
_CPU = torch.device("cpu")
Await = Callable[[int], None]


def at_once(count: int) -> None:
    """Do not wait: all bytes are ready."""


class Sender(Protocol):
    """The trainer's end of a group. ``tensors`` are consecutive views of ``body``."""

    def send(self, body: Tensor, tensors: Sequence[Tensor], await_bytes: Await = at_once) -> None:
        """Send ``body``. ``await_bytes(count)`` returns once the first ``count`` bytes of ``body`` are final; its
        errors are passed on. Raises RuntimeError if a member is lost."""

    def leave(self) -> None: ...


def open_store(host: str, port: int, size: int, timeout_s: float, *, listen: bool = True) -> Any:
    """Open the store. The trainer listens (``listen``), on a free port if ``port`` is 0 (``store.port``)."""
    timeout = datetime.timedelta(seconds=timeout_s)
    return dist.TCPStore(  # type: ignore[attr-defined]
        host, port, size, is_master=listen, timeout=timeout, wait_for_workers=False
    )


class BroadcastGroup:
    """A process group for broadcasts from rank 0, the trainer. Creating it blocks until all members have joined. Raises
    RuntimeError if one does not join in time, or when ``given_up`` is set."""

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        timeout_s: float,
        device: torch.device = _CPU,
        given_up: threading.Event | None = None,
    ) -> None:
        self._store = store
        self._given_up = given_up or threading.Event()
        self._timeout = timeout = datetime.timedelta(seconds=timeout_s)
        self._bucket: Tensor | None = None
        self._group: Any  # torch's stubs are incomplete for it
        is_cuda = device.type == "cuda"
        name = f"cuda:{torch.cuda.get_device_properties(device).uuid}" if is_cuda else device.type
        store.set(f"device/{rank}", name)
        keys = [f"device/{member}" for member in range(size)]
        _await_keys(store, keys, timeout_s, self._given_up)
        if nccl_carries([store.get(key).decode() for key in keys]):
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            self._group = dist.ProcessGroupNCCL(store, rank, size, options)
            self._bucket = torch.empty(_PIECE, dtype=torch.uint8, device=device)
        else:
            soon = datetime.timedelta(seconds=min(timeout_s, _CONNECT_S))
            store.set_timeout(soon)
            self._group = dist.ProcessGroupGloo(store, rank, size, soon)
        self._sends = rank == 0

    def broadcast(
        self, body: Tensor, reached: Callable[[int], None] = lambda count: None, await_bytes: Await = at_once
    ) -> None:
        """Broadcast ``body``, uint8 of the same length everywhere, from rank 0. ``reached`` is called with the number
        of bytes transferred so far; ``await_bytes`` is as for ``send``. Raises RuntimeError if a member is lost."""
        if self._bucket is not None:
            self._by_bucket(body, self._bucket, await_bytes)
            reached(len(body))
            return
        works = []
        for number, piece in enumerate(torch.split(body, _PIECE)):
            await_bytes(number * _PIECE + len(piece))
            works.append(self._group.broadcast([piece], _from_first(self._timeout)))
        for number, work in enumerate(works, start=1):
            self._await(work)
            reached(min(number * _PIECE, len(body)))

    def _await(self, work: Any) -> None:
        while True:
            try:
                work.wait(datetime.timedelta(seconds=_LOOK_S))
                return
            except RuntimeError:  # the work failed, or is not done yet
                if self._given_up.is_set():
                    raise RuntimeError("the process group was left") from None
                if work.is_completed():
                    work.wait()  # raises if it failed; it may also have completed just now
                    return

    def send(self, body: Tensor, tensors: Sequence[Tensor], await_bytes: Await = at_once) -> None:
        self.broadcast(body, await_bytes=await_bytes)

    def leave(self) -> None:
        """Close the group's connections and end all waits in it."""
        self._given_up.set()

    def _by_bucket(self, body: Tensor, bucket: Tensor, await_bytes: Await) -> None:
        for number, piece in enumerate(torch.split(body, _PIECE)):
            await_bytes(number * _PIECE + len(piece))
            there = bucket[: len(piece)]
            if self._sends:
                there.copy_(piece)
            self._group.broadcast([there], _from_first(self._timeout)).wait()
            if not self._sends:
                piece.copy_(there)
        torch.cuda.synchronize(bucket.device)


def nccl_carries(devices: Sequence[str]) -> bool:
    """Return whether each member has a CUDA device (``cuda:UUID``) of its own: NCCL refuses two ranks on one device."""
    return all(device.startswith("cuda:") for device in devices) and len(set(devices)) == len(devices)


class NamedGroup:
    """A group that SGLang's ``/init_weights_update_group`` joins: a torch group beside the default group, with the
    group's name as prefix of the store's keys, and one broadcast per tensor."""

    def __init__(self, store: Any, size: int, timeout_s: float, name: str, device: torch.device) -> None:
        import torch.distributed.distributed_c10d as c10d

        helpers: Any = c10d
        timeout = datetime.timedelta(seconds=timeout_s)
        self._device = device
        self._group, _ = helpers._new_process_group_helper(
            size,
            0,
            [],
            helpers.Backend("nccl" if device.type == "cuda" else "gloo"),
            helpers.PrefixStore(name, store),
            group_name=name,
            backend_options=None,
            timeout=timeout,
        )
        helpers._world.pg_group_ranks[self._group] = {member: member for member in range(size)}

    def send(self, body: Tensor, tensors: Sequence[Tensor], await_bytes: Await = at_once) -> None:
        for tensor, end in zip(tensors, accumulate(tensor.nbytes for tensor in tensors), strict=True):
            await_bytes(end)
            dist.broadcast(tensor.to(self._device), src=0, group=self._group)

    def leave(self) -> None:
        dist.destroy_process_group(self._group)


def open_group(
    form: str,
    store: Any,
    size: int,
    timeout_s: float,
    name: str,
    device: torch.device = _CPU,
    given_up: threading.Event | None = None,
) -> Sender:
    """Return the trainer's end of a group of ``size`` members. ``form``: the form of group that its engines join
    (``GroupMember``)."""
    if form == "named":
        return NamedGroup(store, size, timeout_s, name, device)
    return BroadcastGroup(store, 0, size, timeout_s, device, given_up)


def release(held: list[object]) -> None:
    """Drop the objects in ``held``. Dropping a group with a hanging operation takes as long as the operation, so wait
    briefly."""
    thread = threading.Thread(target=held.clear, name="free-group", daemon=True)
    thread.start()
    thread.join(_PART_S)


def _await_keys(store: Any, keys: list[str], timeout_s: float, given_up: threading.Event) -> None:
    """Wait for ``keys``. Raises RuntimeError if one is not set in time, the store is gone, or ``given_up`` is set."""
    deadline = time.monotonic() + timeout_s
    while not store.check(keys):
        if given_up.wait(_MEET_S):
            raise RuntimeError("the process group was left before it was formed")
        if time.monotonic() > deadline:
            raise RuntimeError(f"not all members of the process group came within {timeout_s:g} s")


def _from_first(timeout: datetime.timedelta) -> Any:
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor, options.timeout = 0, 0, timeout
    return options
