"""A process group that carries weights: the trainer broadcasts, inference workers receive.

Made of torch's own parts and no global state, so that a trainer's default group is left alone. gloo carries host
memory. The members meet at a store that the trainer opens; a member that does not come, or leaves, is an error after
``timeout_s`` for all the others.
"""

from __future__ import annotations

import datetime
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_PIECE = 32 * 1024 * 1024  # bytes of one broadcast: the next one is read while this one travels


def open_store(host: str, port: int, size: int, timeout_s: float) -> Any:
    """The trainer's: listens, on a free port where ``port`` is 0 (``store.port``)."""
    timeout = datetime.timedelta(seconds=timeout_s)
    return dist.TCPStore(  # type: ignore[attr-defined]
        host, port, size, is_master=True, timeout=timeout, wait_for_workers=False
    )


def join_store(host: str, port: int, size: int, timeout_s: float) -> Any:
    timeout = datetime.timedelta(seconds=timeout_s)
    return dist.TCPStore(  # type: ignore[attr-defined]
        host, port, size, is_master=False, timeout=timeout, wait_for_workers=False
    )


class BroadcastGroup:
    """Blocks until all members are there. Rank 0 is the trainer. Raises RuntimeError where one stays away."""

    def __init__(self, store: Any, rank: int, size: int, timeout_s: float) -> None:
        self._store = store
        self._group = dist.ProcessGroupGloo(store, rank, size, datetime.timedelta(seconds=timeout_s))
        self.size = size

    def broadcast(self, body: Tensor) -> None:
        """``body`` of uint8, equally long everywhere, from rank 0 to all. Raises RuntimeError when a member is lost."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        group: Any = self._group  # torch's stubs know less of it than it does
        works = [group.broadcast([piece], options) for piece in torch.split(body, _PIECE)]
        for work in works:
            work.wait()
