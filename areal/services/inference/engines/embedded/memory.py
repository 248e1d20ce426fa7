"""How much memory is free where a model computes."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_M_ARENA_MAX = -8  # of glibc's <malloc.h>
_CGROUP = Path("/sys/fs/cgroup")


def use_one_heap() -> None:
    """Before any thread is there. With a heap a thread, as glibc has it, the weights that an update replaces go back to
    the system, and the next ones cost a page fault every four kilobytes again."""
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc's; elsewhere the allocator decides
    if set_option is not None:
        set_option(_M_ARENA_MAX, 1)


def free_bytes(device: torch.device) -> int:
    """On a CPU, of this machine and within our group's limit."""
    if device.type == "cuda":
        import torch

        return int(torch.cuda.mem_get_info(device)[0])
    meminfo = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(meminfo["MemAvailable"].split()[0]) * 1024
    limit, used = _CGROUP / "memory.max", _CGROUP / "memory.current"
    if limit.is_file() and used.is_file() and (bound := limit.read_text().strip()).isdigit():
        free = min(free, max(0, int(bound) - int(used.read_text())))
    return free
