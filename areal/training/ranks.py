"""The processes of one training run, from torchrun's environment; a single process needs no process group.

The process group is created once and passed on. A plain ``python driver.py`` replaces itself by the number of ranks in
its configuration (``actor.backend: fsdp:d4``), as ``areal train run`` does; other launchers must start that number."""

from __future__ import annotations

import datetime
import os
import secrets
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from areal.api.alloc_mode import train_backend
from areal.dataclasses import dataclass, replace
from areal.errors import UsageFault
from areal.installation import module_argv
from areal.resources.backend import Part
from areal.training.run_folder import FOLDER_VARIABLE

T = TypeVar("T")
UNSHARDED = Part("fsdp")  # the whole model on each rank
_MODEL_AXES = ("tensor", "pipeline", "context")


@dataclass(frozen=True)
class Ranks:
    """``group`` is None in a run of one process; then every collective is the identity.

    ``layout`` divides a model over ``devices_per_replica`` ranks, which together are one data-parallel rank: they get
    the same rows and have the same outputs, losses and metrics. rank = tensor + T (context + C (data + D pipeline)).
    ``nodes``: machines with equal numbers of consecutive ranks.
    """

    rank: int
    size: int
    device: torch.device
    group: dist.ProcessGroup | None = None
    layout: Part = UNSHARDED
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
        """Whether this is the first device of its data-parallel rank."""
        return self.rank % self._inner == 0 and self.rank < self._inner * self.data_size

    @property
    def _inner(self) -> int:
        return self.layout.tensor * self.layout.context

    def all_sum(self, values: Tensor) -> Tensor:
        """Return the sum of ``values`` over data-parallel ranks, on every rank."""
        if self.group is None:
            return values
        total = values.detach().clone() if self.is_replica_first else torch.zeros_like(values)
        dist.all_reduce(total, group=self.group)
        return total

    def all_max(self, number: int) -> int:
        if self.group is None:
            return number
        highest = torch.tensor(number, device=self.device)
        dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=self.group)
        return int(highest)

    def broadcast(self, value: Any) -> Any:
        """Return the first rank's ``value``, on every rank. Uses pickle, only among the ranks of one run."""
        if self.group is None:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.group, device=self.device)
        return box[0]

    def all_gather(self, value: T) -> list[T]:
        """Return the ``value`` of each rank, in rank order, on every rank. Uses pickle too."""
        if self.group is None:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def data_gather(self, value: T) -> list[T]:
        """Return the ``value`` of each data-parallel rank, in rank order, on every rank."""
        return [each for each, counts in self.all_gather((value, self.is_replica_first)) if counts]


def one_process(device: str | None = None) -> Ranks:
    return Ranks(0, 1, torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu")))


@contextmanager
def join_ranks(layout: Part | None = None, timeout_s: float = 1800.0) -> Iterator[Ranks]:
    """Join the ranks that torchrun started, over NCCL with a GPU and gloo without. ``timeout_s``: of a collective.
    Raises UsageFault if their number does not match the replicas of ``layout`` or the node's GPUs."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        yield replace(one_process(), layout=layout or UNSHARDED)
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
        if on_node > (gpus := torch.cuda.device_count()):
            raise UsageFault(
                f"{on_node} training processes on this node see {gpus} GPUs (CUDA_VISIBLE_DEVICES): each needs its own",
                hint="fewer processes (actor.backend), or CUDA_VISIBLE_DEVICES= to train on the CPU",
            )
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=datetime.timedelta(seconds=timeout_s))
    ranks = Ranks(dist.get_rank(), size, device, dist.group.WORLD, layout or UNSHARDED, nodes)
    try:
        yield ranks
        dist.barrier()  # gloo aborts or hangs if a rank leaves while another is in the last collective
    finally:
        dist.destroy_process_group()
        # The last reference to the group: its threads end here. One that still frees a tensor when the interpreter
        # finalizes would abort the process.
        object.__setattr__(ranks, "group", None)


def require_shared(folder: Path, ranks: Ranks) -> None:
    """Check that all nodes share ``folder``, which all ranks write checkpoints to. Raises UsageFault on all ranks,
    naming the nodes that do not see the first rank's files."""
    if ranks.nodes == 1:
        return
    name: str = ranks.broadcast(f".shared-{secrets.token_hex(8)}")
    if ranks.is_first:
        (folder / name).touch()
    ranks.all_gather(None)  # the file exists now
    missing = sorted(
        {node for node, sees in ranks.all_gather((socket.gethostname(), (folder / name).exists())) if not sees}
    )
    if ranks.is_first:
        (folder / name).unlink()
    if missing:
        raise UsageFault(
            f"{folder} of the first node is not there on {', '.join(missing)}: a run over several nodes has one folder",
            hint="fileroot, or AREAL_HOME for a job, on a file system that all nodes share",
        )


def layout_of(config: Any) -> Part | None:
    """Return the configured layout of the training ranks, if any."""
    engine = getattr(config, "actor", None) or getattr(config, "model", None)
    backend, allocation = getattr(engine, "backend", "") or "", config.allocation_mode or ""
    return train_backend(backend, allocation) if backend or allocation else None


def processes_of(config: Any) -> int | None:
    """Return the number of training processes that ``config`` lays out, if it does."""
    layout = layout_of(config)
    return layout.world_size if layout is not None else None


def require_layout(ranks: Ranks, part: Part, role: str) -> None:
    """Require that all models of a run have the same ranks and rows. Raises UsageFault for a model with other tensor,
    pipeline or context parallelism; its data-parallel size is ignored."""
    wanted, actual = (tuple(getattr(each, name) for name in _MODEL_AXES) for each in (part, ranks.layout))
    if wanted != actual:
        raise UsageFault(
            f"{role}.backend {part} and the run's layout {ranks.layout} cut a model differently",
            hint=f"{role}.backend={ranks.layout}, or leave it out; all models of a run have one layout",
        )


def ensure_layout(config: Any) -> None:
    """Replace the main script of a single process by the ranks of ``config``'s layout. Returns if the processes match
    the layout, or a job controls them. Raises UsageFault for other mismatches."""
    wanted, started = processes_of(config), int(os.environ.get("WORLD_SIZE", "1"))
    if wanted is None or wanted == started or FOLDER_VARIABLE in os.environ:
        return
    script = _main_script()
    if started > 1 or script is None:
        raise UsageFault(
            f"the configuration lays out {wanted} training processes, and {started} "
            f"{'was' if started == 1 else 'were'} started",
            hint=f"areal train run starts as many; or torchrun --nproc-per-node={wanted}, or backend=fsdp:d{started}",
        )
    launch = module_argv("areal.training.launch", "--processes", str(wanted))
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [*launch, "--", "--driver", str(script), "--", *sys.argv[1:]])


def _main_script() -> Path | None:
    """Return the file of ``python driver.py``; None in a notebook, a test or ``python -m``."""
    main = sys.modules["__main__"]
    file = getattr(main, "__file__", None)
    if file is None or getattr(main, "__spec__", None) is not None or not file.endswith(".py"):
        return None
    return Path(file).absolute()
