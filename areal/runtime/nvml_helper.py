"""Run as a script: print what NVML knows as JSON. Separate, so that a driver that hangs only hangs this."""

import json
import sys
from typing import Any


def _processes(nvml: Any, handle: Any) -> list[list[int | None]]:
    try:
        return [[item.pid, item.usedGpuMemory] for item in nvml.nvmlDeviceGetComputeRunningProcesses(handle)]
    except nvml.NVMLError:
        return []  # not supported on this device


def listing() -> dict[str, Any]:
    try:
        import pynvml as nvml
    except ImportError:
        return {"gpus": [], "reason": "the Python package nvidia-ml-py is not installed (pip install nvidia-ml-py)"}
    try:
        nvml.nvmlInit()
        gpus = []
        for index in range(nvml.nvmlDeviceGetCount()):
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            memory = nvml.nvmlDeviceGetMemoryInfo(handle)
            gpus.append(
                {
                    "uuid": _text(nvml.nvmlDeviceGetUUID(handle)),
                    "index": index,
                    "name": _text(nvml.nvmlDeviceGetName(handle)),
                    "total": memory.total,
                    "used": memory.used,
                    "processes": _processes(nvml, handle),
                }
            )
    except nvml.NVMLError as error:
        return {"gpus": [], "reason": f"NVML: {error}"}
    return {"gpus": gpus, "reason": "" if gpus else "NVML lists no GPU"}


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


if __name__ == "__main__":
    json.dump(listing(), sys.stdout)
