"""The processes of one training run, from torchrun's environment; a single process needs no process group.

The group is made once and passed on; nothing here is global but torch's own default group.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """``group`` is None in a run of one process: then every collective is the identity."""

    rank: int
    size: int
    device: torch.device
    group: dist.ProcessGroup | None = None

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def summed(self, values: Tensor) -> Tensor:
        """The sum of ``values`` over all ranks."""
        if self.group is None:
            return values
        total = values.detach().clone()
        dist.all_reduce(total, group=self.group)
        return total

    def largest(self, number: int) -> int:
        if self.group is None:
            return number
        most = torch.tensor(number, device=self.device)
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=self.group)
        return int(most)

    def told_by_first(self, value: Any) -> Any:
        """What the first rank passes, on every rank. Pickle among the ranks of one run, never from elsewhere."""
        if self.group is None:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.group, device=self.device)
        return box[0]

    def gathered(self, value: T) -> list[T]:
        """What each rank passes, in their order, on every rank. Pickle, as above."""
        if self.group is None:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def together(self) -> None:
        """Return when every rank is here."""
        if self.group is not None:
            dist.barrier(group=self.group)


def one_process(device: str | None = None) -> Ranks:
    return Ranks(0, 1, torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu")))


@contextmanager
def joined_ranks(timeout_s: float = 1800.0) -> Iterator[Ranks]:
    """The ranks that torchrun started, joined over NCCL where there is a GPU and gloo where there is none.

    ``timeout_s`` is how long a collective may wait for a rank that does not come.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        yield one_process()
        return
    local = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", local) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=datetime.timedelta(seconds=timeout_s))
    try:
        yield Ranks(dist.get_rank(), size, device, dist.group.WORLD)
    finally:
        dist.destroy_process_group()
