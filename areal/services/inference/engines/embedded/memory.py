"""How much memory is free where a model computes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_CGROUP = Path("/sys/fs/cgroup")


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
