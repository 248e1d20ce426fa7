"""The processes of one training run, from torchrun's environment; a single process needs no process group.

The group is made once and passed on; nothing here is global but torch's own default group. A plain ``python driver.py``
starts itself again as many ranks as its configuration lays out (``actor.backend: fsdp:d4``), as ``areal train run``
does; other launches must agree with it.
"""

from __future__ import annotations

import datetime
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from areal.api.alloc_mode import train_backend
from areal.errors import UsageFault

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

    def all_sum(self, values: Tensor) -> Tensor:
        """The sum of ``values`` over all ranks."""
        if self.group is None:
            return values
        total = values.detach().clone()
        dist.all_reduce(total, group=self.group)
        return total

    def all_max(self, number: int) -> int:
        if self.group is None:
            return number
        most = torch.tensor(number, device=self.device)
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=self.group)
        return int(most)

    def broadcast(self, value: Any) -> Any:
        """The first rank's ``value``, on every rank. Pickle among the ranks of one run, never from elsewhere."""
        if self.group is None:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.group, device=self.device)
        return box[0]

    def all_gather(self, value: T) -> list[T]:
        """The ``value`` of each rank, in their order, on every rank. Pickle, as above."""
        if self.group is None:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values


def one_process(device: str | None = None) -> Ranks:
    return Ranks(0, 1, torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu")))


@contextmanager
def join_ranks(timeout_s: float = 1800.0) -> Iterator[Ranks]:
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


# -- layout

_JOB = "AREAL_RUN_FOLDER"  # a job has as many as its manifest says


def processes_of(config: Any) -> int | None:
    """None where the configuration says nothing about it."""
    engine = getattr(config, "actor", None) or getattr(config, "model", None)
    backend, allocation = getattr(engine, "backend", "") or "", config.allocation_mode or ""
    return train_backend(backend, allocation).world_size if backend or allocation else None


def ensure_layout(config: Any) -> None:
    """Returns in a process of a run that is laid out as ``config`` says. The main script of a single process is
    replaced by the ranks; any other process raises UsageFault."""
    wanted, started = processes_of(config), int(os.environ.get("WORLD_SIZE", "1"))
    if wanted is None or wanted == started or _JOB in os.environ:
        return
    script = _main_script()
    if started > 1 or script is None:
        raise UsageFault(
            f"the configuration lays out {wanted} training processes, and {started} "
            f"{'was' if started == 1 else 'were'} started",
            hint=f"areal train run starts as many; or torchrun --nproc-per-node={wanted}, or backend=fsdp:d{started}",
        )
    launch = [sys.executable, "-m", "areal.training.launch", "--processes", str(wanted)]
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [*launch, "--", "--driver", str(script), "--", *sys.argv[1:]])


def _main_script() -> Path | None:
    """The file of ``python driver.py``; None in a notebook, a test or ``python -m``."""
    main = sys.modules["__main__"]
    file = getattr(main, "__file__", None)
    if file is None or getattr(main, "__spec__", None) is not None or not file.endswith(".py"):
        return None
    return Path(file).absolute()
