"""GPUs as NVML lists them, queried in a helper process with a deadline.

A faulty driver can block its callers in the kernel for minutes; a helper process can be abandoned then, this process
could not. Without NVML there are no GPUs, and the listing says why.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from itertools import starmap
from typing import Any

from areal.dataclasses import dataclass
from areal.installation import module_argv
from areal.runtime import procfs

_DEADLINE_S = 20.0
_HIDDEN_USE_BYTES = 1 << 30
_VISIBILITY = ("CUDA_VISIBLE_DEVICES", "SLURM_STEP_GPUS", "SLURM_JOB_GPUS")


@dataclass(frozen=True)
class GpuProcess:
    """A compute process. ``pid`` is the host's: a container may have no process with that number."""

    pid: int
    memory_bytes: int | None


@dataclass(frozen=True)
class Gpu:
    uuid: str
    index: int  # PCI bus order
    name: str
    total_bytes: int
    used_bytes: int
    processes: tuple[GpuProcess, ...] = ()

    @property
    def free_bytes(self) -> int:
        return self.total_bytes - self.used_bytes


@dataclass(frozen=True)
class GpuListing:
    gpus: tuple[Gpu, ...] = ()
    reason: str = ""  # why there are none


def list_gpus(timeout_s: float = _DEADLINE_S) -> GpuListing:
    """Return every GPU of the machine. Never raises."""
    import subprocess

    try:
        helper = subprocess.Popen(
            module_argv("areal.runtime.gpus"),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    except OSError as error:
        return GpuListing(reason=f"the NVML helper cannot be started: {error.strerror}")
    try:
        output, _ = helper.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        helper.kill()  # without waiting: in uninterruptible sleep it may never end
        return GpuListing(reason=f"the NVIDIA driver did not answer within {timeout_s:g} s")
    try:
        record = json.loads(output)
        gpus = (
            Gpu(uuid, index, name, total, used, tuple(starmap(GpuProcess, processes)))
            for uuid, index, name, total, used, processes in record["gpus"]
        )
        return GpuListing(tuple(gpus), record["reason"])
    except (ValueError, KeyError, TypeError):
        return GpuListing(reason=f"the NVML helper failed (exit {helper.returncode})")


def visible(gpus: tuple[Gpu, ...], environment: Mapping[str, str] = os.environ) -> tuple[Gpu, ...]:
    """Return the GPUs that the batch system or the user allows: CUDA_VISIBLE_DEVICES, SLURM_STEP_GPUS, SLURM_JOB_GPUS.

    Each may list indices (PCI bus order) or UUID prefixes; an empty CUDA_VISIBLE_DEVICES hides all GPUs.
    """
    for name in _VISIBILITY:
        if name in environment:
            allowed = [item.strip() for item in environment[name].split(",") if item.strip()]
            indices = {int(item) for item in allowed if item.isdigit()}
            uuids = tuple(item for item in allowed if not item.isdigit())
            gpus = tuple(gpu for gpu in gpus if gpu.index in indices or gpu.uuid.startswith(uuids))
    return gpus


def squatter(gpu: Gpu) -> str | None:
    """Return a description of who uses a GPU without a lease, or None if it is idle."""
    if gpu.processes:
        return ", ".join(_describe(process) for process in gpu.processes)
    if gpu.used_bytes > max(_HIDDEN_USE_BYTES, gpu.total_bytes // 10):
        return f"{gpu.used_bytes / 2**30:.1f} GiB are used by processes that cannot be seen from here"
    return None


def _describe(process: GpuProcess) -> str:
    uid = procfs.owner_uid(process.pid)
    if uid is None:
        return f"pid {process.pid} (outside this container)"
    return f"pid {process.pid} ({procfs.command_line(process.pid)}, user id {uid})"


def wait_for_memory(
    wanted: Mapping[str, int], listing: Callable[[], GpuListing], timeout_s: float = 10.0, period_s: float = 0.25
) -> dict[str, int]:
    """Wait until each GPU has its ``wanted`` free bytes. Return what is still missing at the deadline, by UUID.

    The driver frees memory some time after a process has died; an engine started earlier would fail for lack of memory.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        free = {gpu.uuid: gpu.free_bytes for gpu in listing().gpus}
        missing = {uuid: bytes_ - free[uuid] for uuid, bytes_ in wanted.items() if free.get(uuid, bytes_) < bytes_}
        if not missing or time.monotonic() >= deadline:
            return missing
        time.sleep(period_s)


def _nvml_listing() -> dict[str, object]:
    """Return the fields of every ``Gpu``, in order, as JSON values."""
    try:
        import pynvml as nvml
    except ImportError:
        return {"gpus": [], "reason": "the Python package nvidia-ml-py is not installed (pip install nvidia-ml-py)"}
    gpus = []
    try:
        nvml.nvmlInit()
        for index in range(nvml.nvmlDeviceGetCount()):
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            memory = nvml.nvmlDeviceGetMemoryInfo(handle)
            try:
                found = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
            except nvml.NVMLError:
                found = []  # not supported on this device
            processes = [[process.pid, process.usedGpuMemory] for process in found]
            uuid, name = nvml.nvmlDeviceGetUUID(handle), nvml.nvmlDeviceGetName(handle)
            gpus.append([_text(uuid), index, _text(name), memory.total, memory.used, processes])
    except nvml.NVMLError as error:
        return {"gpus": [], "reason": f"NVML: {error}"}
    return {"gpus": gpus, "reason": "" if gpus else "NVML lists no GPU"}


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


if __name__ == "__main__":
    json.dump(_nvml_listing(), sys.stdout)
