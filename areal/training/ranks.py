"""The processes of one training run, from torchrun's environment; a single process needs no process group.

The group is made once and passed on; nothing here is global but torch's own default group. A plain ``python driver.py``
starts itself again as many ranks as its configuration lays out (``actor.backend: fsdp:d4``), as ``areal train run``
does; other launches must agree with it.
"""

from __future__ import annotations

import datetime
import os
import secrets
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from areal.api.alloc_mode import train_backend
from areal.errors import UsageFault
from areal.resources.backend import Part

T = TypeVar("T")
UNCUT = Part("fsdp")  # the whole model on each rank


@dataclass(frozen=True)
class Ranks:
    """``group`` is None in a run of one process: then every collective is the identity.

    ``layout`` cuts a model over ``devices_per_replica`` ranks, which together are one data-parallel rank: they get the
    same rows and have the same outputs, losses and metrics. Tensor-parallel ranks are neighbors, then come context,
    data and pipeline: rank = tensor + T (context + C (data + D pipeline)). ``nodes``: machines, each with as many of
    the ranks, in their order.
    """

    rank: int
    size: int
    device: torch.device
    group: dist.ProcessGroup | None = None
    layout: Part = UNCUT
    nodes: int = 1

    def __post_init__(self) -> None:
        if self.size % self.layout.devices_per_replica:
            raise UsageFault(
                f"{self.layout} needs {self.layout.devices_per_replica} processes for each part of the data, and "
                f"{self.size} were started"
            )

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def data_size(self) -> int:
        return self.size // self.layout.devices_per_replica

    @property
    def data_rank(self) -> int:
        return self.rank // self._inner % self.data_size

    @property
    def is_replica_first(self) -> bool:
        """Whether this is the first rank of its data-parallel rank."""
        return self.rank % self._inner == 0 and self.rank < self._inner * self.data_size

    @property
    def _inner(self) -> int:
        return self.layout.tensor * self.layout.context

    def all_sum(self, values: Tensor) -> Tensor:
        """The sum of ``values`` over data-parallel ranks, on every rank."""
        if self.group is None:
            return values
        total = values.detach().clone() if self.is_replica_first else torch.zeros_like(values)
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

    def data_gather(self, value: T) -> list[T]:
        """The ``value`` of each data-parallel rank, in their order, on every rank."""
        return [each for each, counts in self.all_gather((value, self.is_replica_first)) if counts]


def one_process(device: str | None = None) -> Ranks:
    return Ranks(0, 1, torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu")))


@contextmanager
def join_ranks(layout: Part | None = None, timeout_s: float = 1800.0) -> Iterator[Ranks]:
    """The ranks that torchrun started, joined over NCCL where there is a GPU and gloo where there is none. Raises
    UsageFault where they are no multiple of a replica of ``layout``.

    ``timeout_s`` is how long a collective may wait for a rank that does not come.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        yield replace(one_process(), layout=layout or UNCUT)
        return
    local, nodes = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("GROUP_WORLD_SIZE", "1"))
    on_node = int(os.environ.get("LOCAL_WORLD_SIZE", size // nodes))
    if on_node * nodes != size:
        raise UsageFault(
            f"{size} training processes over {nodes} nodes, {on_node} of them on this one: each has to have as many",
            hint="torchrun --nproc-per-node=N, with one N on all nodes",
        )
    device = torch.device("cuda", local) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=datetime.timedelta(seconds=timeout_s))
    ranks = Ranks(dist.get_rank(), size, device, dist.group.WORLD, layout or UNCUT, nodes)
    try:
        yield ranks
        dist.barrier()  # gloo aborts, or hangs, where a rank leaves while another is still in the last collective
    finally:
        dist.destroy_process_group()
        # The last reference to the group: its threads end here. One that still frees a tensor when the interpreter
        # finalizes would abort the process.
        object.__setattr__(ranks, "group", None)


def require_shared(folder: Path, ranks: Ranks) -> None:
    """Every node sees what the first rank writes into ``folder``, which exists there: checkpoints are of all ranks.
    Raises UsageFault on all of them, naming nodes that do not."""
    if ranks.nodes == 1:
        return
    name: str = ranks.broadcast(f".shared-{secrets.token_hex(8)}")
    if ranks.is_first:
        (folder / name).touch()
    ranks.all_gather(None)  # it is there now
    blind = sorted(
        {node for node, sees in ranks.all_gather((socket.gethostname(), (folder / name).exists())) if not sees}
    )
    if ranks.is_first:
        (folder / name).unlink()
    if blind:
        raise UsageFault(
            f"{folder} of the first node is not there on {', '.join(blind)}: a run over several nodes has one folder",
            hint="fileroot, or AREAL_HOME for a job, on a file system that all nodes share",
        )


# -- layout

_JOB = "AREAL_RUN_FOLDER"  # a job has as many as its manifest says


def layout_of(config: Any) -> Part | None:
    """None where the configuration says nothing about it."""
    engine = getattr(config, "actor", None) or getattr(config, "model", None)
    backend, allocation = getattr(engine, "backend", "") or "", config.allocation_mode or ""
    return train_backend(backend, allocation) if backend or allocation else None


def processes_of(config: Any) -> int | None:
    layout = layout_of(config)
    return layout.world_size if layout is not None else None


def require_layout(ranks: Ranks, part: Part, role: str) -> None:
    """All models of a run are on the same ranks, and get the same rows. Raises UsageFault for one that is cut over
    another number of them; its data-parallel size is that of the run."""
    wanted, cut = (tuple(getattr(each, name) for name in _CUTS) for each in (part, ranks.layout))
    if wanted != cut:
        raise UsageFault(
            f"{role}.backend {part} and the run's layout {ranks.layout} cut a model differently",
            hint=f"{role}.backend={ranks.layout}, or leave it out; all models of a run have one layout",
        )


_CUTS = ("tensor", "pipeline", "context")


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
